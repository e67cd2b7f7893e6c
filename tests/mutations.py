"""The table of mutations: see mutate.py. Sections share the tests that should kill them."""

from tests.mutate import Mutation

RING = (
    "tests/ops/test_release.py -k slots_go_round",
    "tests/ops/test_streams.py tests/ops/test_wgmma.py",
    "tests/tiles/test_writers.py",
    "tests/tiles/test_emulator_hazards.py",
    "tests/ops/test_cluster.py",
    "tests/attention/recurrent/test_members.py -k as_compiled",
)
SHARED = ("tests/ops/test_wgmma.py", "tests/tiles/test_shared.py tests/ops/test_raw.py", "tests/ops/test_cluster.py")
FENCES = (
    "tests/ops/test_wgmma.py tests/ops/test_tma_stores.py",
    "tests/ops/test_warpgroup.py tests/ops/test_warpgroups.py tests/ops/test_across_warps.py",
    "tests/ops/test_load_store.py tests/ops/test_transposed.py tests/ops/test_scan.py tests/ops/test_shared_vectors.py",
    "tests/ops/test_cluster.py",
    "tests/attention/recurrent/test_members.py -k as_compiled",
)
TURNS = ("tests/ops/test_warpgroups.py", "tests/attention/softmax/test_forward.py -k as_compiled")
COUNTS = (
    "tests/ops/test_async_copy.py tests/ops/test_tma_stores.py tests/ops/test_wgmma.py",
    "tests/tiles/test_pipeline.py",
    "tests/attention/softmax/test_forward.py -k as_compiled",
)
RAW = ("tests/ops/test_raw.py", "tests/ops/test_cluster.py", "tests/ops/test_shared_vectors_by_tma.py")
TEXT = (
    "tests/ops/test_load_store.py tests/ops/test_global_vectorized.py",
    "tests/ops/test_wgmma.py tests/ops/test_mma.py",
    "tests/ops",
)

_ring, _ptx, _shared, _pipeline = "tiles/ring.py", "tiles/ptx.py", "tiles/shared.py", "tiles/pipeline.py"
_raw, _cluster, _turns = "ops/raw.py", "ops/cluster.py", "ops/threads/warpgroups.py"

ROWS: dict[tuple[str, tuple[str, ...]], list[tuple]] = {
    ("ring", RING): [
        ("the parity of full is inverted", _ring, "full_barrier(b, ring, base, slot), parity)\n        return", "full_barrier(b, ring, base, slot), b.xor(parity, b.u32(1)))\n        return"),
        ("the parity of empty, in fill", _ring, "empty_barrier(b, ring, base, slot), b.xor(parity, b.u32(1)))\n        ptx.mbarrier_expect", "empty_barrier(b, ring, base, slot), parity)\n        ptx.mbarrier_expect"),
        ("the parity of empty, in claim", _ring, "empty_barrier(b, ring, base, slot), b.xor(parity, b.u32(1)))\n        return", "empty_barrier(b, ring, base, slot), parity)\n        return"),
        ("parities go by j, not by rounds", _ring, "b.and_(b.udiv(j, n), b.u32(1))", "b.and_(j, b.u32(1))"),
        ("16 bytes too many are expected", _ring, "ptx.mbarrier_expect(b, full, ring.tile.nbytes)", "ptx.mbarrier_expect(b, full, ring.tile.nbytes + 16)"),
        ("half the bytes are expected", _ring, "ptx.mbarrier_expect(b, full, ring.tile.nbytes)", "ptx.mbarrier_expect(b, full, ring.tile.nbytes // 2)"),
        ("empty is the next slot's full", _ring, "full_barrier(b, ring, base, slot), b.u32(BARRIER_BYTES))", "full_barrier(b, ring, base, slot), b.u32(2 * BARRIER_BYTES))"),
        ("one warp of four releases", _ring, "mine = elected(b, LANES) if ring.blocks == 1", "mine = elected(b, WARPGROUP * LANES) if ring.blocks == 1"),
        ("publish without fence and meeting", _ring, "(ptx.warp_sync if isinstance(ring.tile, sv) else ptx.reads_done)(b)", "None"),
        ("publish a tile without a fence", _ring, "(ptx.warp_sync if isinstance(ring.tile, sv) else ptx.reads_done)(b)", "ptx.warp_sync(b)"),
        ("a release that does not wait for its readers' loads", _ring, "        if ring.fenced:\n            ptx.reads_done(b)\n        elif", "        if ring.fenced:\n            pass\n        elif"),
        ("a release of vectors whose lanes do not meet", _ring, "        elif isinstance(ring.tile, sv):\n            ptx.warp_sync(b)\n", ""),
        ("slots are nbytes apart, not room", _ring, "b.mul(slot, b.u32(ring.tile.room))), b.u32(ring.start))", "b.mul(slot, b.u32(ring.tile.nbytes))), b.u32(ring.start))"),
        ("a part's place is off", _ring, "b.mul(b.u32(part), b.u32(box.rows * ring.tile.width))", "b.mul(b.u32(part), b.u32(box.rows * ring.tile.width // 2))"),
        ("parts of a cluster's tile lie where the first does", _ring, "to = b.add(to, b.mul(rank, b.u32(ring.part.rows * ring.tile.width)))", "to = b.add(to, b.mul(b.u32(0), b.u32(ring.part.rows * ring.tile.width)))"),
        ("every block of a cluster brings the same rows", _ring, "b.u32(ring.blocks)), rank)", "b.u32(ring.blocks)), b.u32(0))"),
        ("a shared ring is released in one block only", _ring, 'b.icmp_unsigned("<", b.lane(), b.u32(ring.blocks))', 'b.icmp_unsigned("<", b.lane(), b.u32(1))'),
        ("every part of a tile expects all bytes", _ring, 'with b.if_then(b.icmp_unsigned("==", b.u32(part), b.u32(0))):', 'with b.if_then(b.icmp_unsigned("!=", b.u32(part), b.u32(99))):'),
    ],
    ("shared.open", SHARED): [
        ("full takes one arrival more", _shared, "b.u32(s)), item.writers or 1)", "b.u32(s)), (item.writers or 1) + 1)"),
        ("empty takes one arrival less", _shared, "b.u32(s)), item.readers * item.blocks)", "b.u32(s)), item.readers * item.blocks - 1)"),
        ("no fence after the mbarriers are set up", _shared, "                ptx.mbarrier_fence(b)\n", "                pass\n"),
        ("nobody waits for the mbarriers to be set up", _shared, '        b.do("bar.sync 0;")\n', ""),
        ("the base is not aligned", _shared, "b.u32(ALIGN - 1)), b.u32(-ALIGN))", "b.u32(0)), b.u32(-1))"),
        ("blocks of a cluster do not wait for each other", _shared, "            ptx.cluster_arrive(b)\n            ptx.cluster_wait(b)\n", "            pass\n"),
        ("every thread sets the mbarriers up", _shared, 'b.icmp_unsigned("==", b.special("tid.x"), b.u32(0))', 'b.icmp_unsigned("<", b.special("tid.x"), b.u32(2))'),
    ],
    ("fences and meetings", FENCES): [
        ("reads_done without the meeting", _ptx, "    fence_async(b)\n    warp_sync(b)\n", "    fence_async(b)\n"),
        ("reads_done without the fence", _ptx, "    fence_async(b)\n    warp_sync(b)\n", "    warp_sync(b)\n"),
        ("fence_async does nothing on Hopper", _ptx, "with b.if_then(b.since(90)):", "with b.if_then(b.since(999)):"),
        ("a meeting of several warpgroups is unfenced", _turns, "    ptx.fence_async(b)\n    ptx.named_barrier(b, b.u32(TOGETHER)", "    ptx.named_barrier(b, b.u32(TOGETHER)"),
        ("loads of shared tiles do not say that they are done", "ops/memory/shared_tiles.py", "        ptx.reads_done(b)\n", ""),
        ("load_transposed does not say that it is done", "ops/memory/transposed.py", "        ptx.reads_done(b)\n", ""),
        ("a scan's lanes do not meet", "ops/reductions/scan.py", "        ptx.warp_sync(b)\n", ""),
        ("the second meeting of a reduction is missing", "ops/reductions/across_warps.py", "            group.emit_meet(b)\n            size, folded", "            size, folded"),
        ("the first meeting of a reduction is missing", "ops/reductions/across_warps.py", "            group.emit_meet(b)\n            own = at", "            own = at"),
        ("a TMA store without a meeting before", "ops/memory/tma.py", "            FOUR_WARPS.emit_meet(b)\n", ""),
    ],
    ("turns", TURNS): [
        ("take waits for the next player's turn", _turns, "b.add(b.u32(me), b.u32(turn.first)), 2 * THREADS)", "b.add(b.u32(me), b.u32(turn.first + 1)), 2 * THREADS)"),
        ("give to oneself", _turns, "b.add(b.u32(me), b.u32(turn.first + 1)))", "b.add(b.u32(me), b.u32(turn.first)))"),
        ("the last player gives to nobody", _turns, "b.select(is_last, b.u32(turn.first),", "b.select(is_last, b.u32(turn.first + turn.players),"),
        ("nobody begins", _turns, "            ptx.named_barrier(b, b.u32(turn.first), 2 * THREADS, sync=False)", "            pass"),
        ("turns of one warpgroup's threads", _turns, "b.add(b.u32(me), b.u32(turn.first)), 2 * THREADS)", "b.add(b.u32(me), b.u32(turn.first)), THREADS)"),
    ],
    ("counts", COUNTS): [
        ("bulk stores: one more may be in flight", _ptx, "cp.async.bulk.wait_group.read {newer};", "cp.async.bulk.wait_group.read {newer + 1};"),
        ("bulk stores are not committed", _ptx, '    b.do("cp.async.bulk.commit_group;")\n', ""),
        ("cp.async: one more group may be in flight", _ptx, "cp.async.wait_group {newer};", "cp.async.wait_group {newer + 1};"),
        ("cp.async is not committed", _ptx, '    b.do("cp.async.commit_group;")', "    pass"),
        ("the pipeline's barrier is missing", _pipeline, "        ptx.named_barrier(b, b.u32(0), layout.LANES * pipe.warps)\n", ""),
        ("the pipeline's end is off by one", _pipeline, 'wanted = b.icmp_signed("<", b.u32(j)', 'wanted = b.icmp_signed("<=", b.u32(j)'),
        ("an empty group is not counted", _pipeline, "            lower_copy(b, source, pipe.tile, _address(b, pipe, base, j), array, at, rows, cols, piece, share, first)\n        ptx.copy_commit(b)", "            lower_copy(b, source, pipe.tile, _address(b, pipe, base, j), array, at, rows, cols, piece, share, first)\n            ptx.copy_commit(b)"),
        ("wgmma is not committed", _ptx, '    b.do("wgmma.commit_group.sync.aligned;")', "    pass"),
        ("wgmma: one more may be in flight", _ptx, "wgmma.wait_group.sync.aligned {newer};", "wgmma.wait_group.sync.aligned {newer + 1};"),
        ("no wgmma.fence", _ptx, '"wgmma.fence.sync.aligned;", ",".join(outs + ties)', '"", ",".join(outs + ties)'),
        ("a pipeline's slots are all one", _pipeline, "slot = b.urem(b.u32(j), b.u32(pipe.stages))", "slot = b.urem(b.u32(j), b.u32(1))"),
    ],
    ("raw, cluster", RAW): [
        ("raw.expect of 0 bytes", _raw, "ptx.mbarrier_expect(b, bar, b.u32(n))", "ptx.mbarrier_expect(b, bar, b.u32(0))"),
        ("raw.wait by the other parity", _raw, "b.and_(b.sub(b.u32(n), b.u32(1)), b.u32(1))", "b.and_(b.u32(n), b.u32(1))"),
        ("receive by the other parity", _cluster, "b.and_(b.sub(b.u32(phases), b.u32(1)), b.u32(1))", "b.and_(b.u32(phases), b.u32(1))"),
        ("signal publishes nothing", _cluster, "ptx.mbarrier_arrive_remote(b, address, publish=True)", "ptx.mbarrier_arrive_remote(b, address)"),
        ("signal's lanes do not meet", _cluster, "        ptx.warp_sync(b)\n        with b.if_then(elected(b, LANES)):\n            ptx.mbarrier_arrive_remote", "        with b.if_then(elected(b, LANES)):\n            ptx.mbarrier_arrive_remote"),
        ("receive acquires in its own block only", _cluster, '".acquire.cluster")', '"")'),
        ("map leads to block 0", _ptx, '"mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", address, rank', '"mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", address, b.u32(0)'),
        ("cluster.sync releases nothing", _ptx, "barrier.cluster.arrive.release.aligned;", "barrier.cluster.arrive.relaxed.aligned;"),
        ("every lane stores to a peer", _cluster, 'b.u32(getattr(spec, "holders", 0))), b.u32(0))', "b.u32(0)), b.u32(0))"),
        ("every lane arrives", _raw, "        with b.if_then(elected(b, LANES)):\n            instruction(b, *values)", "        instruction(b, *values)"),
    ],
    ("text", TEXT): [
        ("a ballot's predicate is inverted", _ptx, "setp.ne.u32 p, $1, 0;\\nvote", "setp.eq.u32 p, $1, 0;\\nvote"),
        ("a vote's result is inverted", _ptx, "selp.u32 $0, 1, 0, q;", "selp.u32 $0, 0, 1, q;"),
        ("wgmma subtracts", _ptx, "(1, 1, *(rows_are_k", "(1, -1, *(rows_are_k"),
        ("cp.async's guard is inverted", _ptx, "setp.ne.u32 p, $3, 0;\\n@p cp.async", "setp.eq.u32 p, $3, 0;\\n@p cp.async"),
        ("a shuffle from the wrong lane", _ptx, 'shfl.sync.bfly.b32 $0, $1, {lanes}, 31, -1;', 'shfl.sync.bfly.b32 $0, $1, {lanes ^ 1}, 31, -1;'),
        ("TMA's coordinates in the array's order", _ptx, "at = [at[axis] for axis in tma_axes(gl)]\n    return", "at = list(reversed(at))\n    return"),
        ("a panel's columns are the first's", _ptx, "at[gl.cols] = b.add(at[gl.cols], b.u32(panel * gl.tile.panel_cols))", "at[gl.cols] = b.add(at[gl.cols], b.u32(0))"),
    ],
}  # fmt: skip
NEUTRAL: dict[str, str] = {}
MUTATIONS = [
    Mutation(section, title, file, old, new, killers, NEUTRAL.get(title, ""))
    for (section, killers), rows in ROWS.items()
    for title, file, old, new in rows
]
