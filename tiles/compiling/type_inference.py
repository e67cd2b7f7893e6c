"""Typing alone: Numba's pipeline for kernels up to where all types are known. What is interpreted is only checked so, for
lowering takes half of the time. What Numba types and cannot lower for a GPU (lists, new arrays, made text) is refused here; and
wherever kernels are typed, tiles that nobody takes."""

from collections import Counter

from numba.cuda import compiler, types, utils
from numba.cuda.core import ir
from numba.cuda.core.compiler_machinery import FunctionPass, PassManager, register_pass
from numba.cuda.core.typed_passes import NopythonTypeInference
from numba.cuda.core.typeinfer import TypeInferer
from numba.cuda.descriptor import cuda_target
from numba.cuda.typing import signature

from ..op import OPS
from ..types import pending, rt, rv
from .source_lines import statement_at

ELEMENTWISE = (
    "an array in a kernel is not copied or computed with as a whole: load tiles of it, or take its elements one by one"
)


def _not_lowered(statement, types_of):
    """Why Numba, which has typed this statement, makes no code of it for a GPU; None if it does."""
    if isinstance(statement, (ir.DynamicRaise, ir.DynamicTryRaise)):
        return "a kernel raises exceptions with constant arguments only"
    if isinstance(statement, (ir.SetItem, ir.StaticSetItem)):
        return ELEMENTWISE if isinstance(types_of[statement.value.name], types.Array) else None
    if not isinstance(statement, ir.Assign):
        return None
    ty, built = types_of[statement.target.name], statement.value
    if isinstance(ty, (types.List, types.Set)):
        return f"kernels have no {'lists' if isinstance(ty, types.List) else 'sets'}: use a tuple"
    call = types_of[built.func.name] if isinstance(built, ir.Expr) and built.op == "call" else None
    if isinstance(ty, types.UnicodeType) or getattr(call, "typing_key", None) is str:
        return "kernels make no text: print(...) takes literal text and numbers, one after the other"
    if isinstance(ty, types.Array) and isinstance(built, ir.Expr):
        return (
            ELEMENTWISE
            if str(call).startswith("BoundFunction(array.copy") or built.op in ("binop", "inplace_binop", "unary")
            else None
        )
    return None


def _gives_a_tile(statement, types_of):
    """Does an op make a tile here that gets no name? `wait` is also called for the wait alone."""
    if not isinstance(statement, ir.Assign) or not statement.target.name.startswith("$"):
        return False
    built, spec = statement.value, getattr(types_of.get(statement.target.name), "spec", None)
    if not isinstance(spec, (rt, rv, pending)) or getattr(built, "op", "") != "call":
        return False
    op = OPS.get(getattr(types_of.get(built.func.name), "typing_key", None))
    return op is not None and (isinstance(spec, pending) or not op.takes_pending)


def refuse_dropped(blocks, types_of):
    """TypeError: a kernel calls an op for a tile, as `mma_AB(c, a, b)`, and leaves it. What was meant to change has not."""
    statements = [statement for block in blocks.values() for statement in block.body]
    if not (built := [each for each in statements if _gives_a_tile(each, types_of)]):
        return
    named = Counter(var.name for each in statements for var in each.list_vars())
    for statement in built:
        if named[name := statement.target.name] == 1:  # where it is made
            call = statement.value
            op = OPS[types_of[call.func.name].typing_key].name
            first = call.args[0].name.partition(".")[0] if call.args else "$"
            remedy = f"t = {op}(...)" if first.startswith("$") else f"{first} = {op}({first}, ...)"
            raise TypeError(
                f"{op}: its result, {types_of[name]}, is lost here: an op makes a new tile and changes none that it is given; "
                f"write {remedy}\n{statement_at(statement.loc)}"
            )


class Inferer(TypeInferer):
    """Numba's search for types, after which it is known what is a tile."""

    def unify(self, raise_errors=True):
        unified = super().unify(raise_errors)
        refuse_dropped(self.blocks, unified[0])
        return unified


@register_pass(mutates_CFG=False, analysis_only=True)
class _Typed(FunctionPass):
    """Ends a pipeline where all is typed, with a result that has a signature and no code."""

    _name = "typed"

    def __init__(self):
        FunctionPass.__init__(self)

    def run_pass(self, state):
        for block in state.func_ir.blocks.values():
            for statement in block.body:
                if message := _not_lowered(statement, state.typemap):
                    raise TypeError(f"{message}\n{statement_at(statement.loc)}")
        state.cr = compiler.cuda_compile_result(signature=signature(state.return_type, *state.args))
        return False


class _Typing(compiler.CUDACompiler):
    """Numba's pipeline for kernels up to type inference."""

    def define_pipelines(self):
        (combined,) = super().define_pipelines()
        passes = PassManager("typing")
        kinds = [kind for kind, _ in combined.passes]
        passes.passes = combined.passes[: kinds.index(NopythonTypeInference) + 1]
        passes.add_pass(_Typed, "all is typed")
        passes.finalize()
        return [passes]


def typed(function, args, returns, cc):
    """What Numba says of a function for these types of arguments: a result of compiling without code. returns: what it must
    return, or None for what it does. TypingError, or what else Numba says, if it refuses it."""
    flags = compiler.CUDAFlags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model, flags.compute_capability = "numpy", cc
    contexts = cuda_target.typing_context, cuda_target.target_context
    with utils.numba_target_override():
        return compiler.compile_extra(*contexts, function, args, returns, flags, {}, pipeline_class=_Typing)
