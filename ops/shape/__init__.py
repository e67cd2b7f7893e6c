"""Tiles that are parts of others, put together from others, or transposed: nothing is computed."""
