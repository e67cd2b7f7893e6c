"""The four lanes of a quad: which of them this is, and exchanges between them. An exchange takes two rounds, a shuffle each,
in which every lane gives one register and takes one of another lane's."""

from tiles.compiling import ptx
from tiles.layout import QUAD


def in_quad(b):
    """(this lane's number t in its quad, 0 to 3; the quad's first lane)"""
    lane = b.lane()
    return b.and_(lane, b.u32(QUAD - 1)), b.and_(lane, b.u32(-QUAD))


def _in_quad(b):
    """(t, t's two bits as conditions, the quad's first lane)"""
    t, first = in_quad(b)
    is_set = (b.icmp_unsigned("!=", b.and_(t, b.u32(bit)), b.u32(0)) for bit in (1, 2))
    return t, *is_set, first


def _exchange(b, words, source, other):
    """Two rounds: the first of `given` from lane `source`, the second from the lane that differs in the bit `other`."""
    return ptx.shuffle(b, words[0], source), ptx.shuffle(b, words[1], b.xor(source, b.u32(other)))


def _swapped(b, swap, x, y):
    """(y, x) where `swap` holds, else (x, y)."""
    return b.select(swap, y, x), b.select(swap, x, y)


def gather(b, x, y):
    """What lanes 2(t%2) and 2(t%2) + 1 have as x if t < 2, as y otherwise. If x and y are elements 2t, 2t + 1 of
    eight columns and of the next eight, lane t gets the four from 4t on."""
    t, odd, upper, first = _in_quad(b)
    source = b.or_(first, b.or_(b.shl(b.and_(t, b.u32(1)), b.u32(1)), b.lshr(t, b.u32(1))))
    return _swapped(b, upper, *_exchange(b, _swapped(b, odd, x, y), source, 1))


def spread(b, x, y):
    """The reverse: what lanes t/2 and t/2 + 2 have as x if t is even, as y otherwise. If x and y are elements 2t and 2t + 1 of
    eight, lane t gets elements t and t + 4."""
    t, odd, upper, first = _in_quad(b)
    source = b.or_(first, b.or_(b.shl(b.and_(t, b.u32(1)), b.u32(1)), b.lshr(t, b.u32(1))))
    return _swapped(b, odd, *_exchange(b, _swapped(b, upper, x, y), source, 2))
