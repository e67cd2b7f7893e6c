"""attention/compat/flash_attn.py and flash_attn_interface.py: each name and default, and the option that each argument
becomes."""

import ml_dtypes
import numpy as np
import pytest
from eager import arguments, attend, window

import attention
from attention.compat import flash_attn, flash_attn_interface

REST = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, " \
    "deterministic=False, return_attn_probs=False"  # fmt: skip
ENDS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
TUNING = "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, " \
    "sm_margin=0, return_attn_probs=False"  # fmt: skip
SCALES = "q_descale=None, k_descale=None, v_descale=None"
CACHES, ROTARY = "q, k_cache, v_cache, k=None, v=None", "rotary_cos=None, rotary_sin=None"
WHERE = "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None"
SIGNATURES = {  # flash_attn 2.8, flash_attn_interface 3.0
    (flash_attn, "flash_attn_func"): f"q, k, v, {REST}",
    (flash_attn, "flash_attn_kvpacked_func"): f"q, kv, {REST}",
    (flash_attn, "flash_attn_qkvpacked_func"): f"qkv, {REST}",
    (flash_attn, "flash_attn_varlen_func"): f"q, k, v, {ENDS}, {REST}, block_table=None",
    (flash_attn, "flash_attn_varlen_kvpacked_func"): f"q, kv, {ENDS}, {REST}",
    (flash_attn, "flash_attn_varlen_qkvpacked_func"): f"qkv, cu_seqlens, max_seqlen, {REST}",
    (flash_attn_interface, "flash_attn_func"): f"q, k, v, softmax_scale=None, causal=False, qv=None, {SCALES}, {TUNING}",
    (
        flash_attn_interface,
        "flash_attn_qkvpacked_func",
    ): f"qkv, softmax_scale=None, causal=False, {SCALES}, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False",
    (flash_attn_interface, "flash_attn_varlen_func"): f"q, k, v, {ENDS}, seqused_q=None, seqused_k=None, softmax_scale=None, "
    f"causal=False, qv=None, {SCALES}, {TUNING}",
    (
        flash_attn,
        "flash_attn_with_kvcache",
    ): f"{CACHES}, {ROTARY}, {WHERE}, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
    (flash_attn_interface, "flash_attn_with_kvcache"): f"{CACHES}, qv=None, {ROTARY}, {WHERE}, page_table=None, "
    "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
    f"{SCALES}, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
    "rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
}
BOTH = pytest.mark.parametrize("module", [flash_attn, flash_attn_interface], ids=["2", "3"])


def close(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


def swapped(*arrays):
    return [x.swapaxes(1, 2) for x in arrays]


@pytest.mark.parametrize("home", SIGNATURES, ids=lambda home: f"{home[0].__name__.rpartition('.')[2]}.{home[1]}")
def test_signatures(home):
    module, name = home
    assert arguments(getattr(module, name)) == SIGNATURES[home]


@BOTH
@pytest.mark.parametrize("window_size", [8, (8,), None])
def test_window_size_is_a_pair(module, window_size, draw):
    x = draw((2, 5, 4, 8))
    with pytest.raises(TypeError, match=r"^window_size: must be \(left, right\), -1 where it is open: window_size="):
        module.flash_attn_func(x, x, x, window_size=window_size)


@BOTH
@pytest.mark.parametrize("ends", [(-1, -1), (2, -1), (-1, 1), (2, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_scores(module, ends, causal, calls, draw):
    q, k, v = draw((2, 5, 4, 8)), draw((2, 7, 2, 8)), draw((2, 7, 2, 8))
    out, lse, *_ = module.flash_attn_func(
        q, k, v, softmax_scale=0.4, causal=causal, window_size=ends, softcap=1.5, return_attn_probs=True, deterministic=True
    )
    see = window(5, 7, *ends) & (window(5, 7, -1, 0) if causal else True)
    assert calls[-1]["deterministic"]
    expected = attend(*swapped(q, k, v), see=see, change=lambda s: 1.5 * np.tanh(s / 1.5), scale=0.4)
    close((out.swapaxes(1, 2), lse), expected)


def test_plain_calls_are_plain(calls, draw):
    """Defaults pass no option, so that a plain call takes the kernel without variants."""
    q = draw((1, 3, 2, 8))
    assert isinstance(flash_attn.flash_attn_func(q, q, q), np.ndarray)
    assert flash_attn_interface.flash_attn_func(q, q, q, num_splits=3, pack_gqa=True, sm_margin=4).shape == q.shape
    for call_options in calls:
        asked = {
            name
            for name, x in call_options.items()
            if x is not None and name not in ("q", "k", "v", "aux", "norm_eps", "layout")
        }
        assert not any(call_options[name] for name in asked)


@pytest.mark.parametrize("rows", [(), (2,)])
def test_alibi(rows, calls, draw):
    q, k = draw((2, 3, 2, 8)), draw((2, 5, 2, 8))
    slopes = np.abs(draw((*rows, 2)))
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, k, causal=True, alibi_slopes=slopes, return_attn_probs=True)
    far = np.abs(np.arange(5) - (np.arange(3)[:, None] + 2))
    expected = attend(*swapped(q, k, k), see=window(3, 5, -1, 0), add=-np.broadcast_to(slopes, (2, 2))[..., None, None] * far)
    close((out.swapaxes(1, 2), lse), expected)
    assert probabilities is None


def test_dropout_draws_a_seed(calls, draw):
    q = draw((1, 3, 2, 8))
    for _ in range(2):
        np.random.seed(5)
        flash_attn.flash_attn_func(q, q, q, 0.25)
    flash_attn.flash_attn_func(q, q, q, 0.25)
    assert [call_options["dropout"] for call_options in calls] == [0.25] * 3
    assert calls[0]["seed"] == calls[1]["seed"] != calls[2]["seed"]


def test_dropout_is_drawn_anew_by_a_graph():
    """torch.compile draws a seed, and the backward pass drops the same weights as the forward pass."""
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 9, 2, 64).bfloat16().requires_grad_()
    graph = torch.compile(lambda q: flash_attn.flash_attn_func(q, q, q, 0.5), fullgraph=True, backend="aot_eager")
    one, other = graph(q), graph(q)
    assert not torch.equal(one, other)
    torch.manual_seed(5)
    seen = torch.randint(2**31, (1,))
    torch.manual_seed(5)
    (outputs,) = torch.autograd.grad(graph(q).sum(), q)
    (reference_values,) = torch.autograd.grad(attention.forward(q, q, q, dropout=0.5, seed=seen).sum(), q)
    torch.testing.assert_close(outputs, reference_values, rtol=2**-6, atol=2**-8)


@pytest.mark.gpu
def test_dropout_is_drawn_anew_by_a_cuda_graph():
    """Each replay draws a new seed from torch's generator of that GPU."""
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 64, 2, 64, device="cuda").bfloat16()
    flash_attn.flash_attn_func(q, q, q, 0.5)  # which compiles
    attention.forward(q, q, q, dropout=0.5, seed=torch.tensor([3], device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn.flash_attn_func(q, q, q, 0.5)
    graph.replay()
    before = out.clone()
    graph.replay()
    assert not torch.equal(out, before) and out.isfinite().all()


def test_dropout_is_not_drawn_once_for_all_calls():
    jax = pytest.importorskip("jax")
    q = jax.numpy.ones((1, 3, 2, 8), "bfloat16")
    dropped = lambda q: flash_attn.flash_attn_func(q, q, q, 0.25).astype("float32").sum()
    assert jax.grad(dropped)(q).shape == q.shape
    with pytest.raises(NotImplementedError, match="^dropout_p: .* what JAX traces would drop the same in every call"):
        jax.jit(jax.grad(dropped))(q)


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_packed_arrays(name, calls, draw):
    """The functions with packed arrays call the one with three arrays."""
    three, packed = getattr(flash_attn, name), name.replace("_func", "_{}packed_func")
    q, k, v = draw((3, 2, 6, 2, 8)) if name == "flash_attn_func" else draw((3, 12, 2, 8))
    ends = () if name == "flash_attn_func" else (np.array([0, 5, 12]), np.array([0, 5, 12]), 7, 7)
    options = (0.0, 0.3, True, (3, -1), 2.0, np.array([0.5, 1.0]), True, True)
    expected = three(q, k, v, *ends, *options)[:2]
    kv, qkv = np.stack([k, v], -3), np.stack([q, k, v], -3)
    close(getattr(flash_attn, packed.format("kv"))(q, kv, *ends, *options)[:2], expected)
    close(getattr(flash_attn, packed.format("qkv"))(qkv, *ends[::2], *options)[:2], expected)


def test_packed_heads(calls, draw):
    """FlashAttention-3's qkv: an axis of three, or heads of keys and values after those of queries."""
    q, k, v = draw((1, 4, 4, 8)), draw((1, 4, 2, 8)), draw((1, 4, 2, 8))
    actual = flash_attn_interface.flash_attn_qkvpacked_func(np.concatenate([q, k, v], 2), causal=True, num_heads_q=4)
    close([actual], [flash_attn_interface.flash_attn_func(q, k, v, causal=True)])
    actual = flash_attn_interface.flash_attn_qkvpacked_func(np.stack([q, q, q], 2), 0.3)
    close([actual], [flash_attn_interface.flash_attn_func(q, q, q, 0.3)])


@BOTH
def test_packed_sequences(module, calls, draw):
    """Each sequence equals the sequence alone, in FlashAttention's shapes: no batch, lse (H, total)."""
    q, k, v = draw((7, 4, 8)), draw((9, 2, 8)), draw((9, 2, 6))
    ends, ends_k = np.array([0, 3, 7]), np.array([0, 5, 9])
    out, lse, *_ = module.flash_attn_varlen_func(q, k, v, ends, ends_k, 4, 5, causal=True, return_attn_probs=True)
    out_without_lse = module.flash_attn_varlen_func(q, k, v, ends, ends_k, 4, 5, causal=True)
    assert out.shape == (7, 4, 6) and lse.shape == (4, 7) and (out_without_lse == out).all()
    for (a, b), (c, d) in (((0, 3), (0, 5)), ((3, 7), (5, 9))):
        of_one, its_lse = attend(*swapped(q[None, a:b], k[None, c:d], v[None, c:d]), see=window(b - a, d - c, -1, 0))
        close((out[a:b].swapaxes(0, 1)[None], lse[None, :, a:b]), (of_one, its_lse))


def test_keys_in_use(calls, draw):
    q, k = draw((4, 2, 8)), draw((8, 2, 8))
    ends, ends_k, used = np.array([0, 2, 4]), np.array([0, 4, 8]), np.array([3, 2])
    k[3] = k[6:] = np.nan
    out = flash_attn_interface.flash_attn_varlen_func(q, k, k, ends, ends_k, 2, 4, seqused_k=used, causal=True)
    for n in range(2):
        mine, keys = slice(2 * n, 2 * n + 2), slice(4 * n, 4 * n + used[n])
        expected, _ = attend(*swapped(q[None, mine], k[None, keys], k[None, keys]), see=window(2, used[n], -1, 0))
        close([out[mine].swapaxes(0, 1)[None]], [expected])


REFUSED = [
    (flash_attn, "flash_attn_func", {"return_attn_probs": True, "dropout_p": 0.1}, "return_attn_probs: .* leave it out"),
    (
        flash_attn,
        "flash_attn_varlen_func",
        {"block_table": np.zeros((1, 1)), "dropout_p": 0.1},
        "dropout_p: .* gather the pages",
    ),
    (flash_attn_interface, "flash_attn_func", {"qv": np.zeros(1)}, "qv: .* concatenate"),
    (flash_attn_interface, "flash_attn_func", {"attention_chunk": 64}, "attention_chunk: .* mask=lambda"),
    (flash_attn_interface, "flash_attn_varlen_func", {"seqused_q": np.ones(1)}, "seqused_q: .* leave the unused"),
]


@pytest.mark.parametrize(
    ("module", "name", "options", "words"), REFUSED, ids=lambda x: next(iter(x)) if isinstance(x, dict) else ""
)
def test_what_is_refused(module, name, options, words, calls):
    arrays = (
        SIGNATURES[module, name]
        .partition(", softmax_scale")[0]
        .partition(", dropout_p")[0]
        .partition(", seqused")[0]
        .split(", ")
    )
    with pytest.raises(NotImplementedError, match=words):
        getattr(module, name)(*[None] * len(arrays), **options)
    assert not calls


def test_fp8_has_descales():
    """Descales of each batch or sequence, and each key head."""
    q, k, v = np.random.default_rng(1).standard_normal((3, 1, 5, 2, 64), np.float32).astype(ml_dtypes.float8_e4m3fn)
    call_options = {f"{name}_descale": np.float32([[0.5, n]]) for n, name in enumerate("qkv", 1)}
    reference_values = attention.forward(q, k, v, causal=True, **call_options)
    actual = [flash_attn_interface.flash_attn_func(q, k, v, causal=True, **call_options)]
    actual.append(flash_attn_interface.flash_attn_qkvpacked_func(np.stack([q, k, v], 2), causal=True, **call_options))
    ends = np.int32([0, 5])
    packed = flash_attn_interface.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 5, 5, causal=True, **call_options)
    for x in (*actual, packed[None]):
        np.testing.assert_array_equal(x.astype(float), reference_values.astype(float))


ON_THE_CARD = [{}, {"causal": True}, {"window_size": (50, 0)}, {"causal": True, "softcap": 5.0}]


def peer(name, options):
    """FlashAttention-2's function, or FlashAttention-4's from CuTe, which has other names and open ends."""
    if name == "2":
        theirs = pytest.importorskip("flash_attn")
        return lambda *args: getattr(theirs, f"flash_attn_{'varlen_' * (len(args) > 3)}func")(
            *args, **options, return_attn_probs=True
        )[:2]
    theirs, ends = pytest.importorskip("flash_attn.cute.interface"), options.get("window_size", (None, None))
    more = options | {"window_size": ends, "return_lse": True}
    names = "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k".split()
    return lambda *args: getattr(theirs, f"flash_attn_{'varlen_' * (len(args) > 3)}func")(**dict(zip(names, args)), **more)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["2", "CuTe"])
@pytest.mark.parametrize("options", ON_THE_CARD, ids=str)
def test_beside_the_library_on_the_card(options, name):
    """Both round to bfloat16; the accuracy of forward is tested elsewhere."""
    torch, theirs = pytest.importorskip("torch"), peer(name, options)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, s, h, 64, device="cuda", dtype=torch.bfloat16) for s, h in ((200, 4), (333, 2), (333, 2)))
    ends, ends_k = (torch.tensor(x, device="cuda", dtype=torch.int32) for x in ([0, 20, 200], [0, 300, 333]))
    packed = q[0], k[0], v[0], ends, ends_k, 180, 300
    for ours, args in (flash_attn.flash_attn_func, (q, k, v)), (flash_attn.flash_attn_varlen_func, packed):
        (out, lse, _), (expected, its_lse) = ours(*args, **options, return_attn_probs=True), theirs(*args)
        torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-7)
        sees = torch.isfinite(lse) & torch.isfinite(its_lse)
        torch.testing.assert_close(lse[sees], its_lse[sees], rtol=1e-3, atol=1e-3)
