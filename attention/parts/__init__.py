"""What the kernels of softmax attention are made of: rows, keys, masks, scores, softmax, outputs, as objects with methods."""
