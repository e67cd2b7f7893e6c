"""Parts of the kernels of the gradients."""
