"""What kernels are made of: rows, keys, masks, scores, softmax, outputs, as objects with methods. backward/, decode/,
recurrent/ and delta/ have the parts of those kernels alone."""
