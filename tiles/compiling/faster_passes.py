"""Numba's passes over a function with less to do: what every function of Python needs and ours do not is left out. See
faster_numba.py."""

import copy
import types as python_types
import weakref

from numba.cuda import compiler as cuda_compiler
from numba.cuda import lowering, types
from numba.cuda.core import (
    bytecode,
    byteflow,
    compiler_machinery,
    errors,
    interpreter,
    ir,
    postproc,
    ssa,
    transforms,
    typed_passes,
    typeinfer,
    untyped_passes,
)
from numba.cuda.core.rewrites.ir_print import RewritePrintCalls


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


_legalize = typed_passes.IRLegalization.run_pass


def _legalize_without_ends(self, state):
    """A pass that adds a statement where each variable is used last: half of all statements. They let go of memory whose
    references are counted, and kernels have none."""
    if state.targetctx.enable_nrt or state.func_ir.is_generator:
        return _legalize(self, state)
    _Processed(state.func_ir).run()
    return True


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


REPLACEMENTS = [  # (owner, name, what stands in its place)
    (postproc, "PostProcessor", _Processed),
    (compiler_machinery, "PostProcessor", _Processed),
    (untyped_passes.InlineClosureLikes, "run_pass", _inline_closures),
    (typed_passes.NopythonRewrites, "run_pass", _rewrite_typed),
    (typed_passes.InlineOverloads, "run_pass", _inline_overloads),
    (typed_passes.IRLegalization, "run_pass", _legalize_without_ends),
    (untyped_passes.ExtractByteCode, "run_pass", _extract_bytecode),
    (interpreter, "Flow", _Flow),
    (byteflow.Flow, "_run_handle_exception", _next_instruction),
    (interpreter, "peep_hole_delete_with_exit", _delete_exit_of_with),
    (interpreter, "peep_hole_fuse_dict_add_updates", _fuse_long_dicts),
    (RewritePrintCalls, "match", _match_print),
    *((module, "_logger", _NoLog) for module in (byteflow, ssa)),
    (compiler_machinery.PassManager, "_runPass", _run_pass),
    (cuda_compiler.CUDACompiler, "define_pipelines", _passes),
    (ir.Inst, "_rec_list_vars", _variables),
    *((module, "new_error_context", _Context) for module in (errors, lowering, typeinfer)),
]
