"""Numba's compiler with less to do: what it does again and again is done once, and what nobody asks for is left out. While
tiles/compiling/compiler.py compiles, the functions of REPLACEMENTS stand in the place of Numba's. The code that comes out is
the same.

Of Numba's part of an attention kernel, two seconds, they save about half (bench/notes/host.md).
"""

import contextlib
import copy
import functools
import importlib.util
import inspect
import types as python_types
import weakref
from collections import Counter

from numba.core.types.functions import BaseFunction
from numba.cuda import compiler as cuda_compiler
from numba.cuda import lowering, target, types, utils
from numba.cuda.core import (
    analysis,
    base,
    bytecode,
    byteflow,
    compiler,
    compiler_machinery,
    errors,
    interpreter,
    ir,
    postproc,
    ssa,
    targetconfig,
    transforms,
    typed_passes,
    typeinfer,
    untyped_passes,
)
from numba.cuda.core.rewrites.ir_print import RewritePrintCalls
from numba.cuda.debuginfo import CUDADIBuilder
from numba.cuda.misc import firstlinefinder
from numba.cuda.np import linalg
from numba.cuda.typing import context

from .numba_helpers import table_of_kernel
from .type_inference import Inferer


class _TableOfLines(CUDADIBuilder):
    """Numba's description of a function for debuggers, but for what nobody asks of a table of lines: types and variables. A
    tile is a struct of many fields, and to describe those of all calls took a third of the time."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._locations = {}

    def _di_subroutine_type(self, *_):
        return self.module.add_debug_info("DISubroutineType", {"types": self.module.add_metadata([])})

    def _di_location(self, line):
        at = len(self.subprograms), line
        if at not in self._locations:
            self._locations[at] = super()._di_location(line)
        return self._locations[at]

    def mark_variable(self, *_, **__):
        pass

    update_variable = mark_variable


_begins: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # code: {its file: the line where its function begins}


def _line_of_def(function):
    """Where a function begins; its source is parsed once. Numba itself fails at lambdas, and at bodies of nothing but a
    docstring."""
    code, line = function.__code__, None
    known = _begins.setdefault(code, {})
    if code.co_filename not in known:
        with contextlib.suppress(IndexError, SyntaxError):
            line = firstlinefinder.get_func_def_lineno(function)
        known[code.co_filename] = line or code.co_firstlineno
    return known[code.co_filename]


class _Processed(postproc.PostProcessor):
    """Numba's care for a function that a pass has changed, which variables live where, found when somebody asks: after most
    passes nobody does. It took a tenth of the time."""

    def run(self, emit_dels=False, extend_lifetimes=False):
        code = self.func_ir
        if code.is_generator:
            return super().run(emit_dels, extend_lifetimes)
        if len(code.blocks) > 1:
            code.blocks = transforms.canonicalize_cfg(code.blocks)
        code.variable_lifetime, code.generator_info = postproc.VariableLifetime(code.blocks), None
        if emit_dels:
            self._insert_var_dels(extend_lifetimes=extend_lifetimes)


_defaults: dict[type, dict] = {}  # of each class of Numba's flags, what they say where nobody sets one


def _flags(self):
    """What all flags say; Numba asks for each by its name."""
    if type(self) not in _defaults:
        _defaults[type(self)] = {name: option.default for name, option in self.options.items()}
    return {**_defaults[type(self)], **self._values}


_of_numbers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # function's type: {types of arguments: the call's type}
_find = BaseFunction.get_call_type


def _call_type(self, context, args, kws):
    """A function's type of a call. Of numbers, each once: to find that of `i + 1` Numba tries dozens of rules and writes down
    why each of them is not it, which took a twelfth of the time."""
    if kws or not all([isinstance(x, (types.Number, types.Boolean)) for x in args]):
        return _find(self, context, args, kws)
    known = _of_numbers.setdefault(self, {})
    if args not in known:
        known[args] = _find(self, context, args, kws)
    return known[args]


_sizes: dict[str, int] = {}  # of LLVM's types, in bytes
_size = base.BaseContext.get_abi_sizeof


def _size_of(self, ty):
    """An LLVM type's. Numba has LLVM read a module of its own for each variable, and tells debuggers."""
    name = str(ty)
    if name not in _sizes:
        _sizes[name] = _size(self, ty)
    return _sizes[name]


class _Context:
    """Numba's error context: an error that is raised inside says where. Every statement is in several, and a generator for each
    costs more than what they are for."""

    __slots__ = ("said",)

    def __init__(self, form, *args, **names):
        self.said = form, args, names
        if (place := names.get("loc")) is not None and not place.filename.startswith(errors._numba_path):
            errors.loc_info.update(names)

    def __enter__(self):
        pass

    def __exit__(self, kind, error, _):
        if isinstance(error, errors.NumbaError):
            form, args, names = self.said
            error.add_context(form.format(*args, **names))


_NO_CONTEXT = contextlib.nullcontext()


class _Inferer(Inferer):
    """The search for types; once all are known, nothing of it stays."""

    def unify(self, raise_errors=True):
        unified = super().unify(raise_errors)
        vars(self).clear()
        return unified


_resolve_call = typeinfer.CallConstraint.resolve


def _resolve(self, search, variables, fnty):
    """Find the type of a call, unless all that it follows from is what it was. Numba goes through all statements until a round
    tells nothing new, so each call was resolved twice at least."""
    names = [x.name for x in (*self.args, *(value for _, value in self.kws), *([self.vararg] if self.vararg else ()))]
    known = fnty, [variables[name].type for name in names]
    if self.signature is None or not self.signature.return_type.is_precise() or vars(self).get("known") != known:
        _resolve_call(self, search, variables, fnty)
        self.known = known


_resolve_attribute = typeinfer.GetAttrConstraint.__call__


def _attribute(self, search):
    """Find the type of an attribute, unless that of its object is what it was."""
    known = search.typevars[self.value.name].type
    if known is None or vars(self).get("known") is not known:
        _resolve_attribute(self, search)
        self.known = known


_find_assigned_once = lowering.Lower._find_singly_assigned_variable


def _assigned_once(self):
    """Which variables stay in registers: those that are assigned once, and used in that block alone. Numba went through a
    block's statements for each of them."""
    if self.func_ir.func_id.is_generator:
        return _find_assigned_once(self)
    blocks, places = self.func_ir.blocks, self.func_ir.variable_lifetime.usedefs
    used = {name for names in places.usemap.values() for name in names}
    defined = Counter(name for names in places.defmap.values() for name in names)
    once = set()
    for label, names in places.defmap.items():
        assigned = Counter(x.target.name for x in blocks[label].find_insts(ir.assign_types))
        once |= {name for name in names if defined[name] == assigned[name] == 1 and name not in used}
    self._singly_assigned_vars = once - analysis.must_use_alloca(blocks)
    self._blk_local_varmap = {}
    return None


_decoded: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # code: its instructions


def _extract_bytecode(self, state):
    """The instructions of a function, decoded once: half of the functions are compiled for several types of arguments."""
    code = state.func_id.code
    if code not in _decoded:
        _decoded[code] = decoded = bytecode.ByteCode(state.func_id)
        decoded.func_id = None
    state.bc = copy.copy(_decoded[code])
    state.bc.func_id = state.func_id
    return True


FLOWS = 256  # functions, of 30 to 50 KB each
_flows: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # code: (what its blocks do to the stack, where they lead)


class _Flow:
    """What Numba finds when it follows the instructions of a function over all branches: once, as they are decoded once."""

    def __init__(self, instructions):
        code = instructions.func_id.code
        if code not in _flows:
            flow = byteflow.Flow(instructions)
            flow.run()
            if len(_flows) >= FLOWS:
                _flows.clear()
            _flows[code] = flow.block_infos, flow.cfgraph
        self.block_infos, self.cfgraph = _flows[code]

    def run(self):
        pass


_handle_exception = byteflow.Flow._run_handle_exception


def _next_instruction(self, runner, state):
    """What follows an instruction: the next one, in a function without exceptions or `with`, both of which have a table."""
    if getattr(state._bytecode.func_id.code, "co_exceptiontable", True):  # Python 3.10 has no such tables
        return _handle_exception(self, runner, state)
    return state.advance_pc()


class _NoLog:
    """A logger, asked several times for each statement, that nobody reads."""

    @staticmethod
    def debug(*_):
        pass


_delete_exit = interpreter.peep_hole_delete_with_exit


def _delete_exit_of_with(function):
    """A rewrite that collects the variables of all statements, twice: only of `with` there is something to delete."""
    begins = any([name.startswith("$setup_with_exitfn") for name in function._definitions])
    return _delete_exit(function) if begins else function


_fuse_dicts = interpreter.peep_hole_fuse_dict_add_updates


def _fuse_long_dicts(function):
    """A rewrite that collects the variables of all statements: only dictionaries are anything to it."""
    values = [x for definitions in function._definitions.values() for x in definitions]
    has_dicts = any([isinstance(x, ir.Expr) and x.op == "build_map" for x in values])
    return _fuse_dicts(function) if has_dicts else function


_match_prints = RewritePrintCalls.match


def _match_print(self, function, block, *types_of):
    """A pass that looks for calls of print. Numba words an error for each call of what is no constant, as methods are."""
    calls = [x.value for x in block.find_insts(ir.Assign) if isinstance(x.value, ir.Expr) and x.value.op == "call"]
    if any([_constant(function, call.func) is print for call in calls]):
        return _match_prints(self, function, block, *types_of)
    self.prints, self.block = {}, block
    return False


def _constant(function, variable):
    """The global, or what is read from a module or class, that a variable holds; None: there is none."""
    try:
        value = function.get_definition(variable)
    except KeyError:  # there are several
        return None
    if isinstance(value, ir.Expr) and value.op == "getattr":
        owner = _constant(function, value.value)
        return getattr(owner, value.attr, None) if isinstance(owner, (python_types.ModuleType, type)) else None
    return value.value if isinstance(value, (ir.Global, ir.FreeVar, ir.Const)) else None


_packers = table_of_kernel()  # types of arguments: how they are passed
_packer = base.BaseContext.get_arg_packer


def _packer_of(self, arguments):
    """How arguments of these types are passed; Numba works it out for each call."""
    key = tuple(arguments)
    if key not in _packers:
        _packers[key] = _packer(self, arguments)
    return _packers[key]


_values = table_of_kernel()  # a constant's identity: (the constant, its type)
_type_of_value = target.CUDATypingContext.resolve_value_type


def _value_type(self, value):
    """The type of a global or another constant. Numba asks all its rules, and catches their errors, each time it is named."""
    known = _values.get(id(value))
    if known is None:
        known = _values[id(value)] = value, _type_of_value(self, value)
    return known[1]


_keeps_variables = functools.cached_property(lowering.Lower._disable_sroa_like_opt.fget)  # asked several times a statement
_keeps_variables.__set_name__(lowering.Lower, "_disable_sroa_like_opt")


def _has_lists(function):
    """Does a function make lists, or functions, as comprehensions do?"""
    values = [x.value for block in function.blocks.values() for x in block.body if isinstance(x, ir.Assign)]
    return any(isinstance(x, ir.Expr) and x.op in ("build_list", "make_function") for x in values)


_inline = untyped_passes.InlineClosureLikes.run_pass


def _inline_closures(self, state):
    """A pass that searches all calls and loops: only closures, comprehensions and functools.reduce are anything to it."""
    if _has_lists(state.func_ir) or "reduce" in state.func_ir.func_id.code.co_names:
        return _inline(self, state)
    return False


def _asks_to_be_inlined(templates):
    """Is one of these ways to type a call or an attribute an overload that Numba itself must inline?"""
    return any(not inline.is_never_inline for x in templates or () if (inline := getattr(x, "_inline", None)) is not None)


_inline_all = typed_passes.InlineOverloads.run_pass


def _inline_overloads(self, state):
    """A pass that types all attributes and calls once more, for overloads that must be inlined: there are hardly any."""
    context, expressions = state.typingctx, [x for block in state.func_ir.blocks.values() for x in block.find_exprs()]
    operators = {x.fn for x in expressions if "fn" in x._kws}
    for ty in (*{*state.typemap.values()}, *map(context.resolve_value_type, operators)):
        templates = *(getattr(ty, "templates", None) or ()), getattr(ty, "template", None)
        if _asks_to_be_inlined(templates) or _asks_to_be_inlined(context._get_attribute_templates(ty)):
            return _inline_all(self, state)
    return False


_rewrite = typed_passes.NopythonRewrites.run_pass


def _rewrite_typed(self, state):
    """A pass that finds out which variable lives where, to rewrite arrays made of lists, and fields named by strings."""
    if _has_lists(state.func_ir) or any(isinstance(x, types.StringLiteral) for x in state.typemap.values()):
        return _rewrite(self, state)
    return False


def _run_pass(self, _, step, state):
    """One pass over a function, of two dozen: without clocks, events and prints, and without the search for what Numba's own
    passes must not leave behind, for which each looked through all statements."""
    step.analysis = self._analysis
    with _Context("Pass {0}", step.name()):
        changed = [step.run_initialization(state), step.run_pass(state), step.run_finalizer(state)]
    if any(changed) and compiler_machinery._pass_registry.get(type(step)).mutates_CFG:
        _Processed(state.func_ir).run()


_pipelines: dict[tuple, list] = {}  # what a function's passes depend on: the passes
_define = cuda_compiler.CUDACompiler.define_pipelines


def _passes(self):
    """The passes that a function goes through. Numba looks up anew, for each, what they need of each other."""
    flags = self.state.flags
    key = self.state.func_ir is None, flags.no_rewrites, flags.enable_ssa
    if key not in _pipelines:
        _pipelines[key] = _define(self)
    return _pipelines[key]


_rule_counts: dict[int, list[int]] = {}  # of a context's registries: how much each held when they were last read
_contexts_read: list[int] = []  # the contexts whose registries are being read


def _refreshed(refresh):
    """A context's look for what registries hold that it has not seen. Numba looks before each function, whenever there is
    nothing for some types yet, and for each attribute of NumPy's that it reads there; here it looks if they hold more than
    before, and not again inside such a look."""

    def count_rules(registry):
        both = *registry._registries, *getattr(getattr(registry, "typing_context", None), "_registries", ())
        return [len(entries) for registry in both for entries in vars(registry).values()]

    def refreshed(self):
        key = id(self._registries)  # which a context shares with its copies
        if key in _rule_counts and (_contexts_read or _rule_counts[key] == count_rules(self)):
            return
        _contexts_read.append(key)
        try:
            refresh(self)
        finally:
            _contexts_read.pop()
        _rule_counts[key] = count_rules(self)

    return refreshed


_signatures: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # function: its signature


def _signature(function):
    """A Python function's. Numba asks that of the same ones again and again, for each call of theirs."""
    try:
        return _signatures[function]
    except KeyError:
        signature = _signatures[function] = inspect.signature(function)
        return signature
    except TypeError:  # what cannot be looked up
        return inspect.signature(function)


_ONE, _INSIDE, _ITEMS, _VALUES = range(1, 5)
_KINDS = ((_ONE, ir.var_types), (_INSIDE, ir.inst_types), (_ITEMS, (list, tuple)), (_VALUES, dict))
_kinds: dict[type, int] = {}  # a class of what statements hold: how variables are found in it; 0: there are none


def _variables(self, x):
    """The variables in what a statement holds. Numba asks each part of each statement whether it is one of nine classes."""
    if (kind := _kinds.get(type(x))) is None:
        kind = _kinds[type(x)] = next((number for number, classes in _KINDS if issubclass(type(x), classes)), 0)
    if not kind:
        return []
    if kind == _ONE:
        return [x]
    if kind == _INSIDE:
        return x.list_vars()
    variables = []
    for part in x if kind == _ITEMS else x.values():
        if _kinds.get(type(part)) != 0:
            variables += _variables(self, part)
    return variables


_hash_of_key, _this_process = types.Type.__hash__, object()


def _hash(self):
    """A type's hash, which is that of all it is made of. It is looked up some ten times for each variable. One that was pickled
    elsewhere, where texts have other hashes, is computed anew."""
    try:
        process, value = self._hash
    except AttributeError:
        process = None
    if process is not _this_process:
        _, value = self._hash = _this_process, _hash_of_key(self)
    return value


def _find_blas():
    """ImportError: there is no BLAS. Numba imports scipy.linalg to see that, for np.dot on the host: a sixth of a second."""
    if importlib.util.find_spec("scipy") is None:
        raise ImportError("scipy")


_compile = compiler.CompilerBase._compile_core


def _compiled(self):
    """What a function is compiled to. Its statements and variables, which nobody needs any more, hold on to each other, as does
    what `_Inferer` would leave. To let all that go took the collector of garbage a tenth of the time that Numba takes."""
    compiled = _compile(self)
    function = self.state.func_ir
    for block in function.blocks.values():
        vars(block.scope).clear()
    function.blocks.clear()
    function._definitions.clear()
    return compiled


REPLACEMENTS = [  # (owner, name, what stands in its place)
    (lowering, "get_func_def_lineno", _line_of_def),
    (target, "CUDADIBuilder", _TableOfLines),
    (postproc, "PostProcessor", _Processed),
    (compiler_machinery, "PostProcessor", _Processed),
    (targetconfig.TargetConfig, "values", _flags),
    (BaseFunction, "get_call_type", _call_type),
    (base.BaseContext, "get_abi_sizeof", _size_of),
    (typeinfer, "TypeInferer", _Inferer),
    (untyped_passes.InlineClosureLikes, "run_pass", _inline_closures),
    (typed_passes.NopythonRewrites, "run_pass", _rewrite_typed),
    (typed_passes.InlineOverloads, "run_pass", _inline_overloads),
    (typeinfer.CallConstraint, "resolve", _resolve),
    (typeinfer.GetAttrConstraint, "__call__", _attribute),
    (untyped_passes.ExtractByteCode, "run_pass", _extract_bytecode),
    (type(types.Type), "__instancecheck__", type.__instancecheck__),  # no class is registered as another's kind
    (interpreter, "Flow", _Flow),
    (byteflow.Flow, "_run_handle_exception", _next_instruction),
    (interpreter, "peep_hole_delete_with_exit", _delete_exit_of_with),
    (interpreter, "peep_hole_fuse_dict_add_updates", _fuse_long_dicts),
    (RewritePrintCalls, "match", _match_print),
    *((module, "_logger", _NoLog) for module in (byteflow, ssa)),
    (base.BaseContext, "get_arg_packer", _packer_of),
    (target.CUDATypingContext, "resolve_value_type", _value_type),
    (lowering.Lower, "_disable_sroa_like_opt", _keeps_variables),
    (lowering.Lower, "_find_singly_assigned_variable", _assigned_once),
    (compiler.CompilerBase, "_compile_core", _compiled),
    (compiler_machinery.PassManager, "_runPass", _run_pass),
    (cuda_compiler.CUDACompiler, "define_pipelines", _passes),
    (base.BaseContext, "refresh", _refreshed(base.BaseContext.refresh)),
    (context.BaseContext, "refresh", _refreshed(context.BaseContext.refresh)),
    (utils, "pysignature", _signature),
    (ir.Inst, "_rec_list_vars", _variables),
    (types.Type, "__hash__", _hash),
    (errors.WarningsFixer, "catch_warnings", lambda *_, **__: _NO_CONTEXT),  # Numba's own have their places in their words
    (linalg, "ensure_blas", _find_blas),
    *((module, "new_error_context", _Context) for module in (errors, lowering, typeinfer)),
]
