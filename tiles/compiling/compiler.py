"""From a kernel to machine code, with or without a GPU: Numba types and lowers it, NVVM and nvJitLink do the rest.

Link-time optimisation stays on: without it ptxas ignores setmaxnreg and serialises wgmma.
"""

import contextlib
import functools
import itertools
import re
import threading
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

from cuda.bindings.nvjitlink import nvJitLinkError
from cuda.core import Linker, LinkerOptions, ObjectCode
from llvmlite.ir.instructions import PhiInstr
from llvmlite.ir.values import ArgumentAttributes
from numba.core import types
from numba.cuda import cgutils, compiler, dispatcher
from numba.cuda.cudadrv import nvrtc

from ..importable import uncollected
from ..targets import Target, parse_target
from . import constants, faster_llvmlite, faster_numba, named_tuples  # noqa: F401  # they teach Numba
from .builder import i32
from .line_table import SourcePlace, of_ptx
from .numba_helpers import forget, helpers_as
from .numba_types import TENSOR_MAP
from .plain_errors import translate_errors
from .type_inference import typed
from .wgmma_overwrites import complaints, overwritten


@dataclass(frozen=True)
class Compiled:
    """Machine code of one kernel: `name` is its entry, `log` what the linker and ptxas said."""

    cubin: bytes
    name: str
    log: str

    @property
    def registers(self):
        """The number of registers of a thread at launch."""
        return int(re.search(r"Used (\d+) registers", self.log)[1])

    @property
    def spill_bytes(self):
        """The number of bytes of spill stores and loads."""
        return sum(map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", self.log).groups()))

    @property
    def local_bytes(self):
        """The number of bytes of a thread's stack."""
        return int(re.search(r"(\d+) bytes stack frame", self.log)[1])

    @property
    def shared_bytes(self):
        """Bytes of shared memory that the kernel itself declares, besides what a launch brings."""
        match = re.search(r"(\d+) bytes smem", self.log)
        return int(match[1]) if match else 0

    @property
    def warnings(self):
        """The warnings of ptxas, each once: C7510 and the like say that wgmma was serialised or setmaxnreg ignored. And ours,
        about what ptxas overlooks (wgmma_overwrites.py)."""
        lines = [line.strip() for line in self.log.splitlines() if re.search(r"\(C7\d\d\d\)|warning|^tiles: ", line)]
        return list(dict.fromkeys(re.sub(rf"'?{re.escape(self.name)}'?", "the kernel", line) for line in lines))


class CompileError(RuntimeError):
    """ptxas or the linker refuse a kernel. complaints: [(what they say, the Place that it is about, or Place())], each once.
    missing_features: the instructions that the architecture does not have."""

    SHOWN = 8  # places

    def __init__(self, title, arch, complaints):
        self.complaints = list(dict.fromkeys(complaints))
        matches = [_LACKS.search(said) for said, _ in self.complaints]
        self.missing_features = list(dict.fromkeys(match[1] for match in matches if match))
        super().__init__(f"{title} cannot be compiled for {arch}:\n{self.text}")

    @property
    def text(self):
        """The complaints, under the places that they are about."""
        by_place: dict[SourcePlace, list[str]] = {}
        for message, place in self.complaints:
            by_place.setdefault(place, []).append(message)
        printed = list(by_place.items())[: self.SHOWN]
        parts = [
            [str(place), *(f"    {message}" for message in message_lines)] if place.lines else message_lines
            for place, message_lines in printed
        ]
        if omitted := len(by_place) - len(printed):
            parts.append([f"and {omitted} more places"])
        return "\n".join(f"  {line}" for part in parts for line in part)


_LACKS = re.compile(r"(?:Instruction|Feature|Modifier) '\.?([^']+)' (?:not supported on|requires) \.target")
_COMPLAINT = re.compile(r"(?:ptxas application ptx input, line (\d+); )?(?:ptxas )?(?:error|fatal)\s*: *(.+)", re.IGNORECASE)
_SUMMARY = re.compile(r"aborted due to errors|NVJITLINK_ERROR")  # the lines after the complaints, which are none themselves


REPLACEMENTS = [*faster_numba.REPLACEMENTS, *faster_llvmlite.REPLACEMENTS]
_numba_lock = threading.RLock()  # Numba cannot compile in two threads at once


@contextlib.contextmanager
def _compiling_for(cc, form="code"):
    """Inside, code is compiled for this compute capability, on any machine. (When a kernel calls a device function, numba-cuda
    asks the current device for its capability: we answer for it.) No garbage is collected inside, which would take a fifth of
    the time. Afterwards Numba forgets what a factory made. form: of the functions that are compiled in (helpers_as)."""
    device = SimpleNamespace(compute_capability=cc)
    instead = (dispatcher, "get_current_device", lambda: device), *REPLACEMENTS
    with _numba_lock, uncollected(), helpers_as(form):
        before = [getattr(owner, name) for owner, name, _ in instead]
        for owner, name, ours in instead:
            setattr(owner, name, ours)
        try:
            yield
        finally:
            for (owner, name, _), theirs in zip(instead, before):
                setattr(owner, name, theirs)
            forget()


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


_texts: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # the text of each module: kernels share their helpers


def _text(module):
    """LLVM's text of a module. Its instructions are not needed afterwards and are freed here: as they refer to each other, the
    garbage collector would take ten times as long."""
    if module not in _texts:
        _texts[module] = faster_llvmlite.name_structs(str(module))
        for function in module.functions:
            for block in function.blocks:
                for instruction in block.instructions:
                    if isinstance(instruction, PhiInstr):
                        instruction.incomings.clear()
                block.instructions.clear()
                block.terminator = None
    return _texts[module]


def check_arch(arch: str) -> None:
    """ValueError: kernels are not compiled for this architecture."""
    known = _known_capabilities()
    target = parse_target(arch)
    if not target.supported or target.capability not in known:
        names = ", ".join(str(target) for target in itertools.starmap(Target, known) if target.supported)
        raise ValueError(f"arch must be one of {names}, from sm_90 on also with an a behind it (sm_90a), got {arch!r}")


@functools.cache
def _known_capabilities():
    return nvrtc.get_supported_ccs()


def check_types(kernel, signature, arch):
    """Raises what Numba would say of this kernel for these types of arguments, if it refuses them: a TypeError or NameError in
    plain words (plain_errors.py), or else Numba's own error."""
    cc = parse_target(arch).capability
    with _compiling_for(cc, "types"), translate_errors(kernel.py_func):
        typed(kernel.py_func, signature, types.void, cc)


class Lowered:
    """A kernel that Numba has typed and lowered for an architecture: what NVVM and the linker make machine code and PTX from.
    lines: with a table of the lines of Python it comes from."""

    def __init__(self, kernel, signature, arch, lines=False):
        check_arch(arch)
        target, options, refused = parse_target(arch), kernel.targetoptions, None
        cc = (*target.capability, target.suffix) if target.suffix else target.capability  # as Numba has it
        with _compiling_for(target.capability, "lines" if lines else "code"):
            try:
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
                library._llvm_strs = [_text(module) for module in dict.fromkeys(library.modules)]  # each once, whoever calls it
            except Exception as error:
                refused = error
        if refused:
            check_types(kernel, signature, arch)  # raises the same in plain words, if it can
            raise refused
        self.library, self.cc = library, cc
        self.kernel, self.signature, self.lines = kernel, signature, lines
        self.arch, self.name = arch, library._entry_name

    @functools.cached_property
    def code(self):
        """The kernel as NVVM's bitcode for the linker."""
        return ObjectCode.from_ltoir(bytes(self.library.get_ltoir(self.cc)))

    def _linker(self, **options):
        return Linker(self.code, options=LinkerOptions(arch=self.arch, link_time_optimization=True, **options))

    def machine_code(self) -> Compiled:
        """What the GPU executes. CompileError: ptxas or the linker refuse it."""
        cubin, log = self._linked()
        return Compiled(cubin, self.name, "\n".join([log, *self._overlooked(cubin)]))

    def _linked(self):
        """(machine code, what the linker and ptxas say)"""
        linker = self._linker(verbose=True, ptxas_options=["-v"])
        try:
            cubin = linker.link("cubin")
        except nvJitLinkError as error:
            raise self._refused(str(error)) from None
        return bytes(cubin.code), linker.get_info_log() + linker.get_error_log()

    def ptx(self) -> str:
        """The PTX that the machine code is assembled from."""
        return bytes(self._linker(ptx=True).link("ptx").code).decode().rstrip("\0")

    def _with_lines(self):
        return Lowered(self.kernel, self.signature, self.arch, lines=True)

    def _overlooked(self, cubin):
        """The warnings about wgmma that ptxas should have given; none if there is no disassembler. To name the line of Python,
        the kernel is compiled once more, with a table of lines."""
        with contextlib.suppress(FileNotFoundError, RuntimeError):
            if parse_target(self.arch).has_wgmma and overwritten(cubin):
                if not self.lines and (complaints_found := complaints(self._with_lines()._linked()[0])):
                    return complaints_found
                return complaints(cubin)
        return []

    def _refused(self, log):
        """The CompileError for this log, whose line numbers are those of the PTX. To name the lines of Python, the kernel is
        compiled once more, with a table of lines."""
        if not self.lines:
            try:
                self._with_lines().machine_code()
            except CompileError as error:
                return error
        messages = _COMPLAINT.findall("\n".join(line for line in log.splitlines() if not _SUMMARY.search(line)))
        places = [SourcePlace(), *of_ptx(self.ptx())] if any(number for number, _ in messages) else [SourcePlace()]
        known = title(self.kernel)
        messages = [(message.replace(self.name, known), places[int(number or 0)]) for number, message in messages]
        return CompileError(known, self.arch, messages or [(log.strip(), SourcePlace())])


def title(kernel) -> str:
    """The kernel's name, as errors and reports give it."""
    return kernel.py_func.__name__


def compile_kernel(kernel, signature, arch, turn: contextlib.AbstractContextManager | None = None) -> Compiled:
    """Machine code for `arch` of a `@cuda.jit` kernel and the Numba types of its arguments. No GPU is needed. turn: Numba works
    inside it. CompileError: ptxas or the linker refuse it."""
    with turn or contextlib.nullcontext():
        lowered = Lowered(kernel, signature, arch)
    return lowered.machine_code()
