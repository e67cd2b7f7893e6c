"""Kernels of linear attention, GLA, Mamba-2, Based and Hedgehog; the short convolution and the gated norm of their layers."""
