"""Decays between the tokens of a chunk, one per key channel.

A chunk is cut into tiles of 16 tokens. With E_I the gates summed up to the end of tile I, i in tile I and j,

    across tiles, j in J < I   exp(G_i - G_j) = a_i r_ij,   a_i = exp(G_i - E_{I-1}),   r_ij = exp(E_{I-1} - G_j)

and r for the next I is r times the whole tile's decay exp(E_I - E_{I-1}), one number a channel: so one product of two
matrices for each I, and no more than the exponentials of a tile's own sums. Every factor is at most 1.

Within a tile, a gate that is known to be bounded (16 times the bound is far from fp32's range) allows r_ij = 1 / a_j in
the same product. Otherwise pairs are met by levels: i > j meet at exactly one level l of 0..3, where i lies in an odd
block of 2^l tokens and j in the even block before it, and

    exp(G_i - G_j) = F_i F_j,   F_i = exp(g summed from the odd block's start to i),
                                F_j = exp(g summed behind j to the even block's end)

so each token has one factor a level, again at most 1, and a level is one product, read under the level's mask.

Requirements
------------
1. An earlier token's result holds gates of tokens up to itself alone, in both forms.
2. Sums of gates are products of a matrix of zeros and ones with the gates: no scan, no difference of running sums. The
   gate enters them to 16 bits at least: whole in fp32, else as two halves of the dots' type.
3. Without a bound nothing overflows, however strong the gates are.
"""

# ruff: noqa: SIM300  (a compile-time type is compared)
import triton
import triton.language as tl

from graphsafe_kernels.delta.inverse_kernels import WHOLE_TILES

TILE: tl.constexpr = tl.constexpr(16)
"""Tokens of a tile: with gates of at least -5, 2^115 at most, within fp32 and bf16."""
TILE_LEVELS: tl.constexpr = tl.constexpr(4)


@triton.jit
def level_weights(i, t, level):
    """1 where the factor of token i at a level holds the gate of token t, broadcast over i and t."""
    block = i >> level
    return (block == (t >> level)) & tl.where((block & 1) == 1, t <= i, t > i)


@triton.jit
def level_pairs(i, j, level):
    """Where a level meets the pair (i, j), i > j."""
    block = i >> level
    return ((block & 1) == 1) & (block == (j >> level) + 1)


@triton.jit
def token_sums(weights, x, DT: tl.constexpr, PRECISION: tl.constexpr):
    """weights ``[BT, BT]`` of zeros and ones times x ``[BT, BK]`` fp32; DT: the type of the dots' operands."""
    W = weights.to(DT)
    if DT == tl.float32:
        return tl.dot(W, x, input_precision=PRECISION)
    high = x.to(DT)
    low = (x - high.to(tl.float32)).to(DT)
    return tl.dot(W, high, tl.dot(W, low))


@triton.jit
def tile_decay(tile_decays, index, column, K: tl.constexpr, BK: tl.constexpr):
    """The decay of a tile of a chunk, ``[1, BK]``, from ``tile_decays`` ``[BT / 16, K]``."""
    c = column + tl.arange(0, BK)
    return tl.load(tile_decays + index * K + c, mask=c < K, other=0.0)[None, :]


@triton.jit
def before_tile(tile, tile_decays, column, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """The decay from the chunk's start to the start of each token's tile, ``[BT, BK]``; ``tile`` ``[BT, 1]``."""
    before = tl.full([1, BK], 1.0, tl.float32)
    result = tl.full([BT, BK], 1.0, tl.float32)
    for index in tl.static_range(BT // TILE - 1):
        before *= tile_decay(tile_decays, index, column, K, BK)
        result = tl.where(tile > index, before, result)
    return result


@triton.jit
def store_tile_decays(x, tile_decays, column, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """Write the decays of the tiles of log gates x ``[BT, BK]`` (base 2) to ``tile_decays`` ``[BT / 16, K]``."""
    c = column + tl.arange(0, BK)
    if WHOLE_TILES:
        tile = tl.arange(0, BT)[:, None] // TILE
        for index in tl.static_range(BT // TILE):
            sums = tl.sum(tl.where(tile == index, x, 0.0), 0)
            tl.store(tile_decays + index * K + c, tl.exp2(sums), mask=c < K)
    else:
        sums = tl.sum(tl.reshape(x, [BT // TILE, TILE, BK]), 1)
        index = tl.arange(0, BT // TILE)
        tl.store(tile_decays + index[:, None] * K + c[None, :], tl.exp2(sums), mask=(c < K)[None, :])
