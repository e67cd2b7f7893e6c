"""attention.nn.Attention with a cache, compared with a call of all tokens, in float64, and what it refuses."""

import pytest

torch = pytest.importorskip("torch")
from attention.cache import PagedCache  # noqa: E402
from attention.nn import Attention, AttentionCache  # noqa: E402
from tests.attention.test_nn import DIM, TOKENS, Halved, assert_near, plain  # noqa: E402

CASES = {
    "plain": dict(heads=2, head_dim=16, causal=True),
    "all": dict(heads=4, kv_heads=2, head_dim=16, causal=True, window=(7, None), sink=True, qk_norm=True, rotary=100.0,
                bias=True, softcap=9.0, scale=0.2),
    "fused without a cache": dict(heads=2, kv_heads=1, head_dim=64, causal=True, qk_norm=True, rotary=100.0),
    "a window instead of causal": dict(heads=3, head_dim=16, window=(4, 0), rotary=10_000.0),
    "norms without rotary": dict(heads=2, kv_heads=1, head_dim=16, causal=True, qk_norm=True),
}  # fmt: skip
every_case = pytest.mark.parametrize("name", CASES)
CALL_TOKENS = 11, 0, 1, 1, 3, 4  # new tokens of each call: a prompt, none, single ones, drafts


def layer_of(name, device="cpu", dtype=torch.bfloat16):
    """The module of a case, whose parameters are all random, for calls without gradients."""
    torch.manual_seed(0)
    module = Attention(DIM, **CASES[name], dtype=dtype, device=device).requires_grad_(False)
    for parameter in module.parameters():
        parameter += 0.2 * torch.randn_like(parameter)
    return module


def inputs(batch=2, tokens=TOKENS):
    torch.manual_seed(1)
    return torch.randn(batch, tokens, DIM).bfloat16()


def exact(module, x):
    """The output for all tokens, in float64."""
    twin = Attention(DIM, **CASES["plain"] | arguments_of(module)).requires_grad_(False)
    twin.load_state_dict(module.state_dict())
    causal = twin.options["causal"] or twin.options["window"] is not None
    twin.options["causal"] = causal  # for the formula, a window to the left alone is causal
    return plain(twin.double(), x.cpu().double())


def arguments_of(module):
    sizes = dict(heads=module.heads, kv_heads=module.kv_heads, head_dim=module.head_dim, rotary=module.rotary)
    learned = dict(sink=module.sink is not None, qk_norm=module.q_norm is not None, bias=module.out.bias is not None)
    return sizes | learned | module.options


@every_case
def test_generates_in_pieces(name):
    """A prompt, single tokens and drafts, from a cache, are a call of all tokens; after a reset or a rewind the cache serves
    other tokens."""
    module, x = layer_of(name), inputs()
    cache, expected = module.new_cache(2, TOKENS + 2), exact(module, x)
    assert_near(torch.cat([module(part, cache=cache) for part in x.split(CALL_TOKENS, 1)], 1), expected, name)
    assert cache.lengths.tolist() == [TOKENS] * 2 and cache.max_length == TOKENS + 2
    cache.lengths.sub_(4)
    assert_near(module(x[:, -4:], cache=cache), expected[:, -4:], "after a rewind")
    cache.reset()
    assert_near(module(x, cache=cache), expected, "after a reset")


def test_sequences_of_several_lengths():
    """Prompts are packed; then each sequence goes on from its own length, alone or with several tokens of others."""
    module, x = layer_of("all"), inputs(3)
    cache, expected = module.new_cache(3, TOKENS), exact(module, x)
    packed = lambda *parts: dict(
        x=torch.cat([x[n : n + 1, a:b] for n, (a, b) in enumerate(parts)], 1),
        cu_seqlens=torch.tensor([0, *(b - a for a, b in parts)], dtype=torch.int32).cumsum(0, dtype=torch.int32),
    )
    module(**packed((0, 3), (0, 9), (0, 5)), cache=cache)
    step = module(torch.stack([x[0, 3:4], x[1, 9:10], x[2, 5:6]]), cache=cache)
    for n, length in enumerate((3, 9, 5)):
        assert_near(step[n], expected[n, length : length + 1], n)
    out = module(**packed((4, 12), (10, 11), (6, 6)), cache=cache)
    assert_near(out[0], torch.cat([expected[0, 4:12], expected[1, 10:11]]), "packed")
    assert cache.lengths.tolist() == [12, 11, 6]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.int8, 0.02), (torch.float8_e4m3fn, 0.1)], ids=str)
def test_caches_of_one_byte(dtype, limit):
    """Each token and head has a descale, which calls write; a step of one token is also that of a pool."""
    module, x = layer_of("all"), inputs()
    cache, expected = module.new_cache(2, TOKENS, dtype), exact(module, x)
    out = torch.cat([module(part, cache=cache) for part in x.split(CALL_TOKENS, 1)], 1)
    assert (out - expected).abs().max() < limit * expected.abs().max() and (cache.k_descale > 0).all()
    with pytest.raises(TypeError, match="v_descale: must not be passed with a cache, which sets it"):
        module(x[:, :1], cache=cache, v_descale=cache.v_descale)
    pools = [torch.zeros(12, 4, 2, 16, dtype=dtype) for _ in "kv"]
    paged = PagedCache([pools], sequences=2, tokens=32, scaled=True)
    both = [paged.add(), paged.add()]
    for part, now in zip(*(y.split((11, 1, TOKENS - 12), 1) for y in (x, out))):
        paged.extend(both, part.shape[1])
        pages, _, starts = paged.tables(both)
        at = AttentionCache(*paged.layers[0], starts.clone(), cache.rotary, pages, **paged.descales[0])
        assert_near(module(part, cache=at), now.double(), "in pages")


def test_pages():
    """Keys and values in the pools of a PagedCache, whose sequences share a prompt."""
    module, x = layer_of("all"), inputs(1)
    expected, rotary = exact(module, x), module.new_cache(1, 32).rotary
    pools = torch.zeros(2, 12, 4, 2, 16, dtype=torch.bfloat16)
    paged = PagedCache([(pools[0], pools[1])], sequences=2, tokens=32)

    def call(part, sequences):
        paged.extend(sequences, part.shape[1])
        pages, _, starts = paged.tables(sequences)
        return module(part, cache=AttentionCache(*paged.layers[0], starts.clone(), rotary, pages))

    first = paged.add()
    parts = [call(x[:, :6], [first])]
    both = [first, paged.fork(first)]
    parts += [call(x[:, t : t + 1].expand(2, -1, -1), both) for t in range(6, 10)]
    for n in range(2):
        assert_near(torch.cat([parts[0][0], *[part[n] for part in parts[1:]]]), expected[0, :10], n)


@pytest.mark.parametrize("how", ["class", "epsilon"])
def test_norms_that_are_others(how):
    """Norms that kernels do not support are called before keys are written."""
    module, x = layer_of("fused without a cache"), inputs()
    if how == "class":
        weight, module.k_norm = module.k_norm.weight, Halved(64, 1e-6, dtype=torch.bfloat16).requires_grad_(False)
        module.k_norm.weight.copy_(weight)
    else:
        module.k_norm.eps = 0.5
    cache = module.new_cache(2, TOKENS)
    parts = [module(part, cache=cache) for part in x.split(CALL_TOKENS, 1)]
    assert_near(torch.cat(parts, 1), module(x).double(), how)


def test_options_of_a_call():
    """A mask in Python, of decode's numbers of queries and keys."""
    module, x = layer_of("plain"), inputs()
    cache, keep = module.new_cache(2, TOKENS), torch.tensor([3, 8], dtype=torch.int32)
    module(x[:, :12], cache=cache)
    out = module(x[:, 12:13], cache=cache, mask=lambda b, h, i, j, keep: j >= keep[b], aux=(keep,))
    alone = torch.cat([module(x[n : n + 1, start:13])[:, -1:] for n, start in enumerate(keep)])
    assert_near(out, alone.double(), "mask")


def test_autocast():
    module, x = layer_of("all", dtype=torch.float32), inputs()
    cache = module.new_cache(2, TOKENS)
    assert cache.k.dtype == torch.bfloat16 and module.new_cache(1, 8, torch.float16).v.dtype == torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.cat([module(part.float(), cache=cache) for part in x.split(CALL_TOKENS, 1)], 1)
    assert_near(out, exact(module, x), "out")


def test_compiles_whole():
    module, x = layer_of("fused without a cache"), inputs()
    cache, expected = module.new_cache(2, TOKENS), exact(module, x)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    parts = [compiled(part, cache=cache) for part in (x[:, :12], x[:, 12:13], x[:, 13:14])]
    assert_near(torch.cat(parts, 1), expected[:, :14], "compiled")
    assert cache.lengths.tolist() == [14, 14]


REFUSED = {  # name: (arguments of the module, options of the call, the error)
    "causal": (dict(heads=3, window=(3, None)), {}, "^cache: needs a causal layer, .*: causal=False, window="),
    "positions": ({}, dict(positions=torch.arange(4)), "^positions: must be None with a cache"),
    "sequences": ({}, dict(cache=lambda layer: layer.new_cache(3, 8)), r"^cache: must be of 2 sequences, as new_cache\(2, "),
    "packed": ({}, dict(cu_seqlens=torch.tensor([0, 2, 3, 4])), r"^cache: must be of 3 sequences"),
    "heads": (
        dict(heads=3, head_dim=24, causal=True),
        {},
        r"^cache: k must be \(2, tokens, 3, 24\): cache.k.shape",
    ),
    "rotary": (
        dict(heads=3, rotary=10.0, causal=True),
        {},
        "^cache: must have rotary tables .*: rotary=10.0, ",
    ),
    "room": (
        {},
        dict(cache=lambda layer: layer.new_cache(2, 3)),
        r"^cache: has room for 3 tokens a sequence: x.shape=\(2, 4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    arguments, options, words = REFUSED[name]
    usual = Attention(DIM, 3, head_dim=16, causal=True, dtype=torch.bfloat16)
    module = Attention(DIM, **arguments, dtype=torch.bfloat16) if arguments else usual
    cache = options.get("cache", lambda layer: usual.new_cache(2, 8))(module)
    with torch.no_grad(), pytest.raises(ValueError, match=words):
        module(torch.zeros(2, 4, DIM).bfloat16(), **options | {"cache": cache})
    assert not cache.lengths.any()


def test_what_fits_no_call():
    """Gradients, options that the cache sets, sizes that are none, and on the host more tokens than there is room for."""
    module, x = Attention(DIM, 3, causal=True, dtype=torch.bfloat16), inputs(1, 5)
    cache = module.new_cache(1, 8)
    with pytest.raises(RuntimeError, match=r"^cache: .* call the layer under torch.no_grad\(\)"):
        module(x, cache=cache)
    with torch.no_grad(), pytest.raises(TypeError, match="^lengths: must not be passed with a cache, which sets it"):
        module(x, cache=cache, lengths=cache.lengths)
    with torch.no_grad(), pytest.raises(TypeError, match="^cache: must be what .* of the class AttentionCache, not tuple"):
        module(x, cache=(cache.k, cache.v))
    with torch.no_grad(), pytest.raises(TypeError, match="return_lse: is not an argument of the module"):
        module(x, cache=cache, return_lse=True)
    for sizes in (0, 8), (1, 0), (1, 2.0), (True, 8):
        with pytest.raises(ValueError, match="^(batch_size|max_length): must be a positive integer"):
            module.new_cache(*sizes)
    with torch.no_grad():
        module(x, cache=cache)
        with pytest.raises(ValueError, match="has room for 8 keys"):
            module(x, cache=cache)
    assert cache.lengths.tolist() == [5]


@pytest.mark.gpu
@every_case
def test_on_the_card(name):
    """A prompt, then steps of one CUDA graph, which the cache serves as it grows."""
    module, x = layer_of(name, "cuda"), inputs().cuda()
    cache, expected = module.new_cache(2, TOKENS), exact(module, x)
    parts, token = [module(x[:, :12], cache=cache)], x[:, 12:13].clone()
    parts.append(module(token, cache=cache))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(token, cache=cache)
    for t in range(13, TOKENS):
        token.copy_(x[:, t : t + 1])
        graph.replay()
        parts.append(out.clone())
    assert_near(torch.cat(parts, 1).cpu(), expected, name)
    assert cache.lengths.tolist() == [TOKENS] * 2


def test_a_cache_prints_its_sizes():
    """What print shows of a cache is one line."""
    said = repr(layer_of("plain").new_cache(2, 32))
    assert said == "AttentionCache(2 sequences, max_length=32, k.shape=(2, 32, 2, 16), torch.bfloat16)"
