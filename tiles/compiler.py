"""From a kernel to machine code, with or without a GPU: Numba types and lowers it, NVVM and nvJitLink do the rest.

Link-time optimisation stays on: without it ptxas ignores setmaxnreg and serialises wgmma.
"""

import contextlib
import re
from dataclasses import dataclass

from cuda.core import Linker, LinkerOptions, ObjectCode
from llvmlite.ir.values import ArgumentAttributes
from numba.core import types
from numba.cuda import cgutils, compiler, dispatcher, utils
from numba.cuda.core.compiler_machinery import FunctionPass, PassManager, register_pass
from numba.cuda.descriptor import cuda_target

from . import constants, named  # noqa: F401  # they teach Numba
from .builder import i32
from .importable import uncollected
from .plumbing import TENSOR_MAP, forget


@dataclass(frozen=True)
class Compiled:
    """Machine code of one kernel: `name` is its entry, `log` what the linker and ptxas said."""

    cubin: bytes
    name: str
    log: str

    @property
    def registers(self):
        """Registers a thread at launch."""
        return int(re.search(r"Used (\d+) registers", self.log)[1])

    @property
    def spill_bytes(self):
        """Bytes of spill stores and loads."""
        return sum(map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", self.log).groups()))

    @property
    def local_bytes(self):
        """Bytes of stack a thread."""
        return int(re.search(r"(\d+) bytes stack frame", self.log)[1])

    @property
    def warnings(self):
        """Complaints of ptxas: C7510 and its kin say that wgmma was serialised or setmaxnreg ignored."""
        return [line.strip() for line in self.log.splitlines() if re.search(r"\(C7\d\d\d\)|warning", line)]


@contextlib.contextmanager
def _compiling_for(cc):
    """numba-cuda asks the current device for its compute capability when a kernel calls a device function; answer for it,
    so that code for any architecture can be made on any machine. Afterwards Numba keeps nothing of a factory's. Meanwhile no
    garbage is collected: that would take a fifth of the time."""
    asked = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: type("Device", (), {"compute_capability": cc})
    try:
        with uncollected():
            yield
    finally:
        dispatcher.get_current_device = asked
        forget()


def capability(arch):
    """The compute capability of an architecture: "sm_90a" -> (9, 0, "a")."""
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
    if not match:
        raise ValueError(f"arch must look like sm_80 or sm_90a, got {arch!r}")
    major, minor, suffix = match.groups()
    return (int(major), int(minor), suffix) if suffix else (int(major), int(minor))


class _Untyped(ArgumentAttributes):
    """`byval` and not `byval(type)`: before sm_100 NVVM reads the language of LLVM 7."""

    def _expand(self, name, typ):
        return name


def _take_maps_by_value(function, cc):
    """Make a kernel's tensor maps `__grid_constant__` parameters: `byval`, and named to NVVM by their numbers, from 1 on.

    The launch then brings a copy of each map, and TMA reads that copy where the parameters lie. Without the annotation every
    thread would copy its 128 bytes to the stack."""
    numbers = []
    for number, argument in enumerate(function.args, 1):
        if argument.type == TENSOR_MAP.as_pointer():
            argument.attributes = (ArgumentAttributes if cc >= (10, 0) else _Untyped)(["byval"])
            argument.attributes.align = 64  # what cuda.h asks of a CUtensorMap
            numbers.append(i32(number))
    if numbers:
        module = function.module
        note = module.add_metadata([function, "grid_constant", module.add_metadata(numbers)])
        cgutils.get_or_insert_named_metadata(module, "nvvm.annotations").add(note)


@register_pass(mutates_CFG=False, analysis_only=True)
class _Typed(FunctionPass):
    """Ends a pipeline where all is typed."""

    _name = "typed"

    def __init__(self):
        FunctionPass.__init__(self)

    def run_pass(self, state):
        state.cr = state.return_type  # what such a pipeline gives
        return False


class _Typing(compiler.CUDACompiler):
    """Numba's pipeline for kernels, up to where all is typed."""

    def define_cuda_lowering_pipeline(self, state):
        passes = PassManager("typing")
        passes.add_pass(_Typed, "all is typed")
        passes.finalize()
        return passes


def check_types(kernel, signature, arch):
    """TypingError, or what else Numba says, if it would refuse this kernel for these types of arguments."""
    cc = capability(arch)[:2]
    with _compiling_for(cc), utils.numba_target_override():
        flags = compiler.CUDAFlags()
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        flags.error_model, flags.compute_capability = "numpy", cc
        compiler.compile_extra(
            cuda_target.typing_context, cuda_target.target_context, kernel.py_func, signature, types.void, flags, {}, _Typing
        )


class Lowered:
    """A kernel that Numba has typed and lowered for an architecture, and NVVM optimised: what machine code and PTX are linked
    from. lines: with a table of the lines of Python it comes from."""

    def __init__(self, kernel, signature, arch, lines=False):
        cc, options = capability(arch), kernel.targetoptions
        with _compiling_for(cc[:2]):
            library, _ = compiler._compile_pyfunc_with_fixup(
                kernel.py_func,
                types.void(*signature),
                device=False,
                abi="numba",
                cc=cc,
                fastmath=options.get("fastmath", False),
                launch_bounds=options.get("launch_bounds"),
                lineinfo=lines,
                lto=True,
            )
        _take_maps_by_value(library.get_function(library._entry_name), cc)
        self.arch, self.name = arch, library._entry_name
        self.code = ObjectCode.from_ltoir(bytes(library.get_ltoir(cc)))

    def _linker(self, **options):
        return Linker(self.code, options=LinkerOptions(arch=self.arch, link_time_optimization=True, **options))

    def machine_code(self) -> Compiled:
        """What the GPU executes."""
        linker = self._linker(verbose=True, ptxas_options=["-v"])
        cubin = linker.link("cubin")
        return Compiled(bytes(cubin.code), self.name, linker.get_info_log() + linker.get_error_log())

    def ptx(self) -> str:
        """The text that this is assembled from."""
        return bytes(self._linker(ptx=True).link("ptx").code).decode().rstrip("\0")


def compile_kernel(kernel, signature, arch) -> Compiled:
    """Machine code for `arch` of a `@cuda.jit` kernel and the Numba types of its arguments. No GPU is needed."""
    return Lowered(kernel, signature, arch).machine_code()
