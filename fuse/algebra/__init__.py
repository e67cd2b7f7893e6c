"""What is equal to a term and what is not: rules that rewrite it, its derivative, and the tests of both, in prime fields and in
floats."""
