"""A shared tile's memory as a tile of another type."""

from dataclasses import replace

from tiles.op import lowers, op
from tiles.types import st
from tiles.values import SharedTile


def _type(tile, spec):
    """The type of the view; TypeError if the bytes do not lie as those of `spec`."""
    if not (isinstance(tile, st) and isinstance(spec, st)):
        raise TypeError(f"viewed: takes a shared tile and the type of one, got {tile} and {spec}")
    rows = [(x.rows, x.width, x.cols * x.dtype.itemsize) for x in (tile, spec)]
    if rows[0] == rows[1]:
        return replace(spec, parent_rows=tile.parent_rows)
    if (tile.parent_rows, tile.nbytes, spec.parent_rows) == (tile.rows, spec.nbytes, spec.rows) and spec.width <= tile.width:
        return spec  # it is in one piece, and so are its panels, which lie where narrower ones may begin
    raise TypeError(
        f"viewed: takes a type of as many rows, as many bytes long, in panels as wide as {tile}, or of as many bytes in such "
        f"or narrower panels, if that tile is no part of another's rows; got {spec}"
    )


@op
def viewed(tile, spec):
    """The bytes of a shared tile as a tile of type `spec`, with as many rows of the same length; or of a tile with all rows of
    its panels, as one of other panels, one after the other, as wide as these or narrower. No copy: both names are the same
    memory."""
    return SharedTile(_type(tile.spec, spec), tile.address, tile.name, tile.slot, tile.number, tile.first)


@lowers(viewed)
def _(tile, spec: type):
    return _type(tile, spec), lambda _, address, *__: address
