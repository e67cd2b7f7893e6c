"""Parts of the kernels that decode, over caches of keys and values or of latents."""
