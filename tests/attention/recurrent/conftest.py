"""Where a test of the linear-attention family runs: the interpreter with NumPy's arrays, the card with torch's."""

import ml_dtypes
import numpy as np
import pytest

from tiles import program

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


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request):
    """`put` takes an array there, `get` brings it back."""
    if request.param == "gpu":
        pytest.importorskip("torch")
        return OnCard()
    return OnInterpreter()


@pytest.fixture
def card():
    """The latter alone, for tests that also carry `@pytest.mark.gpu`."""
    pytest.importorskip("torch")
    return OnCard()


@pytest.fixture
def nothing_known(monkeypatch):
    """Nobody has called anything yet, and what is planned now is forgotten afterwards."""
    monkeypatch.setattr(program, "KNOWN", program.Recent(program.ENTRIES))
