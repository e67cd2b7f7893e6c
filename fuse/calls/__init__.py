"""From a Python call to launches, for each framework: fused functions, their programs and their gradients."""
