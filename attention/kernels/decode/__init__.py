"""Kernels that decode, over caches of keys and values or of latents (MLA), and those that write caches."""
