"""From a Python call to launches: schemas, programs, and what is remembered between calls (docs/calls.md)."""
