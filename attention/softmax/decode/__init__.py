"""Softmax attention of a few query tokens over caches of keys and values: attention.decode."""
