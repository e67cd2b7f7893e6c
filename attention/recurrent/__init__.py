"""Linear attention: the family of kernels whose state does not grow with the sequence."""
