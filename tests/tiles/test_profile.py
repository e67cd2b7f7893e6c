"""tiles.profile: what it counts is what kernels do, its timeline shows a pipeline's bubbles, and it prints what it found."""

import functools
import itertools
import sys
import types
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from cuda.bindings import driver
from host_driver import on_device
from kernels import scale
from numba import cuda

import tiles
from ops import (
    block,
    cluster,
    commit_group,
    copy_async,
    exp2,
    load,
    mma_AB,
    mma_AB_unzipped,
    mma_ABt_unzipped,
    rezipped,
    store,
    unzipped,
    wait_group,
    warpgroup,
    zeros,
)
from tiles import bf16, fp8e4m3, fp16, fp32, pipeline, ring, rt, shared, st, tensor
from tiles.__main__ import main
from tiles.calls.plan import Fill, Plan
from tiles.calls.program import Program
from tiles.calls.schema import Schema
from tiles.launching import nvtx as ranges
from tiles.op import OPS
from tiles.profile import COPIES, TENSOR, Model, ncu
from tiles.profile.counts import choose_clusters
from tiles.profile.model import FREE, NARROW, SPECIAL

A, C = st(64, 64, bf16), rt(16, 64, fp32)
ROUNDS = 6


@functools.cache
def weighed(stages):
    """The profile of a kernel that weighs tiles, which come through a ring of so many slots: product, exp2, product."""
    smem = shared(k=ring(A, stages, readers=4))

    @cuda.jit
    def weigh(q, x, y, n):
        (k,) = smem.open()
        if warpgroup.id() == 1:
            for j in range(n):
                k.fill(j, x, (j, 0))
        else:
            queries = warpgroup.load(q, rt(16, 64, bf16), (0, 0))
            acc = zeros(C)
            for j in range(n):
                tile = k.wait(j)
                weights = exp2(warpgroup.wait(warpgroup.mm_ABt(queries, tile)))
                acc = warpgroup.wait(warpgroup.mma_AB(acc, bf16(weights), tile))
                k.release(j)
            warpgroup.store(y, acc, (0, 0))

    x = np.random.default_rng(0).standard_normal((ROUNDS * 64, 64), np.float32).astype(bf16.np)
    x[...] = x * 0.1
    y = np.zeros((64, 64), np.float32)
    actual = tiles.profile(tiles.launch(weigh, 1, 256, shared=smem), x[:64], tensor(x, A), y, ROUNDS)
    wide = x.astype(np.float32)
    weights = (2 ** (wide[:64] @ wide.T)).astype(bf16.np).astype(np.float32)
    assert np.allclose(y, weights @ wide, rtol=1e-2, atol=1e-2)  # it ran
    return actual


def waits(timeline, what):
    """For how long warp 0 waits for this, each time."""
    return [bar.cycles for bar in timeline.bars if bar.lane[1] == 0 and bar.kind == "wait" and what in bar.name]


def test_a_single_buffer_has_bubbles_and_a_ring_has_none():
    one, three = (weighed(stages).timeline for stages in (1, 3))
    # with one slot every tile is waited for as long as memory is away; with three only the first, for which nothing can be done
    assert len(waits(one, "tile")) == ROUNDS and min(waits(one, "tile")[1:]) > Model().latency
    assert len(waits(three, "tile")) == 1
    assert three.cycles < 0.6 * one.cycles and three.busy(TENSOR) > 1.5 * one.busy(TENSOR)
    assert max(side_by_side(one)) == 1 and max(side_by_side(three)) == 3


def side_by_side(timeline):
    """How many copies are in flight when each begins."""
    copies = [bar for bar in timeline.bars if bar.lane[1] == COPIES]
    return [sum(other.start <= bar.start < other.end for other in copies) for bar in copies]


def test_a_timeline_holds_together():
    """The bars of a warp follow one another; a wait ends with what ended it; products and copies take what the model says."""
    timeline, model = weighed(3).timeline, Model()
    lanes = {lane: [bar for bar in timeline.bars if bar.lane == lane] for lane in timeline.warps}
    for bars in lanes.values():
        assert all(first.end <= then.start for first, then in itertools.pairwise(bars))
    causes = [bar for bar in timeline.bars if bar.kind == "wait" and bar.cause and bar.cause.kind in ("copy", "product")]
    assert causes and all(bar.end == bar.cause.end for bar in causes)
    products = [bar for bar in timeline.bars if bar.lane[1] == TENSOR]
    assert len(products) == 4 * 2 * ROUNDS and {bar.cycles for bar in products} == {2 * 16 * 64 * 64 / model.tensor}
    copies = [bar for bar in timeline.bars if bar.lane[1] == COPIES]
    assert len(copies) == ROUNDS and min(bar.cycles for bar in copies) == model.latency + A.nbytes / model.memory


def test_it_is_the_same_each_time():
    once = weighed(3).timeline.svg()
    weighed.cache_clear()
    assert weighed(3).timeline.svg() == once


def test_counts():
    (launch,) = weighed(1).launches
    counts = launch.counts
    assert counts.flop == counts.halves == 2 * ROUNDS * 2 * 64**3
    assert counts.special == ROUNDS * 64 * 64
    assert counts.read == (ROUNDS + 1) * A.nbytes and counts.written == 64 * 64 * 4
    assert counts.once == ROUNDS * A.nbytes + 64 * 64 * 4  # q is the first tile of x... and of no more bytes than x has
    assert (counts.counted, counts.clusters, launch.seconds, launch.code) == (1, 1, None, None)


def test_counts_of_products_of_two_dtypes():
    """They take as long as those of the wider one; what is summed over is counted, whatever the op's name ends with."""
    smem = shared(k=st(64, 32, fp8e4m3))

    @cuda.jit
    def both(q, x, y):
        (k,) = smem.open()
        copy_async(k, x, (0, 0))
        commit_group()
        wait_group(0)
        block.sync()
        s = mma_ABt_unzipped(zeros(rt(16, 64, fp32)), unzipped(load(q, rt(16, 32, fp16), (0, 0))), k)
        store(y, rezipped(mma_AB_unzipped(zeros(rt(16, 32, fp32)), fp16(s), k)), (0, 0))

    q, x, y = np.ones((16, 32), np.float16), fp8e4m3.round(np.ones((64, 32))), np.zeros((16, 32), np.float32)
    (launch,) = tiles.profile(tiles.launch(both, 1, 32, shared=smem), q, x, y).launches
    assert (y == 32 * 64).all()
    assert launch.counts.flop == launch.counts.halves == 2 * 2 * 16 * 64 * 32


def test_counts_of_ordinary_loads_and_of_what_lies_outside():
    x, y = np.ones((40, 24), np.float32), np.zeros((40, 24), np.float32)
    (launch,) = tiles.profile(tiles.launch(scale, (3, 2), 32), x, y, 2.0).launches
    counts = launch.counts
    assert (counts.read, counts.written, counts.once, counts.flop) == (x.nbytes, y.nbytes, x.nbytes + y.nbytes, 0)
    assert (counts.counted, counts.clusters) == (6, 6) and (y == 2).all()


def test_warps_that_copy_for_themselves():
    """cp.async and mma.sync: a pipeline of two stages hides some of memory, one of one stage nothing."""

    def cycles(stages):
        smem, newer = shared(v=pipeline(A, stages, 4)), max(0, stages - 2)

        @cuda.jit
        def multiply(x, y, n):
            (v,) = smem.open()
            for j in range(stages - 1):
                v.fill(j, x, (64 * j, 0), end=n)
            acc = zeros(C)
            left = load(x, rt(16, 64, bf16), (0, 0))
            for j in range(n):
                if stages == 1:
                    cuda.syncthreads()
                    v.fill(j, x, (64 * j, 0), end=n)
                tile = v.wait(j, newer=newer)
                if stages > 1:
                    v.fill(j + stages - 1, x, (64 * (j + stages - 1), 0), end=n)
                acc = mma_AB(acc, left, tile)
            store(y, acc, (16 * (cuda.threadIdx.x // 32), 0))

        x, y = np.ones((4 * 64, 64), bf16.np), np.zeros((64, 64), np.float32)
        actual = tiles.profile(tiles.launch(multiply, 1, 128, shared=smem), x, y, 4)
        assert actual.launches[0].counts.flop == 4 * 2 * 64**3
        return actual.timeline.cycles

    assert cycles(3) < 0.75 * cycles(1)


def test_blocks_of_a_cluster_meet():
    @cuda.jit
    def meet(y):
        if cuda.blockIdx.x == 0:
            store(y, exp2(zeros(rt(64, 64, fp32))), (0, 0))
        cluster.sync()

    timeline = tiles.profile(tiles.launch(meet, 2, 32, cluster=2), np.zeros((64, 64), np.float32)).timeline
    (bar,) = [bar for bar in timeline.bars if bar.kind == "wait"]
    assert (bar.lane[0], bar.name) == ((1, 0, 0), "the cluster's barrier") and bar.cause.lane[0] == (0, 0, 0)
    assert [lane[0] for lane in timeline.warps] == [(0, 0, 0), (1, 0, 0)]


def test_the_picture():
    timeline = weighed(3).timeline
    root = ElementTree.fromstring(timeline.svg())
    texts = [node.text or "" for node in root.iter() if node.tag.endswith("text")]
    titles = [node.text for node in root.iter() if node.tag.endswith("title")]
    assert {"warps 0–3", "warp 4", COPIES, TENSOR, "warps 5–7: nothing to do"} <= set(texts)
    assert any("not measured" in text for text in texts)
    assert any(t.startswith("exp2, 256 cycles") and "`weights = exp2(" in t for t in titles)
    assert timeline._repr_svg_() == timeline.svg() == timeline.svg(0, timeline.cycles) != timeline.svg(0, 2 * timeline.cycles)


def test_a_part_of_the_picture():
    timeline, picture = weighed(3).timeline, weighed(3).timeline.svg(1000, 1500)
    boxes = [node for node in ElementTree.fromstring(picture).iter() if node.tag.endswith("g") and not node.tag.endswith("svg")]
    rows = {bar.lane for bar in timeline.bars if bar.start < 1500 and bar.end > 1000}
    assert len(boxes) > len(rows) > 3 and "shown: 1000 to 1500" in picture and "exp2" in picture
    lefts = [
        float(node.get("x")) for node in ElementTree.fromstring(picture).iter() if node.tag.endswith("rect") and node.get("x")
    ]
    assert min(lefts) >= 24
    with pytest.raises(ValueError, match="shows cycles from 20 to 10"):
        timeline.svg(20, 10)


def test_what_is_printed():
    actual = weighed(1)
    head, columns, row, how = str(actual).splitlines()
    assert head == "in the interpreter" and columns.split()[:3] == ["kernel", "blocks", "FLOP"]
    assert row.split()[:4] == ["weigh", "1", "6.29", "M"] and "counted by the interpreter, of all blocks" in how
    assert "<td>weigh</td>" in actual._repr_html_() and "</svg>" in actual._repr_html_()
    said = repr(actual.timeline).splitlines()
    assert "not measured" in said[0] and said[1].endswith(TENSOR) and "waiting" in said[3]
    assert any("cycles of waiting for tile j of ring 'k'" in line and "tile = k.wait(j)" in line for line in said)


def test_any_block():
    x, y = np.ones((32, 16), np.float32), np.zeros((32, 16), np.float32)
    actual = tiles.profile(tiles.launch(scale, (2, 1), 32), x, y, 2.0, block=(1, 0, 0))
    assert actual.timeline.title == "scale, block (1, 0, 0)"
    assert tiles.profile(tiles.launch(scale, (2, 1), 32), x, y, 2.0, block=(5, 0, 0)).timeline is None


def test_a_function_without_launches():
    with pytest.raises(ValueError, match="launches no kernel"):
        tiles.profile(lambda: None)


def test_hazards_are_found_all_the_same():
    @cuda.jit
    def wrong(x):
        x[7] = 1.0

    launch = tiles.launch(wrong, 1, 32)
    with pytest.raises(tiles.Hazard, match="index 7 is out of range"):
        tiles.profile(launch, np.zeros(4, np.float32))
    launch(np.zeros(8, np.float32))  # launches are what they were


def test_which_blocks_stand_for_all():
    assert choose_clusters((8, 1, 1), (1, 1, 1), 4) == [[(1, 0, 0)], [(3, 0, 0)], [(5, 0, 0)], [(7, 0, 0)]]
    assert choose_clusters((4, 1, 1), (2, 1, 1)) == [[(0, 0, 0), (1, 0, 0)], [(2, 0, 0), (3, 0, 0)]]


def test_the_model_names_ops_that_exist():
    names = {op.name for op in OPS.values()}
    assert not (FREE | SPECIAL | NARROW) - names


def test_command(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\nimport tiles\nfrom numba import cuda\nfrom ops import load, store\nfrom tiles import fp32, rt\n\n"
        "@cuda.jit\ndef copy(x, y):\n    store(y, load(x, rt(16, 16, fp32), (0, 0)), (0, 0))\n\n"
        "def run():\n    x = np.zeros((16, 16), np.float32)\n    tiles.launch(copy, 1, 32)(x, x.copy())\n"
    )
    assert main(["profile", f"{file}:run", "--svg", str(tmp_path / "run.svg")]) == 0
    said = capsys.readouterr().out
    assert "copy" in said and "2.05 kB" in said and "not measured" in said
    ElementTree.parse(tmp_path / "run.svg")
    for wrong, why in (
        ([f"{file}:no"], "has no function no"),
        (["run"], "say file.py:function"),
        ([f"{file}x:run"], "there is no file"),
        ([f"{file}:run", "--block", "7"], "--block: no launch has a block 7 that is counted: grids are (1, 1, 1)"),
        ([f"{file}:run", "--svg", f"{file}/run.svg"], "Not a directory"),
        ([f"{file}:run", "--svg", str(tmp_path / "none.svg"), "--cycles", "9e9:"], "timeline: shows cycles from 9000000000.0"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["profile", *wrong])
        assert ended.value.code == 2 and why in capsys.readouterr().err


FILLED = Schema("filled", "x (seqlen, head_dim) float32\nout (seqlen, head_dim) float32 output")


@pytest.mark.parametrize(
    "asked, there, expected",
    [({"TILES_NVTX": "1"}, True, True), ({}, True, False), ({"NVTX_INJECTION64_PATH": "x"}, True, True),
     ({"NVTX_INJECTION64_PATH": "x", "TILES_NVTX": "0"}, True, False), ({"TILES_NVTX": "1"}, False, None)],
)  # fmt: skip
def test_ranges(monkeypatch, asked, there, expected):
    """Ranges stand around calls if they were asked for when the library was imported; otherwise calls are as they were."""
    calls, fake = [], types.ModuleType("nvtx")
    fake.push_range, fake.pop_range = calls.append, lambda: calls.append("end")
    monkeypatch.setitem(sys.modules, "nvtx", fake if there else None)
    monkeypatch.setitem(sys.modules, "torch.cuda", None)
    for name in ("TILES_NVTX", "NVTX_INJECTION64_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranges, "backend", ranges.backend.__wrapped__)

    def plan(problem):
        return Plan([Fill(problem["out"], 3)])

    if expected is None:
        with pytest.warns(UserWarning, match="pip install nvtx"):
            Program(FILLED, plan)
        return
    result = Program(FILLED, plan)
    assert (result(None, (np.ones((2, 3), np.float32), None), ()) == 3).all()
    assert calls == ([f"{__name__}.filled", "end"] if expected else [])
    assert ("run" in vars(result)) == expected


NCU = """==PROF== Connected to process 539
"ID","Kernel Name","gpu__time_duration.sum","dram__bytes.avg.per_second","dram__bytes.sum.per_second",\
"gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed","launch__registers_per_thread",\
"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active","sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",\
"sm__pipe_tensor_op_imma_cycles_active.avg.pct_of_peak_sustained_elapsed","sm__warps_active.avg.pct_of_peak_sustained_active",\
"smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio","smsp__average_warps_issue_stalled_selected_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"
"","","ns","byte/s","byte/s","%","register/thread","%","%","%","%","inst","inst","inst"
"0","attend[v1,cw51](gl_28st, Array<float, 3, A>)","193,280","6,243,294","299,678,145,695.36","6.23","168","82.66","78.42","0",\
"14.27","0.5","1.00","2.50"
""".replace("\\\n", "")


def test_what_ncu_counts():
    """Its raw page, as version 2025.3 writes it, with few of its columns."""
    (actual,) = ncu.read(NCU)
    assert (actual.kernel, actual.registers) == ("attend", 168)
    numbers = actual.seconds, actual.memory, actual.bandwidth, actual.tensor, actual.occupancy
    assert numbers == pytest.approx((193.28e-6, 299.678e9, 0.0623, 0.7842, 0.1427), rel=1e-4)
    assert actual.stalls == [(ncu.STALLS["wait"], 0.625), (ncu.STALLS["gmma"], 0.125)]
    assert str(actual).splitlines() == [
        "  attend: 193.3 us, tensor cores busy 78%, memory busy 6%, 0.30 TB/s, 168 registers, warps there 14% of the most",
        "     62% of a warp's time: waits for the instruction before it, whose time is fixed",
        "     12% of a warp's time: waits for a matrix product (wgmma)",
    ]
    assert ncu.read("==ERROR== no permission") == []
    (empty,) = ncu.read('"ID","Kernel Name"\n"",""\n"0","copy"\n')
    assert str(empty) == "  copy: " and empty.stalls == []


def test_ncu_that_fails(tmp_path):
    program = tmp_path / "ncu"
    program.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM' \nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(RuntimeError, match="counted nothing(?s:.*)NVGPUCTRPERM"):
        ncu.run("mine.py:run", str(program))


def test_on_a_card_that_lies_in_host_memory(gpu, monkeypatch):
    """All calls of the driver but the kernels' work: events are a millisecond apart, what was allocated is freed."""
    ok, counter, live = driver.CUresult.CUDA_SUCCESS, itertools.count(), []
    create = lambda *_: (ok, live.append(next(counter)) or live[-1])
    destroy = lambda x: (ok, live.remove(x))[:1]
    answers = {"cuMemAlloc": create, "cuMemFree": destroy, "cuEventCreate": create, "cuEventDestroy": destroy}
    answers |= dict.fromkeys(("cuEventRecord", "cuMemsetD8Async", "cuCtxSynchronize"), lambda *_: (ok,))
    answers |= {"cuEventElapsedTime": lambda before, after: (ok, after - before)}
    answers |= dict.fromkeys(("cuFuncGetAttribute", "cuOccupancyMaxActiveBlocksPerMultiprocessor"), lambda *_: (ok, 7))
    for name, answer in answers.items():
        monkeypatch.setattr(driver, name, answer)
    gpu.count, x = 19, on_device(64, 64)
    actual = tiles.profile(tiles.launch(scale, (4, 4), 32), x, x, 1.0, repeat=3)
    (launch,) = actual.launches
    assert (launch.title, launch.grid, launch.threads, launch.seconds, launch.code) == ("scale", (4, 4, 1), 32, 1e-3, (7, 7, 7))
    assert launch.counts.once == 2 * x.array.nbytes and launch.counts.clusters == 16
    assert not live and len(gpu.launches) == 2 + 3 and "scale" in str(actual)


@pytest.mark.gpu
def test_on_a_card():
    torch = pytest.importorskip("torch")
    import attention

    q = torch.zeros(1, 1024, 4, 64, device="cuda", dtype=torch.bfloat16)
    actual = tiles.profile(lambda: attention.forward(q, q, q), repeat=5, sample=None)
    (launch,) = actual.launches
    assert launch.title == "attend" and 1e-6 < launch.seconds < 1e-2 and launch.code.registers > 32
    assert launch.counts.flop == pytest.approx(4 * 4 * 1024**2 * 64, rel=1e-6) and launch.counts.once == 2 * q.nbytes
    assert all(0 < share < 1 for share in actual.share_of_peaks(launch)) and actual.timeline.busy(TENSOR) > 0.1
    x = torch.ones(64, 64, device="cuda")
    (launch,) = tiles.profile(tiles.launch(scale, (4, 4), 32), x, x, 1.0, repeat=3).launches
    assert launch.counts.once == 2 * x.nbytes and launch.counts.counted == 4 and launch.counts.clusters == 16
