"""Element by element, in registers: tiles of constants and indices, arithmetic, functions, comparisons, conversions, masks. No
lane needs another's elements, but for conversions to and from fp8."""
