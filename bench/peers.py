"""What people use today, each called as ours is: torch tensors (B, S, H, D) in, the output out."""

import importlib

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# What a peer fails with that is not installed, or not made for this card
ABSENT = ImportError, RuntimeError, NotImplementedError, AssertionError, AttributeError, TypeError


def library(module, name, **options):
    """A function of another library, looked up when it is called; of several results the first."""

    def call(*args, **more):
        out = getattr(importlib.import_module(module), name)(*args, **options, **more)
        return out[0] if isinstance(out, tuple) else out

    return call


def fla(module, name, **options):
    """A function of flash-linear-attention, from its folder `module` of fla.ops."""
    return library(f"fla.ops.{module}", name, **options)


def _sdpa(backend, causal):
    def call(q, k, v):
        with sdpa_kernel(backend):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return call


def softmax(causal):
    """{name: softmax attention of another library}"""
    return {
        "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION, causal),
        "flash4": library("flash_attn.cute.interface", "flash_attn_func", causal=causal),
        "flash2": _sdpa(SDPBackend.FLASH_ATTENTION, causal),
    }


def present(peers, inputs):
    """({name: call} of the peers that run on these inputs, {name: why not} of the others)"""
    calls, missing = {}, {}
    for name, call in peers.items():
        try:
            call(*inputs)
            calls[name] = call
        except ABSENT as error:
            missing[name] = f"{type(error).__name__}: {error}"
    return calls, missing
