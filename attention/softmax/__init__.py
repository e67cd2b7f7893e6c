"""Softmax attention: `attention.forward`, its kernels, and how their work is cut into tiles."""
