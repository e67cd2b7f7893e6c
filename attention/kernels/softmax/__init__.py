"""Kernels of softmax attention: forward, backward, and what runs before or after them."""
