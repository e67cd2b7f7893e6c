"""Kernels and the modules that launch them as text: its names, its lines, and how it is loaded."""
