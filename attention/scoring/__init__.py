"""Masks and scores that are Python functions: what they are, what they read, their derivatives."""
