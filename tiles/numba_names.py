"""What the rest of the library uses of Numba: its types, errors and hooks.

Numba and LLVM are named where kernels are compiled and nowhere else (tests/test_house.py), but for `from numba import cuda`
in kernels. Rules speak to a Builder (builder.py), and of types by these names, so that another compiler can stand behind both.
"""

from numba.cuda import types
from numba.cuda.core.errors import NumbaError, TypingError
from numba.cuda.cudadrv.devicearray import DeviceNDArray
from numba.cuda.cudaimpl import registry
from numba.cuda.descriptor import cuda_target
from numba.cuda.np.numpy_support import from_dtype
from numba.cuda.printimpl import print_item

__all__ = ["DeviceNDArray", "NumbaError", "TypingError", "cuda_target", "from_dtype", "print_item", "registry", "types"]
