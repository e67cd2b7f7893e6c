"""What kernels are made of: rows, keys, masks, scores, softmax, outputs, as objects with methods. backward/, decode/ and
recurrent/ have the parts of those kernels alone."""
