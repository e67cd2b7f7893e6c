"""Caches of keys and values: what writes them in place, and PagedCache, which keeps their pages."""

from .paged import Full, PagedCache

__all__ = ["Full", "PagedCache"]
