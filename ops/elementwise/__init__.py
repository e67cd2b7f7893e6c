"""Element by element, in registers: tiles from nothing, arithmetic, functions, comparisons, conversions, masks. No lane needs
another's elements, but for conversions to and from fp8."""
