"""Decays between the tokens of a chunk, one per key channel.

A chunk is cut into tiles of 16 tokens. With E_I the gates summed up to the end of tile I, i in tile I and j,

    across tiles, j in J < I   exp(G_i - G_j) = a_i r_ij,   a_i = exp(G_i - E_{I-1}),   r_ij = exp(E_{I-1} - G_j)

and r for the next I is r times the whole tile's decay exp(E_I - E_{I-1}), one number a channel: so one product of two
matrices for each I, and no more than the exponentials of a tile's own sums. Every factor is at most 1.

How a column block of 16 channels is multiplied so: ``operand_kernels``.

Within a tile, a gate that is known to be bounded (16 times the bound is far from fp32's range) allows r_ij = 1 / a_j in
the same product. Otherwise pairs are met by levels: i > j meet at exactly one level l of 0..3, where i lies in an odd
block of 2^l tokens and j in the even block before it, and

    exp(G_i - G_j) = F_i F_j,   F_i = exp(g summed from the odd block's start to i),
                                F_j = exp(g summed behind j to the even block's end)

so each token has one factor a level, again at most 1, and a level is one batch of products of tiles.

Requirements
------------
1. An earlier token's result holds gates of tokens up to itself alone, in both forms.
2. Sums of gates are fp32 sums within a tile, from its start; a difference of two of them is formed by levels and,
   without a bound, for the factor to a tile's end, where it is exact to 2^-12 of a factor for gates down to
   ``gate_kernels.LOWEST``.
3. Without a bound nothing overflows, however strong the gates are.
"""

import triton
import triton.language as tl

TILE: tl.constexpr = tl.constexpr(16)
"""Tokens of a tile: with gates of at least -5, 2^115 at most, within fp32 and bf16."""


@triton.jit
def level_factors(y, LEVEL: tl.constexpr):
    """A level's factor of each token, from the sums y ``[tiles, 16, BK]`` of each tile: the sum between the token and
    the last one of the even block, whichever comes first."""
    r = tl.arange(0, TILE)[None, :, None]
    meet = (r >> (LEVEL + 1) << (LEVEL + 1)) + ((1 << LEVEL) - 1)
    between = y - tl.gather(y, tl.broadcast_to(meet, y.shape), 1)
    return tl.exp2(tl.where((r >> LEVEL) % 2 == 1, between, 0.0 - between))


@triton.jit
def level_pairs(LEVEL: tl.constexpr):
    """Where a level meets the pair (i, j) of a tile, i > j; ``[1, 16, 16]``."""
    i = tl.arange(0, TILE)[None, :, None]
    j = tl.arange(0, TILE)[None, None, :]
    return ((i >> LEVEL) % 2 == 1) & (i >> LEVEL == (j >> LEVEL) + 1)


@triton.jit
def part_level(k3, q3, y3, pair, turned, dq, dk, ahead, BT: tl.constexpr, PAIRS: tl.constexpr,
               PRECISION: tl.constexpr, LEVEL: tl.constexpr):  # fmt: skip
    """Add what one level's pairs within tiles give dq^, dk^ and the gate's a to ``[tiles, 16, BK]`` of each."""
    F = level_factors(y3, LEVEL)
    met = level_pairs(LEVEL)
    meeting = tl.permute(met, [0, 2, 1])
    kF = (k3 * F).to(PAIRS)
    qF = (q3 * F).to(PAIRS)
    Z = tl.where(met, tl.load(pair), 0.0)
    Y = tl.where(met, tl.load(pair + BT * BT), 0.0)
    az = tl.dot(Z, kF, input_precision=PRECISION)
    ay = tl.dot(Y, kF, input_precision=PRECISION)
    # Loaded the other way round rather than turned.
    Z = tl.where(meeting, tl.load(turned), 0.0)
    Y = tl.where(meeting, tl.load(turned + BT * BT), 0.0)
    ac = tl.dot(Z, qF, input_precision=PRECISION)
    ac = tl.dot(Y, kF, ac, input_precision=PRECISION)
    dq += F * az
    dk += F * (ay + ac)
    ahead += qF.to(tl.float32) * az + kF.to(tl.float32) * (ay - ac)
    return dq, dk, ahead


@triton.jit
def in_tiles(x, BT: tl.constexpr, BK: tl.constexpr):
    """x ``[BT, BK]`` as ``[BT / 16, 16, BK]``."""
    return tl.reshape(x, [BT // TILE, TILE, BK])


@triton.jit
def tile_sums(x, BT: tl.constexpr, BK: tl.constexpr):
    """Of each token of x ``[BT, BK]``, the sum from its tile's start to itself."""
    return tl.reshape(tl.cumsum(tl.reshape(x, [BT // TILE, TILE, BK]), 1), [BT, BK])
