"""The PTX instructions that lowerings are made of, each a function of the builder (PTX ISA 8.0 and up),
for sm_90 where nothing else is said.

Addresses in shared memory are 32-bit, global ones 64-bit; barriers are addresses of mbarriers.
"""

from ..dtypes import int8
from .builder import f32, i32, i64, struct

EVICT_FIRST = 0x12F0000000000000  # what createpolicy.fractional.L2::evict_first gives for all of what is read


# ---- mbarrier ------------------------------------------------------------------------------------------------------
def mbarrier_init(b, bar, count):
    """Set a barrier up for `count` arrivals a phase."""
    b.do("mbarrier.init.shared::cta.b64 [$0], $1;", bar, b.u32(count))


def mbarrier_fence(b):
    """Make initialised barriers visible to the asynchronous proxy and the cluster."""
    b.do("fence.mbarrier_init.release.cluster;")


def mbarrier_arrive(b, bar):
    """Arrive once at the mbarrier (mbarrier.arrive.shared::cta.b64)."""
    b.do("mbarrier.arrive.shared::cta.b64 _, [$0];", bar)


def mbarrier_expect(b, bar, nbytes):
    """One arrival, and `nbytes` more bytes to come in this phase."""
    b.do("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", bar, b.u32(nbytes))


def mbarrier_wait(b, bar, parity, scope=""):
    """Until the phase of this parity is complete. scope: ".acquire.cluster" if blocks of the cluster wrote what is awaited."""
    b.do(
        f"{{\n.reg .pred done;\nagain${{:uid}}:\nmbarrier.try_wait.parity{scope}.shared::cta.b64 done, [$0], $1;\n"
        "@!done bra again${:uid};\n}",
        bar,
        parity,
    )


def mbarrier_arrive_remote(b, bar, publish=False):
    """One arrival on a barrier of a block of the cluster, by its address among them all. publish: what this thread wrote is
    visible to the other block, too, which costs a fence of the whole GPU's memory; else it only says what was read."""
    scope = ".release.cluster" * publish
    b.do(f"mbarrier.arrive{scope}.shared::cluster.b64 _, [$0];", bar)


# ---- clusters ------------------------------------------------------------------------------------------------------
def map_shared(b, address, rank):
    """Where block number `rank` of the cluster has what this one has at `address`, as an address among them all."""
    return b.asm(i32, "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", address, rank, effect=False)


def cluster_arrive(b):
    """Announce that this thread has come to the cluster's barrier; what it wrote is then visible to those that wait."""
    b.do("barrier.cluster.arrive.release.aligned;")


def cluster_wait(b):
    """Until all threads of the cluster have arrived."""
    b.do("barrier.cluster.wait.acquire.aligned;")


def grid_wait(b, after=None):
    """Until the grids that this one overlaps are done, and what they wrote is visible; from sm_90 on. after: a
    32-bit register that is computed before. ptxas puts a wait before all that it does not order, so it takes a turn by this."""
    with b.if_then(b.since(90)):
        if after is None:
            b.do("griddepcontrol.wait;")
        else:
            turn = "{\n.reg .pred p;\nsetp.lt.s32 p, $0, 0;\n@p griddepcontrol.wait;\n@!p griddepcontrol.wait;\n}"
            b.do(turn, after)


def grid_release(b):
    """A grid that overlaps this one may begin, once all blocks have said so; from sm_90 on."""
    with b.if_then(b.since(90)):
        b.do("griddepcontrol.launch_dependents;")


# ---- TMA -----------------------------------------------------------------------------------------------------------
def _box(b, gl, at):
    """(element coordinates of the tile at `at`, innermost axis first; which of them is the column's)."""
    at = [b.u32(x) for x in at] + [b.u32(0)] * (gl.rank - len(at))
    for axis, step in gl.steps.items():
        at[axis] = b.mul(at[axis], b.u32(step))
    return at


def _coordinates(b, gl, at, panel, first):
    """The text and operands of one panel's coordinates; operands are numbered from `first`."""
    at = list(at)
    if panel:
        at[gl.cols] = b.add(at[gl.cols], b.u32(panel * gl.tile.panel_cols))
    at = [at[axis] for axis in tma_axes(gl)]
    return "{" + ", ".join(f"${first + k}" for k in range(len(at))) + "}", at


def tma_axes(gl):
    """The array's axes in the order of its tensor map, innermost first: columns, the others from the last on."""
    return [gl.cols] + [axis for axis in reversed(range(gl.rank)) if axis != gl.cols]


def page_number(b, ty, table, sequence, nth, exists):
    """The number of a sequence's nth page, as 32 bits, from a table of type `ty`; 0, and nothing read, where there is none."""
    numbers, _, steps = b.array(ty, table)
    entry = b.add(b.add(numbers, b.mul(b.sext(sequence, i64), steps[0])), b.mul(b.zext(nth, i64), steps[1]))
    wide = ty.dtype.bitwidth == 64
    register, letter, kind = (i64, "l", "b64") if wide else (i32, "r", "b32")
    text = f"{{.reg .pred p;\nsetp.ne.u32 p, $2, 0;\nmov.{kind} $0, 0;\n@p ld.global.{kind} $0, [$1];}}"
    number = b.asm(register, text, f"={letter},l,r", entry, b.zext(exists, i32))
    return b.trunc(number, i32) if wide else number


def tma_load(b, gl, to, source, at, bar, spec=None, blocks=1, once=False):
    """Start copying the tile at `at` into shared memory, one instruction a panel, completing on a barrier. spec: the shared
    tile that it is a part of. blocks: into all that many of the cluster, completing on the barrier of each. once: it leaves L2
    before other data does."""
    box = _box(b, gl, at)
    # for an address that might lie in another block sm_120's code would call a routine, with a stack
    space, cast, mask = ("cluster", ".multicast::cluster", f", {2**blocks - 1}") if blocks > 1 else ("cta", "", "")
    hint, policy = (".L2::cache_hint", ", $3") if once else ("", "")
    policies = [i64(EVICT_FIRST)] if once else []
    for p in range(gl.tile.panels):
        text, coordinates = _coordinates(b, gl, box, p, 3 + once)
        b.do(
            f"cp.async.bulk.tensor.{gl.rank}d.shared::{space}.global.mbarrier::complete_tx::bytes{cast}{hint} "
            f"[$0], [$1, {text}], [$2]{mask}{policy};",
            b.add(to, b.u32(p * (spec or gl.tile).panel_bytes)), source, bar, *policies, *coordinates,
        )  # fmt: skip


def tma_store(b, gl, target, at, spec, tile, fold=None):
    """Start copying a shared tile of type `spec` to the tile at `at`, as one bulk group; `fold`: adding to what is there
    ("add") or keeping the lesser or greater ("min", "max")."""
    copy, fold = ("cp.reduce.async", f".{fold}") if fold else ("cp.async", "")
    box = _box(b, gl, at)
    for p in range(gl.tile.panels):
        text, coordinates = _coordinates(b, gl, box, p, 2)
        b.do(
            f"{copy}.bulk.tensor.{gl.rank}d.global.shared::cta{fold}.tile.bulk_group [$0, {text}], [$1];",
            target, b.add(tile, b.u32(p * spec.panel_bytes)), *coordinates,
        )  # fmt: skip
    b.do("cp.async.bulk.commit_group;")


def tma_store_wait(b, newer=0):
    """Until this thread's bulk stores, all but the `newer` youngest, have read their shared memory."""
    b.do(f"cp.async.bulk.wait_group.read {newer};")


def tma_store_done(b):
    """Until all of this thread's bulk stores are done: what they wrote is visible to it."""
    b.do("cp.async.bulk.wait_group 0;")


def tma_prefetch(b, gl, source, at):
    """Start bringing the tile at `at` to the L2 cache."""
    box = _box(b, gl, at)
    for p in range(gl.tile.panels):
        text, coordinates = _coordinates(b, gl, box, p, 1)
        b.do(f"cp.async.bulk.prefetch.tensor.{gl.rank}d.L2.global.tile [$0, {text}];", source, *coordinates)


def add_global(b, address, x):
    """Add an fp32 register to 4 bytes of global memory, atomically (sm_80 and later); nobody waits for it."""
    b.do("red.relaxed.gpu.global.add.f32 [$0], $1;", address, x)


def add_four_global(b, address, four):
    """Add four fp32 registers to 16 bytes of global memory, each atomically (sm_90 and later); nobody waits for them."""
    b.do("red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};", address, *four)


def count_global(b, address, order):
    """Add 1 to 4 bytes of global memory, atomically; of `order` release once what this thread knows to be written is visible to
    the whole GPU, relaxed at once."""
    b.do(f"red.{order}.gpu.global.add.u32 [$0], 1;", address)


def reset_global(b, address):
    """Write 0 to 4 bytes of global memory; it is there, for the whole GPU, before whatever this thread does next."""
    b.do("st.relaxed.gpu.global.u32 [$0], 0;\nfence.acq_rel.gpu;", address)


def wait_global(b, address, n):
    """Until 4 bytes of global memory hold n or more; what was written before they did is then visible, to TMA, too."""
    b.do(
        "{\n.reg .pred done;\n.reg .s32 found;\nagain${:uid}:\nld.acquire.gpu.global.s32 found, [$0];\n"
        "setp.ge.s32 done, found, $1;\n@done bra end${:uid};\nnanosleep.u32 20;\nbra again${:uid};\nend${:uid}:\n}",
        address,
        n,
    )
    with b.if_then(b.since(90)):
        b.do("fence.proxy.async.global;")


# ---- ordering ------------------------------------------------------------------------------------------------------
def fence_async(b):
    """Make this thread's ordinary accesses to shared memory visible to wgmma and TMA, where there are such (any arch)."""
    with b.if_then(b.since(90)):
        b.do("fence.proxy.async.shared::cta;")


def reads_done(b):
    """Order ordinary loads from shared memory before TMA: it may overwrite what this warp has read as soon as one of its lanes
    says so. (The fence orders a lane's loads before asynchronous writes, the meeting all lanes' before the one that speaks.)"""
    fence_async(b)
    warp_sync(b)


def warp_sync(b):
    """The lanes of this warp meet; what each wrote before is visible to all."""
    b.do("bar.warp.sync 0xffffffff;")


def named_barrier(b, number, threads, sync=True):
    """bar.sync or bar.arrive on a named barrier."""
    b.do(f"bar.{'sync' if sync else 'arrive'} $0, $1;", number, b.u32(threads))


def barrier_vote(b, number, threads, fold, flag):
    """Meet at a named barrier: is `flag` other than 0 in one ("or") or in each ("and") of the threads?"""
    text = f"{{\n.reg .pred p, q;\nsetp.ne.u32 p, $3, 0;\nbar.red.{fold}.pred q, $1, $2, p;\nselp.u32 $0, 1, 0, q;\n}}"
    return b.icmp_unsigned("!=", b.asm(i32, text, "=r,r,r,r", number, threads, flag), b.u32(0))


# ---- wgmma ---------------------------------------------------------------------------------------------------------
def wgmma(b, dtypes, acc, a, desc, n, rows_are_k, accumulate):
    """acc (+)= A @ B for m64 n and 32 bytes along k: `acc` is a list of fp32 registers, of int32 ones if A and B are int8, A a
    descriptor (one value) or four registers, B a descriptor; dtypes: of A, of B; rows_are_k: of A, of B in shared memory: do
    its rows run along k? (Of 2-byte elements only.)"""
    regs = len(acc)
    first = 2 * regs
    out = ", ".join(f"${k}" for k in range(regs))
    from_registers = len(a) > 1
    a_text = "{" + ", ".join(f"${first + k}" for k in range(4)) + "}" if from_registers else f"${first}"
    kind, letter, register = sum_registers(dtypes)
    numbers = [] if register == i32 else [1, 1, *(rows_are_k[from_registers:] if dtypes[0].itemsize == 2 else ())]
    tail = "".join(f", {int(x)}" for x in numbers)
    text = (
        f"{{\n.reg .pred p;\nsetp.ne.b32 p, {int(accumulate)}, 0;\n"
        f"wgmma.mma_async.sync.aligned.m64n{n}k{32 // dtypes[0].itemsize}.{kind}.{'.'.join(d.ptx for d in dtypes)} "
        f"{{{out}}}, {a_text}, ${first + len(a)}, p{tail};\n}}"
    )
    constraints = [f"={letter}"] * regs + [str(k) for k in range(regs)] + (["r"] * 4 if from_registers else ["l"]) + ["l"]
    return b.unpack(b.asm(struct([register] * regs), text, ",".join(constraints), *acc, *a, desc, memory=False))


def sum_registers(dtypes):
    """(PTX's type, the letter of a constraint, LLVM's type) of the sums of products of these dtypes, of A and of B."""
    return ("s32", "r", i32) if dtypes[0] is int8 else ("f32", "f", f32)


def wgmma_fence(b, registers):
    """Order accesses to the registers of accumulator and A before the next wgmma. They pass through, so that LLVM cannot
    move their last change below the fence."""
    if not registers:
        b.do("wgmma.fence.sync.aligned;")
        return []
    outs = ["=f" if r.type == f32 else "=r" for r in registers]
    ret = struct([r.type for r in registers])
    ties = [str(k) for k in range(len(registers))]
    return b.unpack(b.asm(ret, "wgmma.fence.sync.aligned;", ",".join(outs + ties), *registers))


def wgmma_commit(b):
    """Close the group of the wgmmas issued so far."""
    b.do("wgmma.commit_group.sync.aligned;")


def wgmma_wait(b, value, newer):
    """Until all groups but the `newer` youngest are done. The registers pass through, so nothing can touch them before."""
    return pass_through(b, value, f"wgmma.wait_group.sync.aligned {newer};")


def pass_through(b, value, text):
    """A tile's registers after this instruction, for LLVM a value of its own: they are computed before."""
    registers = b.unpack(value)
    letter = "f" if registers[0].type == f32 else "r"
    constraints = [f"={letter}"] * len(registers) + [str(k) for k in range(len(registers))]
    return b.asm(value.type, text, ",".join(constraints), *registers)


# ---- sm_80: cp.async and mma.sync -----------------------------------------------------------------------------------
def copy_async(b, to, source, nbytes, guard, size=16):
    """Start copying `nbytes` bytes to `size` (4, 8 or 16) bytes of shared memory, zeros for the rest; both addresses multiples
    of `size`. Lanes whose `guard` is 0 copy nothing. With nbytes 0 nothing is read."""
    cache = "cg" if size == 16 else "ca"
    text = f"{{.reg .pred p;\nsetp.ne.u32 p, $3, 0;\n@p cp.async.{cache}.shared.global [$0], [$1], {size}, $2;}}"
    b.do(text, to, source, nbytes, guard)


def copy_elements(b, to, source, first, begin, end, guard):
    """Copy 16 bytes, a row's from byte `first` on, to shared memory by loads of 2 bytes each, and a store: what cp.async cannot
    copy, for want of an address that is a multiple of 4. Of the row's bytes those from `begin` on and before `end` are read,
    the others are zeros. Lanes whose `guard` is 0 copy nothing."""
    elements = range(8)
    loads = "".join(
        f"setp.le.and.s32 q, $2, {first + 2 * k}, p;\nsetp.gt.and.s32 q, $3, {first + 2 * k}, q;\n"
        f"mov.b16 e{k}, 0;\n@q ld.global.b16 e{k}, [$1+{2 * k}];\n"
        for k in elements
    )
    words = "".join(f"mov.b32 w{k // 2}, {{e{k}, e{k + 1}}};\n" for k in elements[::2])
    text = (
        "{.reg .pred p, q;\n.reg .b16 e<8>;\n.reg .b32 w<4>;\nsetp.ne.u32 p, $4, 0;\n"
        f"{loads}{words}@p st.shared.v4.b32 [$0], {{w0, w1, w2, w3}};}}"
    )
    b.do(text, to, source, begin, end, guard)
    warp_sync(b)  # the next loads are not begun before: ptxas would begin as many as it finds registers for, and more


def copy_commit(b):
    """Close the group of the cp.async copies that this thread has started."""
    b.do("cp.async.commit_group;")


def copy_wait(b, newer):
    """Until all groups of this thread's copies but the `newer` youngest are done."""
    b.do(f"cp.async.wait_group {newer};")


def mma(b, dtypes, c, a, right):
    """c + A @ B for m16 n8 and 32 bytes along k: four fp32 registers of C, int32 ones if A and B are int8, four registers of A,
    two of B, of these dtypes (fp8: from sm_89)."""
    kind, letter, register = sum_registers(dtypes)
    text = (
        f"mma.sync.aligned.m16n8k{32 // dtypes[0].itemsize}.row.col.{kind}.{'.'.join(d.ptx for d in dtypes)}.{kind} "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    out, operands = struct([register] * 4), [b.bitcast(x, i32) for x in (*a, *right)]
    constraints = ",".join([f"={letter}"] * 4 + ["r"] * 6 + [letter] * 4)
    return b.unpack(b.asm(out, text, constraints, *operands, *c, effect=False))


# ---- lanes and registers -------------------------------------------------------------------------------------------
def shuffle_xor(b, x, lanes):
    """The value of the lane whose number differs in the bits of `lanes`."""
    letter = "f" if x.type == f32 else "r"
    return b.asm(x.type, f"shfl.sync.bfly.b32 $0, $1, {lanes}, 31, -1;", f"={letter},{letter}", x)


def uniform(b, x, effect=True):
    """x of lane 0, which ptxas then knows to be the same for the whole warp. effect: it stays where it stands."""
    return b.asm(i32, "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", x, effect=effect)


def elect(b):
    """Is this the lane that is to do something for its whole warp, all of whose lanes ask?"""
    text = "{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 $0, 1, 0, p;\n}"
    return b.icmp_unsigned("!=", b.asm(i32, text, "=r"), b.u32(0))


def shuffle(b, x, lane):
    """x of lane number `lane`, which each lane chooses for itself."""
    letter = "f" if x.type == f32 else "r"
    return b.asm(x.type, "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", f"={letter},{letter},r", x, lane)


def add_before(b, x, distance):
    """x, and in all but the first lanes what the lane that is `distance` before has as x added to it. x: a float."""
    text = (
        "{.reg .pred p;\n.reg .f32 y;\n"
        + f"shfl.sync.up.b32 y|p, $1, {distance}, 0, -1;\nmov.f32 $0, $1;\n@p add.f32 $0, $0, y;}}"
    )
    return b.asm(x.type, text, "=&f,f", x)


def before(b, x):
    """x of the lane before, in lane 0 a 0. x: a float."""
    text = "{.reg .pred p;\n.reg .f32 y;\nshfl.sync.up.b32 y|p, $1, 1, 0, -1;\nselp.f32 $0, y, 0f00000000, p;}"
    return b.asm(x.type, text, "=f,f", x)


def mul_pair(b, dtype, x, y):
    """Products of two registers of two 2-byte elements, each rounded once: fma with -0, since sm_80 has no mul of bf16x2."""
    return b.asm(i32, f"fma.rn.{dtype.ptx}x2 $0, $1, $2, $3;", "=r,r,r,r", x, y, b.u32(0x80008000), effect=False)


def movmatrix(b, x):
    """An 8x8 matrix of 2-byte elements, two neighbouring ones of a row in each lane, transposed."""
    return b.asm(i32, "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", x)


def ballot(b, flag):
    """One bit a lane: is its `flag` other than 0?"""
    return b.asm(i32, "{\n.reg .pred p;\nsetp.ne.u32 p, $1, 0;\nvote.sync.ballot.b32 $0, p, -1;\n}", "=r,r", flag)


def vote_all(b, flag):
    """Does the flag, a bit, hold in every lane?"""
    text = "{\n.reg .pred here, all;\nsetp.ne.u32 here, $1, 0;\nvote.sync.all.pred all, here, -1;\nselp.u32 $0, 1, 0, all;\n}"
    return b.icmp_unsigned("!=", b.asm(i32, text, "=r,r", b.zext(flag, i32)), b.u32(0))


def opaque(b, x):
    """The integer x, of 32 or 64 bits, of which LLVM knows nothing. It writes x + 32 as x | 32 if no bits meet, and ptxas folds
    only a sum into the address of a load."""
    letter = "r" if x.type == i32 else "l"
    return b.asm(x.type, f"mov.b{x.type.width} $0, $1;", f"={letter},{letter}", x, effect=False)


def wait_for_registers(b, registers):
    """True, as soon as these fp32 registers are computed: compares them with a NaN that no arithmetic makes, which the
    compiler cannot know."""
    true = b.icmp_unsigned("==", b.u32(0), b.u32(0))
    for x in registers:
        true = b.and_(true, b.icmp_unsigned("!=", b.bitcast(x, i32), b.u32(0x7FEDCBA9)))
    return true


def stmatrix(b, address, registers, transposed=False):
    """Four 8x8 matrices of 2-byte elements to shared memory; each lane gives the address of one of their rows."""
    trans = ".trans" if transposed else ""
    b.do(f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [$0], {{$1, $2, $3, $4}};", address, *registers)


def ldmatrix(b, address, transposed=False):
    """Four 8x8 matrices of 2-byte elements from shared memory."""
    trans = ".trans" if transposed else ""
    out = b.asm(
        struct([i32] * 4), f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4];",
        "=r,=r,=r,=r,r", address,
    )  # fmt: skip
    return b.unpack(out)


def set_registers(b, n, increases):
    """Give each thread of the warpgroup `n` registers (setmaxnreg)."""
    b.do(f"setmaxnreg.{'inc' if increases else 'dec'}.sync.aligned.u32 {n};")
