"""The public functions of attention, with their schemas and docstrings: a module for each, or for a family of them."""
