"""Typing alone: Numba's pipeline for kernels up to where all types are known. What is interpreted is only checked so; lowering
takes more than half of the time, and no refusal of Numba's that names a line of the kernel comes later."""

from numba.cuda import compiler, utils
from numba.cuda.core.compiler_machinery import FunctionPass, PassManager, register_pass
from numba.cuda.core.typed_passes import NopythonTypeInference
from numba.cuda.descriptor import cuda_target
from numba.cuda.typing import signature


@register_pass(mutates_CFG=False, analysis_only=True)
class _Typed(FunctionPass):
    """Ends a pipeline where all is typed, with a result that has a signature and no code."""

    _name = "typed"

    def __init__(self):
        FunctionPass.__init__(self)

    def run_pass(self, state):
        state.cr = compiler.cuda_compile_result(signature=signature(state.return_type, *state.args))
        return False


class _Typing(compiler.CUDACompiler):
    """Numba's pipeline for kernels up to there."""

    def define_pipelines(self):
        (whole,) = super().define_pipelines()
        passes = PassManager("typing")
        kinds = [kind for kind, _ in whole.passes]
        passes.passes = whole.passes[: kinds.index(NopythonTypeInference) + 1]
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
