"""Between registers, shared memory and global memory: loads and stores (by way of swizzles, matrices and 16-byte accesses),
cp.async, TMA."""
