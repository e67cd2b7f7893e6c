"""compat/huggingface: small transformers models with random weights, compared with eager attention in float32, on torch's CPU
wheel through the interpreter. Skipped without torch or transformers."""

import itertools
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402
from transformers_models import (  # noqa: E402
    NEW,
    PROMPT,
    SOFTMAX,
    check_close,
    check_generates,
    check_trains,
    models,
    prompts,
    record_calls,
)

from attention.compat import huggingface  # noqa: E402
from attention.compat.huggingface_masks import create_mask, find_documents, read_mask  # noqa: E402

every_model = pytest.mark.parametrize("name", SOFTMAX)


@pytest.fixture
def calls(monkeypatch):
    """The names of our functions, call by call."""
    return record_calls(monkeypatch)


@every_model
def test_generates_as_eager(name, calls):
    check_generates(name, "cpu", disable_compile=True)
    few = name == "deepseek_v3"  # its 20 tokens of single heads are few enough
    assert calls.count("forward") == 2 * (not few) and calls.count("decode") == 2 * (NEW - 1 + few)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_generates_with_a_static_cache(name, padded):
    check_generates(name, "cpu", padded=padded, cache_implementation="static", disable_compile=True)


@every_model
def test_trains_as_eager(name):
    check_trains(name, "cpu", padded=name in ("llama", "gpt_oss"))


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])  # whose masks hear of positions, and do not
@pytest.mark.parametrize("cached", [False, True])  # where no mask hears of them
def test_packed_sequences_are_apart(name, cached):
    """Positions that restart delimit documents, and so do cu_seqlens; each document gives what it gives alone."""
    ours, low, exact = models(name)
    ids, _ = prompts(padded=False)
    lengths = 9, PROMPT - 9
    positions = torch.cat([torch.arange(n) for n in lengths])[None].expand(2, -1)
    with torch.no_grad():
        document_logits = [torch.cat([m(x, use_cache=False).logits for x in ids.split(lengths, 1)], 1) for m in (low, exact)]
        check_close(ours(ids, position_ids=positions, use_cache=cached).logits, *document_logits)
        ends = torch.tensor([0, 9, PROMPT], dtype=torch.int32)
        call_options = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=11, max_length_k=11, use_cache=cached)
        check_close(ours(ids[:1], position_ids=positions[:1], **call_options).logits, *[x[:1] for x in document_logits])


def test_positions_are_read_once(monkeypatch):
    """The host reads positions once for all layers, until they are written to; in inference mode torch counts no writes. While
    graphs are recorded nothing is read."""
    reads, positions = [], torch.tensor([[0, 1, 2, 0, 1, 5, 6, 6]])
    monkeypatch.setattr(torch.Tensor, "any", lambda x, any=torch.Tensor.any: reads.append(x) or any(x))
    assert find_documents(positions).tolist() == find_documents(positions).tolist() == [[0, 0, 0, 1, 1, 1, 1, 2]]
    assert len(reads) == 1 and find_documents(positions).dtype == torch.int32
    positions.copy_(torch.arange(8))
    assert find_documents(positions) is find_documents(positions) is None and len(reads) == 2
    with torch.inference_mode():
        positions = torch.arange(5, 13)[None]
        assert find_documents(positions) is None
        positions[:, 4:] = torch.arange(4)
        assert find_documents(positions).tolist() == [[0] * 4 + [1] * 4]
    reads.clear()
    traced = torch.compile(lambda x: find_documents(x) + 0, fullgraph=True, backend="eager")
    assert traced(torch.arange(8)[None]).tolist() == [[0] * 8] and not reads


def test_what_positions_say_and_do_not_say():
    """Positions are ignored after cached keys, with other shapes than the tokens', and beside the caller's own mask."""
    q, k, v = (torch.randn(1, heads, 8, 16).bfloat16() for heads in (4, 2, 2))
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    layer = dict(is_causal=True)
    whole, apart = attended(layer, q, k, v), attended(layer, q, k, v, position_ids=packed)
    each = [attended(layer, *(x[:, :, part] for x in (q, k, v))) for part in (slice(4), slice(4, 8))]
    torch.testing.assert_close(apart, torch.cat(each, 1), atol=0.02, rtol=0.02)
    twice = [x.expand(2, -1, -1, -1) for x in (q, k, v)]  # of one row of positions, as models make them
    assert torch.equal(attended(layer, *twice, position_ids=packed), apart.expand(2, -1, -1, -1))
    visible = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    assert torch.equal(attended(layer, q, k, v, visible, position_ids=packed), attended(layer, q, k, v, visible))
    ours = create_mask(1, 8, 8, mask_function=FUNCTIONS["chunked of 20"])
    torch.testing.assert_close(attended(layer, q, k, v, ours, position_ids=packed), apart, atol=0.02, rtol=0.02)
    for positions in packed[0], packed.expand(3, 1, 8), packed[:, :4], torch.arange(8)[None]:
        assert torch.equal(attended(layer, q, k, v, position_ids=positions), whole)
    behind = attended(layer, q[:, :, 4:], k, v, position_ids=packed[:, 4:])
    torch.testing.assert_close(behind, whole[:, 4:], atol=0.02, rtol=0.02)


@pytest.mark.parametrize("of", ["holes", "truth values", "truth values of heads", "floats"])
def test_other_masks_are_served(of):
    ours, low, exact = models("llama")
    ids, mask = prompts()
    if of == "holes":
        mask[0, 5:8] = mask[1, 12] = 0
        masks = [mask] * 3
    else:
        visible = torch.ones(2, 4 if of.endswith("heads") else 1, PROMPT, PROMPT, dtype=torch.bool).tril()
        visible[0, -1, 10:, 4] = visible[1, 0, 8:, 2:6] = False
        floats = torch.where(visible, 0.0, -1e30)
        masks = [floats.bfloat16() if of == "floats" else visible, floats.bfloat16(), floats]
    rows = mask == 1 if of == "holes" else mask >= 0
    with torch.no_grad():
        check_close(*[m(ids, attention_mask=x, use_cache=False).logits[rows] for m, x in zip((ours, low, exact), masks)])


def attended(layer, q, k, v, mask=None, **options):
    """The result of the layer's function."""
    out, weights = huggingface.attend(SimpleNamespace(**layer), q, k, v, mask, **options)
    assert weights is None
    return out.float()


def test_what_a_layer_says_by_itself():
    """Without a mask the layer decides what is visible: all keys, or a window; and it adds a bias."""
    q, k, v = (torch.randn(2, heads, 20, 16).bfloat16() for heads in (4, 2, 2))
    k, v = k[:, :, :12], v[:, :, :12]  # keys of another sequence
    bias = torch.randn(1, 4, 20, 12)
    scores = q.float() @ k.float().repeat_interleave(2, 1).mT * 0.3
    wide = v.float().repeat_interleave(2, 1)
    for added in None, bias:
        expected = (scores + (0 if added is None else added)).softmax(-1) @ wide
        actual = attended(dict(is_causal=False), q, k, v, scaling=0.3, position_bias=added)
        torch.testing.assert_close(actual, expected.transpose(1, 2), atol=0.02, rtol=0.02)
    far = torch.arange(12)[:, None] - torch.arange(12)
    expected = scores[:, :, :12].masked_fill((far < 0) | (far > 2), -torch.inf).softmax(-1) @ wide
    for tokens in 12, 1:  # forward, decode
        actual = attended(dict(is_causal=True), q[:, :, 12 - tokens : 12], k, v, scaling=0.3, sliding_window=3)
        torch.testing.assert_close(actual, expected.transpose(1, 2)[:, -tokens:], atol=0.02, rtol=0.02)


@pytest.mark.parametrize("mask", [None, "static cache", "floats"])
def test_steps_with_a_bias_are_decoded(calls, mask):
    """A position bias as T5's, of a dynamic or a static cache, and a mask of floats. A prompt takes the part that is in use."""
    k, v = torch.randn(2, 2, 2, 60, 16).bfloat16()
    for tokens, end, function in (1, 12, "decode"), (3, 12, "decode"), (40, 50, "forward"):
        q, bias = torch.randn(2, 4, tokens, 16).bfloat16(), torch.randn(1, 4, tokens, 60)
        seen = torch.arange(60) <= torch.arange(end - tokens, end)[:, None]
        scores = q.float() @ k.float().repeat_interleave(2, 1).mT * 0.25 + bias
        expected = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.float().repeat_interleave(2, 1)).transpose(1, 2)
        if mask == "floats":
            actual = attended(
                dict(is_causal=False), q, k, v, torch.zeros(2, 1, tokens, 60).masked_fill(~seen, -1e30), position_bias=bias
            )
        elif mask == "static cache":
            ours = create_mask(2, tokens, 60, q_offset=end - tokens)
            actual = attended(dict(is_causal=True), q, k, v, ours, position_bias=bias)
        else:
            actual = attended(dict(is_causal=True), q, k[:, :, :end], v[:, :, :end], position_bias=bias[..., :end])
        assert calls.pop() == function and not calls
        torch.testing.assert_close(actual, expected, atol=0.03, rtol=0.02)


def test_norms_in_float32_are_rounded_and_the_rest_is_refused():
    q, k, v = torch.randn(3, 1, 2, 4, 16).bfloat16()
    actual = attended({}, q.float(), k.float(), v)
    assert torch.equal(actual, attended({}, q, k, v))
    for refused in dict(output_attentions=True), dict(cache=object()), dict(indices=q), dict(block_indices=q):
        with pytest.raises(NotImplementedError, match=f"{next(iter(refused))}: is not supported"):
            attended({}, q, k, v, **refused)


# ---- masks -----------------------------------------------------------------------------------------------------------
def opened(mask, queries, keys, place, begin):
    """One of our masks as sdpa's: which keys each query sees."""
    if mask is not None and mask.dtype in (torch.bool, torch.uint8):
        return mask.view(torch.bool)
    info = read_mask(mask)
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    end = torch.full((2,), keys) if info.end is None else info.end
    past = i - queries + end[:, None, None, None] - j  # how far a key is behind a query
    see = past >= 0
    if info.window:
        see = see & (past < info.window)
    if info.first is not None:
        see = see & (j >= info.first[:, None, None, None])
    if info.documents is not None:
        see = see & (info.documents[:, None, :, None] == info.documents[:, None, None])
    return see


MASKS = {"all": ((), ()), "left": ((0, 3), ()), "right": ((), (2, 0)), "both": ((2, 0), (0, 3)), "hole": ((), (), (5, 7))}
FUNCTIONS = {
    "chunked of 20": masking_utils.chunked_causal_mask_function(20, torch.zeros(2, dtype=torch.long)),
    "causal": masking_utils.causal_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(6),
    "window of one": masking_utils.sliding_window_causal_mask_function(1),
    "wide": masking_utils.sliding_window_causal_mask_function(500),
    "chunked": masking_utils.chunked_causal_mask_function(5, torch.zeros(2, dtype=torch.long)),
    "both ways": masking_utils.bidirectional_mask_function,
}


@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_masks_say_what_transformers_masks_say(function, padding):
    """For prompts, further tokens, static caches that are not full, and sliding ones that begin late; padding queries
    excluded."""
    for queries, place, room, begin, static in [
        (12, 0, 0, 0, False), (1, 11, 0, 0, False), (4, 8, 0, 0, False), (40, 0, 0, 0, False), (12, 0, 9, 0, True),
        (1, 11, 9, 0, True), (40, 8, 5, 0, True), (3, 9, 0, 6, False),
    ]:  # fmt: skip
        call_options, keys = place + queries, place + queries + room - begin
        tokens = torch.ones(2, call_options, dtype=torch.bool)
        left, right, *hole = MASKS[padding]
        for n, count in enumerate(left):
            tokens[n, :count] = False
        for n, count in enumerate(right):
            tokens[n, call_options - count :] = False
        for first, last in hole:
            tokens[0, first:last] = False
        args = dict(mask_function=FUNCTIONS[function], attention_mask=None if padding == "all" and static else tokens)
        at = torch.tensor(place) if static else place
        result = create_mask(2, queries, keys, at, begin, **args)
        theirs = masking_utils.sdpa_mask(2, queries, keys, at, begin, allow_is_causal_skip=False, **args)
        counts = tokens[:, None, place:, None] & theirs.any(-1, keepdim=True)
        assert torch.equal(opened(result, queries, keys, place, begin) & counts, theirs & counts), (queries, place, room, begin)
        run = (
            function in ("causal", "window", "wide")
            and padding != "hole"
            and not (padding in ("right", "both") and queries < 5)
        )
        if run:
            assert result is None or result.dtype == torch.int32


def test_masks_of_documents():
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 1, 1]])
    for window in None, 3:
        function = FUNCTIONS["causal"] if window is None else masking_utils.sliding_window_causal_mask_function(window)
        function = masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(documents))
        result = create_mask(2, 8, 8, mask_function=function)
        assert result.shape == (2, window or 1, 5, 8) and torch.equal(
            opened(result, 8, 8, 0, 0), masking_utils.sdpa_mask(2, 8, 8, mask_function=function, allow_is_causal_skip=False)
        )


def test_masks_are_read_as_they_were_made():
    """Whether read from the tensor, as a compiled graph does, or from the attribute beside it; it has no elements for
    queries."""
    left = torch.ones(2, 50, dtype=torch.bool)
    left[1, :4] = False
    window = FUNCTIONS["window"]
    for queries, function, tokens in itertools.product((1, 50), (FUNCTIONS["causal"], window), (None, left)):
        result = create_mask(2, queries, 50, 50 - queries, mask_function=function, attention_mask=tokens)
        if result is None:
            assert queries == 50 and function is not window and tokens is None
            continue
        assert result.ndim == 4 and result.untyped_storage().nbytes() <= 32
        from_attribute = read_mask(result)
        del result.info
        from_tensor = read_mask(result)
        assert from_attribute.window == from_tensor.window
        for one, other in zip(from_attribute[1:4], from_tensor[1:4]):
            assert one is other is None or torch.equal(one, other)


def test_compiled_whole():
    """A step with its mask is one graph, which is reused for all steps; so is a model without a cache."""
    ours = models("llama")[0]
    ids, mask = prompts()
    compiled = torch.compile(ours.forward, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for inputs in {}, dict(attention_mask=mask):
            one, other = (f(ids, use_cache=False, **inputs).logits[mask == 1] for f in (compiled, ours))
            torch.testing.assert_close(one, other)
    call_options = dict(
        attention_mask=mask, max_new_tokens=NEW, do_sample=False, cache_implementation="static", disable_compile=True
    )
    expected = ours.generate(ids, **call_options)
    with torch._dynamo.config.patch(recompile_limit=3):
        torch._dynamo.reset()
        ours.forward = compiled
        assert torch.equal(ours.generate(ids, **call_options), expected)


def test_compiled_packed():
    """A graph cannot read positions, and torch.compile does not show what gpt-oss' masks capture: documents are still
    separate."""
    ours, ids = models("gpt_oss")[0], prompts(padded=False)[0]
    compiled = torch.compile(ours.forward, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for positions in torch.arange(PROMPT)[None] % 9, torch.arange(PROMPT)[None]:
            one, other = (f(ids, position_ids=positions.clone(), use_cache=False).logits for f in (compiled, ours))
            torch.testing.assert_close(one, other)


# ---- on the card: few, for each compiles kernels of its own ------------------------------------------------------------
@pytest.mark.gpu
def test_generates_on_the_card():
    check_generates("gpt_oss", "cuda", 150, disable_compile=True)


@pytest.mark.gpu
def test_trains_on_the_card():
    """Without experts: among 150 tokens some would be routed differently by a last bit, and so would their gradients."""
    check_trains("llama", "cuda", tokens=150)
