"""Tiles that are parts, concatenations or transposes of others: data movement without arithmetic."""
