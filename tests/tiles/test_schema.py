"""tiles/calls/schema.py: what a table says, what a valid call becomes; a refusal names the argument and prints the values."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiles.calls.argument import HOLDS, ROLES, Argument
from tiles.calls.schema import ORDER, Schema
from tiles.launching.arrays import Form, Operand, c_ordered
from tiles.launching.frameworks import describe
from tiles.launching.tensor_maps import STRIDE_END

bf16, f16, f32 = ml_dtypes.bfloat16, np.float16, np.float32
EXTENTS = dict(batch=2, seqlen_q=5, seqlen_k=7, heads=6, heads_k=3, key_dim=16, value_dim=8, sequences=2, ends=4)
Q, K = ("batch", "seqlen_q", "heads", "key_dim"), ("batch", "seqlen_k", "heads_k", "key_dim")
DECAY, SCORES, STATE = Q[:3], ("batch", "heads", "seqlen_q"), ("sequences", "heads", "key_dim", "value_dim")
HEADS, ENDS = ("heads",), ("ends",)
ATTEND = Schema(
    "attend",
    """
    q           (batch, seqlen_q, heads, key_dim)                                   tile
    k           (batch, seqlen_k, heads_k, key_dim)                                 tile
    decay       (heads)|(batch, seqlen_q, heads)|(batch, seqlen_q, heads, key_dim)  real     optional
    cu_seqlens  (ends)                                                              index    optional
    start       (sequences, heads, key_dim, value_dim)                              float32  optional
    scores      (batch, heads, seqlen_q)                                            float32  updated
    out         (batch, seqlen_q, heads, key_dim)                                   tile     in_place
    state       (sequences, heads, key_dim, value_dim)                              float32  output
    """,
)


def form_of(x):
    return describe(x, "x").form


def zeros(axes, dtype=f32, **extents):
    return np.zeros([(EXTENTS | extents)[axis] for axis in axes], dtype)


def forms(**arrays):
    """Forms of a call of ATTEND, plain valid ones unless given; None: left out."""
    made = dict(q=zeros(Q, bf16), k=zeros(K, bf16), scores=zeros(SCORES)) | arrays
    ordered = {name: made[name] for name in ATTEND.names if made.get(name) is not None}
    return {name: x if isinstance(x, Form) else form_of(x) for name, x in ordered.items()}


def call(layout="bshd", **arrays):
    return ATTEND.problem(forms(**arrays), layout)


# ---- the table -------------------------------------------------------------------------------------------------------
def test_a_row_is_an_argument():
    assert ATTEND.name == "attend" and ATTEND.names == tuple("q k decay cu_seqlens start scores out state".split())
    assert ATTEND.arguments["decay"] == Argument("decay", (HEADS, DECAY, Q), "real", "optional")
    assert ATTEND.arguments["q"] == Argument("q", (Q,), "tile", "")
    needed = [name for name, argument in ATTEND.arguments.items() if argument.needed]
    written = [name for name, argument in ATTEND.arguments.items() if argument.written]
    assert needed == ["q", "k", "scores"] and written == ["scores", "out", "state"]
    assert ATTEND.arguments["k"].dtypes == ("bfloat16", "float16") and ATTEND.arguments["cu_seqlens"].dtypes[0] == "int32"


@pytest.mark.parametrize("row", ["q (batch, heads) tiles", "q (batch) tile given", "q (batch) optional"])
def test_a_table_that_says_nonsense(row):
    with pytest.raises(ValueError, match="^q: must hold one of .*'tile'.* and have a role of .*'output'"):
        Schema("wrong", row)


@pytest.mark.parametrize(
    "row", ["q BSHD tile", "q tile", "q (batch, heads tile", "q (batch) (heads) tile", "q (batch)", "(batch) tile"]
)
def test_a_row_without_axes(row):
    with pytest.raises(
        ValueError, match=r"^(a row must have a name, axes such as \(batch, heads\), and what it holds|q: must hold)"
    ):
        Schema("wrong", row)


def test_an_axis_has_a_name_that_axes_py_knows():
    with pytest.raises(ValueError, match="^q: has the axis seqlenq, which tiles/calls/axes.py does not name"):
        Schema("wrong", "q (batch, seqlenq) tile")
    schema = Schema("own", "x (m, k) tile\nout (m, n) tile output", vary=["m"], n=3)
    problem = schema.problem({"x": form_of(zeros(("heads", "key_dim"), bf16))})
    assert problem("m", "k", "n") == (6, 16, 3) and schema.vary == {"m"} and problem.result_form("out") == ((6, 3), "bfloat16")
    with pytest.raises(ValueError, match="^x: must have the axes m, k: x.shape=.6,."):
        schema.problem({"x": form_of(zeros(HEADS, bf16))})


@pytest.mark.parametrize("axes", ["(heads)|(batch,seqlen_q,heads)", "(heads) | (batch,  seqlen_q, heads)"])
def test_spaces_in_axes(axes):
    (row,) = Schema("f", f"decay {axes} real").arguments.values()
    assert row == Argument("decay", (HEADS, DECAY), "real", "")


@pytest.mark.parametrize(
    ("axes", "swapped"),
    [  # sequence and head follow the batch
        (Q, ("batch", "heads", "seqlen_q", "key_dim")), (K, ("batch", "heads_k", "seqlen_k", "key_dim")),
        (DECAY, SCORES), (("sequences", "blocks_k", "heads_k"), ("sequences", "heads_k", "blocks_k")),
        (SCORES, SCORES), (HEADS, HEADS), (STATE, STATE), (Q[:2], Q[:2]), (ENDS, ENDS),
        (("heads_k", "key_dim", "features"), ("heads_k", "key_dim", "features")),
    ],
)  # fmt: skip
def test_bhsd_swaps_sequence_and_head(axes, swapped):
    argument = Argument("x", (axes,), "tile", "")
    assert argument.choices("bshd") == {len(axes): axes} and argument.choices("bhsd") == {len(axes): swapped}


def test_a_choice_is_known_by_its_number_of_axes():
    swapped = {1: HEADS, 3: SCORES, 4: ("batch", "heads", "seqlen_q", "key_dim")}
    assert ATTEND.arguments["decay"].choices("bhsd") == swapped


# ---- valid calls -----------------------------------------------------------------------------------------------------
def test_a_problem():
    p = call(start=zeros(STATE))
    assert p.extents == {axis: n for axis, n in EXTENTS.items() if axis != "ends"} | {"1": 1}
    assert p("batch", "seqlen_q", "seqlen_k") == (2, 5, 7) and p("heads") == (6,)
    assert (p.member, p.dtype, p.device, p.layout) == ("attend", "bfloat16", None, "bshd")
    assert "q" in p and "start" in p and "decay" not in p and "out" not in p
    assert p["q"] == Operand(ATTEND.places["q"], form_of(zeros(Q, bf16))) and p["decay"] is None
    assert p["out"] == Operand(ATTEND.places["out"], c_ordered((2, 5, 6, 16), "bfloat16", None))
    assert p["state"] == Operand(ATTEND.places["state"], c_ordered((2, 6, 16, 8), "float32", None))
    assert p.scratch(1, (3, 5), "float32") == Operand(len(ATTEND.names) + 1, c_ordered((3, 5), "float32", None))
    assert p.result_form("out") == ((2, 5, 6, 16), "bfloat16") and p.result_form("state") == ((2, 6, 16, 8), "float32")


@pytest.mark.parametrize("dtype", [bf16, f16])
def test_tiles_are_made_like_the_first_argument(dtype):
    p = call(q=zeros(Q, dtype), k=zeros(K, dtype), start=zeros(STATE))
    assert p.dtype == np.dtype(dtype).name == p.result_form("out")[1] and p.result_form("state")[1] == "float32"


def test_layouts_differ_only_in_the_callers_axes():
    arrays = dict(q=zeros(Q, bf16), k=zeros(K, bf16), decay=zeros(DECAY), out=zeros(Q, bf16))
    turned = {name: x.swapaxes(1, 2) for name, x in arrays.items()}
    bshd, bhsd = call(**arrays), call("bhsd", **turned)
    assert bhsd.forms == bshd.forms and bhsd.extents == bshd.extents
    assert bhsd.shape("k") == (2, 3, 7, 16) and bshd.shape("k") == (2, 7, 3, 16)
    made = call("bhsd", **turned | {"out": None})
    assert made.result_form("out") == ((2, 6, 5, 16), "bfloat16"), "C-ordered as the caller sees it"
    assert made["out"].form == form_of(zeros(("batch", "heads", "seqlen_q", "key_dim"), bf16).swapaxes(1, 2))


@pytest.mark.parametrize("layout", ORDER)
@pytest.mark.parametrize("axes", [HEADS, DECAY, Q])
def test_axes_of_a_choice(axes, layout):
    decay = zeros(axes)
    plain = call(decay=decay)
    assert plain.axes("decay") == axes and plain.shape("decay") == decay.shape
    turn = (lambda x: x.swapaxes(1, 2) if x.ndim > 1 else x) if layout == "bhsd" else (lambda x: x)
    p = call(layout, q=turn(zeros(Q, bf16)), k=turn(zeros(K, bf16)), decay=turn(decay))
    assert p.axes("decay") == axes and p["decay"] == plain["decay"] and p.shape("decay") == turn(decay).shape


def test_sequences_are_batches_or_what_the_ends_say():
    assert call().extents["sequences"] == 2 and "ends" not in call().extents
    one = dict(q=zeros(Q, bf16, batch=1), k=zeros(K, bf16, batch=1), scores=zeros(SCORES, batch=1))
    p = call(**one, cu_seqlens=zeros(ENDS, np.int64), start=zeros(STATE, sequences=3))
    assert p("batch", "sequences", "ends") == (1, 3, 4)
    assert p.result_form("state")[0] == (3, 6, 16, 8) and p["cu_seqlens"].form.dtype == "int64"


def test_inputs_may_overlap_and_broadcast():
    p = call(q=np.broadcast_to(zeros(Q, bf16, seqlen_q=1), (2, 5, 6, 16)), decay=np.broadcast_to(f32(1), (2, 5, 6)))
    assert p["q"].form.strides[1] == 0 and p["decay"].form.strides == (0, 0, 0) and p.by_tma


extents = st.tuples(*[st.integers(1, 3)] * 3)


@given(st.permutations(range(3)), st.sampled_from(["bshd", "bhsd"]), extents, st.sampled_from([1, 2, 3, -1, -2]))
def test_any_strides_with_a_contiguous_last_axis(order, layout, shape, step):
    """The canonical form has the strides that NumPy gives the same axes."""
    memory = np.zeros([abs(step) * n for n in shape] + [8 * abs(step)], bf16)
    q = memory[::step, ::step, ::step, :8].transpose(*order, 3)
    out = np.lib.stride_tricks.as_strided(q, q.shape, [s if n > 1 else 7 for n, s in zip(q.shape, q.strides)])
    one = Schema("one", "q (batch, seqlen, heads, head_dim) tile\nout (batch, seqlen, heads, head_dim) tile in_place")
    p = one.problem({"q": form_of(q), "out": form_of(out)}, layout)
    canonical = q.transpose(ORDER[layout])
    assert p.forms["q"].shape == p("batch", "seqlen", "heads", "head_dim") == canonical.shape
    assert p.forms["q"].strides == canonical.strides
    used = [step for n, step in zip(canonical.shape, canonical.strides) if n > 1]
    at_once = int(np.gcd.reduce([*(abs(step) for step in used[:-1]), form_of(q).misalignment, 16]))
    assert p.bytes_at_once("q") == p.bytes_at_once() == at_once
    assert p.by_tma == (at_once == 16 and min(used) >= 0)
    one.check_overlap("out", "q", (4096, 4096), (form_of(out), form_of(q)))  # in place, whatever unused strides say


@pytest.mark.parametrize(
    ("offset", "step", "at_once"), [(0, 16, 16), (4, 16, 8), (0, 20, 8), (2, 16, 4), (4, 18, 4), (0, 17, 2), (1, 16, 2)]
)
def test_the_bytes_that_all_addresses_are_multiples_of(offset, step, at_once):
    """`offset` elements past an address that is a multiple of 16, rows `step` elements apart."""
    form = Form((2, 5, 6, 16), (5 * 6 * 32, 6 * 32, 32, 2), "bfloat16", None, 2)
    odd = form._replace(strides=(2 * 5 * 6 * step, 2 * 6 * step, 2 * step, 2), misalignment=2 * offset)
    assert call(q=odd).bytes_at_once() == call(out=odd).bytes_at_once() == at_once
    assert call(q=odd).bytes_at_once("k") == call(q=odd).bytes_at_once("decay") == 16
    assert call(q=odd).by_tma == (at_once == 16)
    decay = c_ordered((2, 5, 6), "float32", None)._replace(misalignment=4)
    assert call(decay=decay).bytes_at_once() == 16 and call(decay=decay).bytes_at_once("decay", "q") == 4


@pytest.mark.parametrize(
    ("stride", "by_tma"), [(0, True), (16, True), (-16, False), (STRIDE_END - 16, True), (STRIDE_END, False)]
)
def test_what_tma_can_address(stride, by_tma):
    assert call(q=Form((2, 1, 1, 8), (stride, 16, 16, 2), "bfloat16", None, 2), **SMALL).by_tma == by_tma
    assert call(q=Form((2, 1, 1, 8), (16, stride, 7, 2), "bfloat16", None, 2), **SMALL).by_tma, "no step is taken there"


SMALL = dict(k=zeros(K, bf16, key_dim=8), scores=zeros(SCORES, seqlen_q=1, heads=1))


@pytest.mark.parametrize("empty", [dict(batch=0), dict(seqlen_q=0), dict(seqlen_k=0)])
def test_empty_arrays(empty):
    p = call(q=zeros(Q, bf16, **empty), k=zeros(K, bf16, **empty), scores=zeros(SCORES, **empty))
    assert p.result_form("out")[0] == tuple((EXTENTS | empty)[axis] for axis in Q)


def test_strides_of_axes_of_extent_one_do_not_matter():
    odd = np.lib.stride_tricks.as_strided(zeros(Q, bf16), (1, 5, 1, 16), (3, 64, -7, 2))
    scores = np.lib.stride_tricks.as_strided(zeros(SCORES), (1, 1, 5), (-3, 7, 4))
    assert call(q=odd, k=zeros(K, bf16, batch=1), scores=scores).by_tma


# ---- refusals --------------------------------------------------------------------------------------------------------
T, V = TypeError, ValueError
REAL = "dtype must be one of ('float32', 'bfloat16', 'float16')"
INVALID = [
    (
        dict(q=zeros(("batch", "seqlen_q", "key_dim"), bf16)),
        V,
        "q: must have the axes B, S, H, Dk: q.shape=(2, 5, 16); if the batch is missing, pass q[None], or with a single head "
        "q[:, :, None]",
    ),
    (dict(layout="bhsd", q=zeros(("batch", "seqlen_q"), bf16)), V, "q: must have the axes B, H, S, Dk: q.shape=(2, 5)"),
    (dict(k=zeros(("batch", "seqlen_k", "heads_k"), bf16)), V, "k: must have the axes B, S, Hk, Dk: k.shape=(2, 7, 3)"),
    (dict(decay=zeros(("batch", "heads"))), V, "decay: must have the axes H; or B, S, H; or B, S, H, Dk: decay.shape=(2, 6)"),
    # an axis too few, or one of extent 1 too many, where the other extents are right
    (
        dict(k=zeros(("batch", "seqlen_k", "key_dim"), bf16)),
        V,
        "k: must have the axes B, S, Hk, Dk: k.shape=(2, 7, 16); k[:, :, None] has them",
    ),
    (
        dict(decay=zeros(("seqlen_q", "heads"))),
        V,
        "decay: must have the axes H; or B, S, H; or B, S, H, Dk: decay.shape=(5, 6); decay[None] has them",
    ),
    (
        dict(scores=zeros(SCORES)[:, :, :, None]),
        V,
        "scores: must have the axes B, H, S: scores.shape=(2, 6, 5, 1); scores[:, :, :, 0] has them",
    ),
    (
        dict(cu_seqlens=zeros(("batch", "seqlen_q"), np.int32)),
        V,
        "cu_seqlens: must have the axes N + 1: cu_seqlens.shape=(2, 5)",
    ),
    (
        dict(q=zeros(Q)),
        T,
        "q: dtype must be one of ('bfloat16', 'float16'): q.dtype='float32'; convert it: x.astype(",
    ),
    (dict(k=zeros(K, ">f2")), T, "k: dtype must be one of ('bfloat16', 'float16'): k.dtype='>f2'"),
    (dict(k=zeros(K, f16)), T, "k: dtype must be q's: k.dtype='float16', q.dtype='bfloat16'; convert one of them"),
    (dict(decay=zeros(HEADS, float)), T, f"decay: {REAL}: decay.dtype='float64'; convert it: x.astype(np.float32), or"),
    (dict(start=zeros(STATE, bf16)), T, "start: dtype must be one of ('float32',): start.dtype='bfloat16'; convert it"),
    (dict(cu_seqlens=zeros(ENDS)), T, "cu_seqlens: dtype must be one of ('int32', 'int64'): cu_seqlens.dtype='float32'"),
    (dict(k=zeros(K, bf16, batch=3)), V, "k: batch must equal q's: k.shape=(3, 7, 3, 16), q.shape=(2, 5, 6, 16)"),
    (dict(k=zeros(K, bf16, key_dim=8)), V, "k: key_dim must equal q's: k.shape=(2, 7, 3, 8), q.shape=(2, 5, 6, 16); its axes"),
    (dict(decay=zeros(HEADS, heads=3)), V, "decay: heads must equal q's: decay.shape=(3,), q.shape=(2, 5, 6, 16)"),
    (
        dict(decay=zeros(DECAY, heads=96)),
        V,
        "decay: heads must equal q's: decay.shape=(2, 5, 96), q.shape=(2, 5, 6, 16); decay.reshape(2, 5, 6, 16) has heads, ",
    ),
    (dict(decay=zeros(DECAY, seqlen_q=6)), V, "decay: sequence must equal q's: decay.shape=(2, 6, 6), q.shape=(2, 5, 6, 16)"),
    (
        dict(start=zeros(STATE, sequences=3)),
        V,
        "start: sequences must equal q's: start.shape=(3, 6, 16, 8), q.shape=(2, 5, 6, 16)",
    ),
    (
        dict(state=zeros(STATE, value_dim=9), start=zeros(STATE)),
        V,
        "state: value_dim must equal start's: state.shape=(2, 6, 16, 9)",
    ),
    (
        dict(scores=zeros(DECAY)),
        V,
        "scores: heads must equal q's: scores.shape=(2, 5, 6), q.shape=(2, 5, 6, 16); its axes are B, H, S, and "
        "scores.swapaxes(1, 2) has them",
    ),
    (
        dict(cu_seqlens=zeros(ENDS, np.int32)),
        V,
        "cu_seqlens: batch must be 1, all sequences one after the other: cu_s",
    ),
    (dict(cu_seqlens=zeros(ENDS, np.int32, ends=1)), V, "cu_seqlens: must have two elements or more: cu_seqlens.shape=(1,)"),
    (dict(layout="sbhd"), V, "layout: must be one of ('bshd', 'bhsd'): layout='sbhd'"),
    (dict(layout=["bshd"]), T, "layout: must be one of ('bshd', 'bhsd'): layout=['bshd']"),
    (dict(k=zeros(K, bf16, key_dim=32)[..., ::2]), V, "k: last axis must be contiguous: k.strides=(1344, 192, 64, 4) bytes"),
    (
        dict(q=zeros(Q, bf16)[..., ::-1]),
        V,
        "q: last axis must be contiguous: q.strides=(960, 192, 32, -2) bytes, q.shape=",
    ),
    (dict(decay=zeros(DECAY)[::-1]), V, "decay: strides must not be negative: decay.strides=(-120, 24, 4) bytes"),
    (dict(out=zeros(Q, bf16, heads=3)), V, "out: heads must equal q's: out.shape=(2, 5, 3, 16), q.shape=(2, 5, 6, 16)"),
    (
        dict(out=np.lib.stride_tricks.as_strided(zeros(Q, bf16), (2, 5, 6, 16), (960, 16, 192, 2))),
        V,
        "out: its elements must not overlap each other: out.strides=(960, 16, 192, 2) bytes, out.shape=(2, 5, 6, 16)",
    ),
    (
        dict(q=c_ordered((2, 5, 6, 16), "bfloat16", None)._replace(misalignment=3)),
        V,
        "q: address and strides must be multiples of its elements' 2 bytes: address 3 past a multiple of 16: q.str",
    ),
    (
        dict(decay=Form((2, 5, 6), (120, 24, 6), "float32", None, 4)),
        V,
        "decay: address and strides must be multiples of its elements' 4 bytes: address 0 past a multiple of 16: decay",
    ),
]


@pytest.mark.parametrize("arguments, error, message", INVALID, ids=[message[:60] for *_, message in INVALID])
def test_invalid(arguments, error, message):
    with pytest.raises(error) as raised:
        call(**arguments)
    assert str(raised.value).startswith(message)


def test_sequences_of_a_state_are_those_of_the_ends():
    one = dict(q=zeros(Q, bf16, batch=1), k=zeros(K, bf16, batch=1), scores=zeros(SCORES, batch=1))
    with pytest.raises(V, match=r"^start: sequences must equal cu_seqlens's: start.shape=\(4, 6, 16, 8\), cu_s"):
        call(**one, cu_seqlens=zeros(ENDS, np.int32), start=zeros(STATE, sequences=4))


@pytest.mark.parametrize("name", ["k", "decay", "scores", "out"])
def test_devices(name):
    axes = {"k": K, "decay": DECAY, "scores": SCORES, "out": Q}[name]
    elsewhere = form_of(zeros(axes, f32 if name in ("decay", "scores") else bf16))._replace(device=1)
    with pytest.raises(V, match=rf"^{name}: must lie where q does \(None: host memory\): {name}\.device=1, q\.device=None"):
        call(**{name: elsewhere})


@pytest.mark.parametrize("name", ["scores", "out", "state"])
def test_what_is_written_must_be_writable(name):
    axes, dtype = {"scores": (SCORES, f32), "out": (Q, bf16), "state": (STATE, f32)}[name]
    given = zeros(axes, dtype)
    given.flags.writeable = False
    with pytest.raises(V, match=f"^{name}: must be writable, and this array is read-only"):
        call(**{name: given})
    read_only = {name: form._replace(readonly=True) for name, form in forms(decay=zeros(HEADS)).items() if name != "scores"}
    assert call(**read_only)


# ---- memory ----------------------------------------------------------------------------------------------------------
def test_what_must_lie_apart():
    """What is written, and any other argument; each pair comes once."""
    pairs = ATTEND.disjoint_pairs(forms(decay=zeros(HEADS), out=zeros(Q, bf16)))
    of_scores, of_out = ([(name, other) for other in ("q", "k", "decay")] for name in ("scores", "out"))
    assert sorted(pairs) == sorted([*of_scores, *of_out, ("scores", "out")])


def test_in_place_is_the_first_argument_itself():
    form = form_of(zeros(Q, bf16))
    ATTEND.check_overlap("out", "q", (4096, 4096), (form, form))
    for name, other, at in (("out", "q", 4098), ("out", "k", 4096), ("scores", "q", 4096)):
        with pytest.raises(V, match=rf"^{name}: must not overlap {other}: {name} at 0x1000, {other} at {at:#x}, "):
            ATTEND.check_overlap(name, other, (4096, at), (form, form))
    square = form_of(zeros(Q, bf16, heads=5))
    with pytest.raises(V, match="^out: must not overlap q"):
        ATTEND.check_overlap("out", "q", (4096, 4096), (square, square.permuted((0, 2, 1, 3))))


def test_every_word_of_a_table_is_explained():
    import tiles.calls.schema

    for word in (*HOLDS, *ROLES[1:]):
        assert f"    {word} " in tiles.calls.schema.__doc__, word


def test_results_like_an_argument_that_are_asked_for_by_a_word():
    schema = Schema("f", """
        q   (batch, seqlen_q, heads, head_dim)  tile
        x   *                                   any      optional
        dq  (batch, seqlen_q, heads, head_dim)  tile     output
        dx  =x                                  float32  output  grads:dx
    """)  # fmt: skip
    q, x = (form_of(np.zeros(shape, dtype)) for shape, dtype in (((1, 2, 3, 8), bf16), ((4, 5), np.int32)))
    for grads, results in (("", ["dq"]), ("dx dy", ["dq", "dx"]), ("dxx", ["dq"])):
        assert schema.results({"grads": grads}) == results
    problem = schema.problem({"q": q, "x": x})
    assert problem.result_form("dx") == ((4, 5), "float32") and problem["dx"].form.shape == (4, 5)
    assert schema.shapes({"q": (1, 2, 3, 8), "x": (4, 5)}, "bshd") == {"dq": [1, 2, 3, 8], "dx": [4, 5]}
    assert schema.shapes({"q": (1, 2, 3, 8)}, "bshd") == {"dq": [1, 2, 3, 8]}
    with pytest.raises(ValueError, match="^dx: must have x's shape"):
        schema.problem({"q": q, "x": x, "dx": form_of(np.zeros((4, 4), np.float32))})


def test_a_number_where_an_array_belongs():
    """The advice has the shape and the dtype that belong there; of tiles there is none."""
    schema = Schema("f", """
        x        (batch, seqlen, heads, head_dim)   tile
        lengths  (sequences)                        index
        descale  (heads_k)|(sequences, heads_k)     float32  optional
    """)  # fmt: skip
    assert schema.number_message("lengths", 40) == (
        "lengths: must be an array, got lengths=40; of a number make one: np.full((sequences,), 40, np.int32)"
    )
    assert schema.number_message("descale", 0.5).endswith("make one: np.full((Hk,), 0.5, np.float32)")
    assert schema.number_message("x", 1.0) == "x: must be an array, got x=1.0"


def test_what_has_one_element():
    schema = Schema(
        "f", "q (batch, heads) tile\nseed (1) index optional\nlast (heads, 1) float32 optional\nmore (heads, 1) float32 output"
    )
    q, two, last = (form_of(np.zeros(shape, dtype)) for shape, dtype in (((2, 3), bf16), ((2,), np.int32), ((3, 2), f32)))
    assert schema.problem({"q": q, "seed": two._replace(shape=(1,))}).result_form("more") == ((3, 1), "float32")
    for name, form, where in ("seed", two, ""), ("last", last, " along its last axis"):
        with pytest.raises(V, match=f"^{name}: must have one element{where}: {name}.shape="):
            schema.problem({"q": q, name: form})
