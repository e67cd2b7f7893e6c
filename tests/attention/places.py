"""Where a test of attention runs: the interpreter with NumPy's arrays, the card with torch's."""

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)


class OnInterpreter:
    """NumPy arrays as they are."""

    def put(self, x):
        return x

    get = put


class OnCard:
    """torch tensors, which carry bf16 to the card and back as bits."""

    def put(self, x):
        import torch

        if x.dtype == BF16:
            return torch.from_numpy(np.ascontiguousarray(x).view(np.int16)).cuda().view(torch.bfloat16)
        return torch.from_numpy(np.ascontiguousarray(x)).cuda()

    def get(self, x):
        import torch

        return x.view(torch.int16).cpu().numpy().view(BF16) if x.dtype == torch.bfloat16 else x.cpu().numpy()
