"""Templates of matrix products, with what comes before and after them. The kernels are .jinja files."""
