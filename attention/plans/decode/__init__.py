"""Plans of decoding and of appending to caches."""
