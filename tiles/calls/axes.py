"""The names of axes. A name means the same in all tables of arguments (schema.py), and has one extent in a call.

    symbol    how messages and documents write it: q: (B, S, H, D)
    title     what messages call it where two extents differ: "k: batch must equal q's"
    kind      tokens: a length along a sequence, which layout="bhsd" has behind the heads
              length: any other length. A plan may become a function of lengths (lengths.py)
              fixed:  decides which kernel serves a call

Names are those of flash_attn and flash-linear-attention where these have one. A definition of fuse has names of its own."""

from __future__ import annotations

import re
from typing import NamedTuple


class NamedAxis(NamedTuple):
    """A row of the table."""

    symbol: str
    title: str
    kind: str


def _parse(table: str) -> dict[str, NamedAxis]:
    """{name: NamedAxis}. What an axis is, the last column, is for readers alone."""
    rows = [re.split(r"\s{2,}", line.strip(), maxsplit=4) for line in table.strip().splitlines()]
    return {name: NamedAxis(symbol, title, kind) for name, symbol, title, kind, *_ in rows}


# name, symbol, title, kind, and what it is
AXES = _parse("""
    batch           B               batch             length  sequences that have rows of their own in the array
    sequences       sequences       sequences         length  as many as the batch has, or as cu_seqlens packs in a batch of 1
    ends            N + 1           length            length  of cu_seqlens: a 0, and where each of N sequences ends
    seqlen          S               sequence          tokens  tokens, if queries and keys are of the same ones
    seqlen_q        S               sequence          tokens  queries
    seqlen_k        S               sequence          tokens  keys; in a cache, those of one of its batches or pages
    seqlen_new      S               sequence          tokens  keys that are appended to a cache
    seqlen_local    S               sequence          tokens  keys that lie in a rank's own buffer
    parts           parts           parts             length  parts of the queries, with a number of keys each
    heads           H               heads             fixed   heads of the output
    heads_k         Hk              heads             fixed   heads of keys; heads / heads_k of the output share one
    heads_qk        H + Hk          heads             fixed   heads of queries and keys in one array
    heads_qkv       H + 2 Hk        heads             fixed   heads of queries, keys and values in one array
    head_dim        D               head_dim          fixed   columns of queries and keys
    head_dim_v      Dv              value_dim         fixed   columns of values and outputs
    rotary_dim      Dr              rotary_dim        fixed   columns of latent keys that are rotated
    key_dim         Dk              key_dim           fixed   of linear attention: columns of queries and keys
    value_dim       Dv              value_dim         fixed   of linear attention: columns of values and outputs
    features        F               features          fixed   columns that a feature map makes of key_dim
    state_columns   columns         columns           fixed   columns of a state that has more than the values
    channels        C               channels          fixed   columns that a convolution along the sequence keeps apart
    width           W               width             fixed   tokens that such a convolution adds up
    window          W - 1           window            fixed   tokens before the first, of which it needs to know
    segments        segments        segments          length  parts of a sequence that thread blocks scan side by side
    chunks          chunks          chunks            length  chunks of a sequence; of packed ones, those of all and some more
    chunk           chunk           chunk             fixed   tokens of a chunk
    two_chunks      2 chunk         chunk             fixed   rows of a chunk's matrix whose high and low parts lie in one array
    chunk_vectors   vectors         vectors           fixed   numbers of a chunk in its vectors, one behind the other
    batch_cache     B or pages      batches or pages  length  batches of a cache, or its pages
    pages_per_seq   pages of each   pages             length  most pages of a sequence
    positions       positions       positions         length  rows of rotary tables
    pairs           pairs           pairs             fixed   columns of rotary tables, one for two that are rotated
    blocks          blocks          blocks            tokens  blocks of seqlen, with a descale each
    blocks_q        blocks          blocks            tokens  blocks of seqlen_q, with a descale each
    blocks_k        blocks          blocks            tokens  blocks of seqlen_k, with a descale each
    blocks_plus_1   blocks + 1      blocks            length  blocks of seqlen_k, and one element more
    alibi_batch     B or 1          batch             length  batch of ALiBi's slopes
    bias_batch      B or 1          batch             length  batch of a bias
    bias_heads      H or 1          heads             fixed   heads of a bias
    bias_seqlen     S or 1          sequence          length  rows of a bias
    bias_keys       keys            keys              length  columns of a bias over caches, one for each key
    list_batch      B or 1          batch             length  batch of a BlockMask
    list_heads      H or 1          heads             fixed   heads of a BlockMask
    list_rows       rows of blocks  rows of blocks    length  blocks of queries in a BlockMask, with a list of key blocks each
    list_len        blocks          blocks            length  most key blocks in such a list
    full_list_len   blocks          blocks            length  the same of lists of blocks that need no mask
    1               1               length            fixed   always 1
""")
VARY = frozenset(name for name, axis in AXES.items() if axis.kind != "fixed")


def along_sequence(name: str) -> bool:
    """Does it go along a sequence?"""
    return name in AXES and AXES[name].kind == "tokens"


def symbols(names: tuple[str, ...]) -> str:
    """The axes as error messages write them: "B, S, H, D"."""
    return ", ".join([AXES[name].symbol if name in AXES else name for name in names])


def title(name: str) -> str:
    """The axis's name in messages about extents that differ."""
    return AXES[name].title if name in AXES else name
