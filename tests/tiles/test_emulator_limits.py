"""tiles/emulator: what an instruction may not do with memory, barriers and registers."""

import re

import numpy as np
import pytest
from emulated import SHARED, execute, stops

from tiles import barrier, bf16, shared, st

PLAN = shared(x=st(16, 64, bf16), full=barrier(1))  # 2048 bytes from 1040 on, and a barrier
INIT = ".reg .pred p; setp.eq.u32 p, %t, 0; @p mbarrier.init.shared.b64 [s], 1;\n"
FORBIDDEN = {  # PTX: (kind, words)
    "ld.global.b32 x, [%a0+2];": ("bounds", "4 bytes at 0x.*, which is no multiple"),
    "ld.global.v4.b32 {x, x, x, x}, [%a0+4];": ("bounds", "16 bytes at 0x.*, which is no multiple"),
    "ld.global.b32 x, [%a0+128];": ("bounds", "do not all lie in one of the launch.s arrays"),
    "ld.global.b32 x, [%a0+-4];": ("bounds", "do not all lie in one of the launch.s arrays"),
    "st.global.b32 [%a0+128], x;": ("bounds", "do not all lie in one of the launch.s arrays"),
    "mad.wide.u32 d, %t, 8, %a0; st.global.b32 [d], x;": ("bounds", "do not all lie in one"),
    "mad.wide.u32 d, %t, 2, %a0; ld.global.b32 x, [d];": ("bounds", "4 bytes at 0x.*, which is no multiple"),  # of some lanes
    "mad.lo.u32 s, %t, 2, s; ld.shared.b32 x, [s];": ("bounds", "shared memory at .*, which is no multiple of 4"),
    "ld.shared.b32 x, [s+2];": ("bounds", "shared memory at .*, which is no multiple of 4"),
    "ld.shared.v2.b32 {x, x}, [s+4];": ("bounds", "no multiple of 8"),
    "ld.shared.b32 x, [s+8192];": ("bounds", "of shared memory, which ends at"),
    "st.shared.b32 [s+-2000], x;": ("bounds", "the cluster has no block 255"),
    "cp.async.cg.shared.global [s], [%a0], 8;": ("language", "cp.async.cg copies 16 bytes, not 8"),
    "cp.async.ca.shared.global [s+4], [%a0], 8;": ("bounds", "no multiple of 8"),
    "cp.async.ca.shared.global [s], [%a0+4], 8;": ("bounds", "cp.async of 8 bytes from an address that is no multiple"),
    "cp.async.ca.shared.global [s], [%a0+128], 4;": ("bounds", "do not all lie in one"),
    "cp.async.ca.shared.global [s], [%a0], 4, 8;": ("bounds", "cp.async of 8 bytes into 4"),
    "st.shared.b32 [s], %t;": ("race", "lanes put different numbers in the same place"),
    "st.shared.b32 [s], x; .reg .pred p; setp.eq.u32 p, %t, 3; @p st.shared.b32 [s], x;": ("race", "after the write"),
    "mbarrier.arrive.shared.b64 d, [s+64];": ("storage", "no mbarrier lies at"),
    INIT + "bar.warp.sync -1; st.shared.b32 [s], x;": ("storage", "where an mbarrier lies"),
    INIT + "bar.warp.sync -1; @p mbarrier.init.shared.b64 [s], 1;": ("storage", "where one lies"),
    INIT + "@p mbarrier.arrive.shared.b64 d, [s]; mbarrier.try_wait.parity.shared.b64 p, [s], 0;": ("race", "after the set-up"),
    INIT + "bar.warp.sync -1; mbarrier.arrive.shared.b64 d, [s];": ("arrivals", "a phase takes 1 arrivals"),
    ".reg .b32 y; add.u32 x, y, 1;": ("never written", "reads a register that nobody has written"),
    "add.u32 x, %t, 1; bar.sync x, 32;": ("divergence", "name different barriers"),
    "bar.sync 16, 32;": ("bounds", "named barriers are numbered 0 to 15, got 16"),
    "shfl.sync.bfly.b32 x, x, 1, 31, 0xFFFF;": ("language", "the emulator takes only 0xffffffff, a whole warp"),
    "mapa.shared::cluster.u32 x, s, 1; ld.shared::cluster.b32 x, [x];": ("bounds", "the cluster has no block 1"),
    INIT + "bar.warp.sync -1; mad.lo.u32 s, %t, 8, s; mbarrier.try_wait.parity.shared.b64 p, [s], 0;": (
        "divergence",
        "lanes wait for different barriers or parities",
    ),
    INIT + "bar.warp.sync -1; mbarrier.try_wait.parity.shared.b64 p, [s], %t;": (
        "divergence",
        "different barriers or parities",
    ),
    "mad.lo.u32 x, %t, 8, s; st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [x], %t, [x];": (
        "divergence",
        "the lanes of a st.async signal different mbarriers",
    ),
    ".reg .b32 f; mov.b32 f, 0f00000000; red.global.add.v4.f32 [%a0+4], {f, f, f, f};": (
        "bounds",
        "red.global.add.v4.f32 at 0x.*, which is no multiple of 16",
    ),
    ".reg .b32 f; mov.b32 f, 0f3F800001; "
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {x, x, x, x}, {f, f, f, f}, {f, f}, {x, x, x, x};": (
        "language",
        "a number is not rounded to tf32",
    ),
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {x}, [s+4];": ("bounds", "shared memory at .*, which is no multiple of 16"),
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {x}, [s];": ("never written", "which nobody has written"),
}


@pytest.mark.parametrize("body", FORBIDDEN)
def test_forbidden(body):
    kind, words = FORBIDDEN[body]
    actual = stops(kind, words, execute, SHARED + body, np.zeros(32, np.uint32), shared=PLAN)
    assert re.search(r"PTX line \d+ `", actual.line)


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (
            ".reg .b32 r, y; and.b32 r, %t, 1; mapa.shared::cluster.u32 y, s, r; st.shared::cluster.b32 [y], x;",
            "language",
            "one instruction reaches into several blocks",
        ),
        (
            ".reg .b32 r, y, z; mov.u32 r, %cluster_ctarank; mapa.shared::cluster.u32 y, s, r; xor.b32 r, r, 1; "
            "mapa.shared::cluster.u32 z, s, r; mad.lo.u32 z, %t, 4, z; "
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [z], x, [y];",
            "storage",
            "st.async writes to one block and signals another's mbarrier",
        ),
    ],
)
def test_forbidden_in_a_cluster(body, kind, words):
    stops(kind, words, execute, SHARED + body, shared=PLAN, blocks=2)
