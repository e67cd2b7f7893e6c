"""The public functions of attention: a module each, with its arguments, its schema and its docstring."""
