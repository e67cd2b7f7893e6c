"""The kernels of the linear-attention family, and what they share."""
