"""From a problem to launches: which kernels serve it, in which configuration, and what they are bound to. Kernels import
none of this."""
