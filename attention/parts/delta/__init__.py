"""Parts of the kernels of the delta rule."""
