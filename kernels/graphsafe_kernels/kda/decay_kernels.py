"""Decays between the tokens of a chunk, one per key channel.

A chunk is cut into tiles of 16 tokens. With E_I the gates summed up to the end of tile I, i in tile I and j,

    across tiles, j in J < I   exp(G_i - G_j) = a_i r_ij,   a_i = exp(G_i - E_{I-1}),   r_ij = exp(E_{I-1} - G_j)

and r for the next I is r times the whole tile's decay exp(E_I - E_{I-1}), one number a channel: so one product of two
matrices for each I, and no more than the exponentials of a tile's own sums. Every factor is at most 1.

The four r of a token lie side by side as the columns of one right operand, and a row of the left one is zero outside
its own tile's columns (``beside``, ``spread``), so a column block of 16 channels is one product.

Within a tile, a gate that is known to be bounded (16 times the bound is far from fp32's range) allows r_ij = 1 / a_j in
the same product. Otherwise pairs are met by levels: i > j meet at exactly one level l of 0..3, where i lies in an odd
block of 2^l tokens and j in the even block before it, and

    exp(G_i - G_j) = F_i F_j,   F_i = exp(g summed from the odd block's start to i),
                                F_j = exp(g summed behind j to the even block's end)

so each token has one factor a level, again at most 1, and a level is one batch of products of tiles.

A tile of 16 tokens by 16 channels is what a warp loads, so gates are summed by shuffles inside a warp, and everything
elementwise stays in the layout of the loads.

Requirements
------------
1. An earlier token's result holds gates of tokens up to itself alone, in both forms.
2. Sums of gates are fp32 sums within a tile, from its start; a difference of two of them is formed by levels alone,
   where it is exact to 2^-12 of a factor for gates down to ``gate_kernels.LOWEST``.
3. Without a bound nothing overflows, however strong the gates are.
"""

# ruff: noqa: SIM108  (compile-time conditions choose what is compiled)
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


@triton.jit
def store_tile_decays(a, tile_decays, column, KD: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """Write the decays of the tiles, the last rows' of a ``[BT, BK]``, to ``tile_decays`` ``[BT / 16, KD]``: of each BK
    channels first the even ones, then the odd ones, so that a thread writes what it holds. KD is a multiple of BK, and
    nothing is written from it up."""
    i = tl.arange(0, BT)
    even, odd = tl.split(tl.reshape(a, [BT, BK // 2, 2]))
    at = tile_decays + column + (i // TILE)[:, None] * KD + tl.arange(0, BK // 2)[None, :]
    last = ((i % TILE == TILE - 1) & (column < KD))[:, None]
    tl.store(at, even, mask=last)
    tl.store(at + BK // 2, odd, mask=last)


@triton.jit
def store_chunk_decay(tile_decays, decay, K: tl.constexpr, KD: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """Write the decay of the whole chunk ``[K]``, the product of its tiles'."""
    for column in tl.static_range(0, KD, 128):
        c = column + tl.arange(0, 128)
        mask = c < K
        at = tile_decays + c // BK * BK + c % 2 * (BK // 2) + c % BK // 2
        whole = tl.load(at, mask=mask, other=0.0)
        for index in tl.static_range(1, BT // TILE):
            whole *= tl.load(at + index * KD, mask=mask, other=0.0)
        tl.store(decay + c, whole, mask=mask)


@triton.jit
def tile_decay(tile_decays, index, column, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """The decay of a tile of a chunk for every token, ``[BT, BK]``, from ``tile_decays``."""
    # A pointer a row, all the same, so that a thread loads its channels together.
    at = tile_decays + index * K + column + tl.zeros([BT, 1], tl.int32) + tl.arange(0, BK // 2)[None, :]
    return tl.reshape(tl.join(tl.load(at), tl.load(at + BK // 2)), [BT, BK])


@triton.jit
def next_factors(f, fj, tile, index, step, SAFE: tl.constexpr):
    """(r for tile ``index`` + 1, from r for tile ``index``, its decay ``step`` and the tokens' own factors fj)."""
    f *= step
    if SAFE:
        f = tl.where(tile == index + 1, fj, f)
    else:
        f = tl.where(tile == index, fj, f)
    return f


@triton.jit
def narrow(x, DT: tl.constexpr, PACK: tl.constexpr):
    """x of type DT. PACK: bf16 two elements at a time, which the compiler does not do where it uses them apart."""
    if PACK and DT == tl.bfloat16:
        x = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True,
                                      pack=2)  # fmt: skip
    else:
        x = x.to(DT)
    return x


@triton.jit
def own_factors(y, BT: tl.constexpr, BK: tl.constexpr, SAFE: tl.constexpr):
    """What r of each token starts with, from the sums y within tiles: at its own tile with SAFE, else at the next."""
    if SAFE:
        fj = tl.exp2(-y)
    else:
        y3 = in_tiles(y, BT, BK)
        whole = tl.gather(y3, tl.full(y3.shape, TILE - 1, tl.int32), 1)
        fj = tl.exp2(tl.reshape(whole - y3, [BT, BK]))
    return fj


@triton.jit
def tile_factors(k, fj, tile, d0, d1, d2, d3, DT: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                 SAFE: tl.constexpr, PACK: tl.constexpr):  # fmt: skip
    """(k r of type DT for each of four tiles; r for each; r to the chunk's end; the decay from the start of the chunk
    to each token's tile), from k ``[BT, BK]``, the tokens' own factors fj and the tiles' decays. Of two tiles the
    second thrice."""
    if SAFE:
        f0 = tl.where(tile == 0, fj, 0.0)
    else:
        f0 = tl.zeros([BT, BK], tl.float32)
    k0 = narrow(k * f0, DT, PACK)
    before = tl.where(tile > 0, d0, 1.0)
    f1 = next_factors(f0, fj, tile, 0, d0, SAFE)
    k1 = narrow(k * f1, DT, PACK)
    k2 = k1
    k3 = k1
    end = next_factors(f1, fj, tile, 1, d1, SAFE)
    f2 = f1
    f3 = f1
    if BT == 4 * TILE:
        f2 = end
        before *= tl.where(tile > 1, d1, 1.0)
        k2 = narrow(k * f2, DT, PACK)
        before *= tl.where(tile > 2, d2, 1.0)
        f3 = next_factors(f2, fj, tile, 2, d2, SAFE)
        k3 = narrow(k * f3, DT, PACK)
        end = next_factors(f3, fj, tile, 3, d3, SAFE)
    return k0, k1, k2, k3, f0, f1, f2, f3, end, before


@triton.jit
def load_tile_decays(tile_decays, column, KD: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """The decays of the chunk's tiles for every token, four ``[BT, BK]``; of two tiles the second thrice."""
    d0 = tile_decay(tile_decays, 0, column, KD, BT, BK)
    d1 = tile_decay(tile_decays, 1, column, KD, BT, BK)
    d2 = d1
    d3 = d1
    if BT == 4 * TILE:
        d2 = tile_decay(tile_decays, 2, column, KD, BT, BK)
        d3 = tile_decay(tile_decays, 3, column, KD, BT, BK)
    return d0, d1, d2, d3


@triton.jit
def beside(x0, x1, x2, x3, BT: tl.constexpr, BK: tl.constexpr):
    """``[BT, BT / 16 * BK]`` of one ``[BT, BK]`` for each tile of a chunk, side by side; those past the last are
    ignored."""
    if BT == 4 * TILE:
        x = tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [BT, BK, 4])
    else:
        x = tl.join(x0, x1)
    return tl.reshape(tl.permute(x, [0, 2, 1]), [BT, BT // TILE * BK])


@triton.jit
def spread(x, tile, BT: tl.constexpr, BK: tl.constexpr):
    """x ``[BT, BK]`` as ``[BT, BT / 16 * BK]``: a token's row in its own tile's columns, zero in the others."""
    # Products: a selection would be made on halves of registers.
    x0 = x * (tile == 0).to(x.dtype)
    x1 = x * (tile == 1).to(x.dtype)
    x2 = x * (tile == 2).to(x.dtype)
    x3 = x * (tile == 3).to(x.dtype)
    return beside(x0, x1, x2, x3, BT, BK)


@triton.jit
def apart(x, BT: tl.constexpr, BK: tl.constexpr):
    """The four ``[BT, BK]`` that :func:`beside` puts side by side; of two tiles the first two twice."""
    x = tl.permute(tl.reshape(x, [BT, BT // TILE, BK]), [0, 2, 1])
    if BT == 4 * TILE:
        even, odd = tl.split(tl.reshape(x, [BT, BK, 2, 2]))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
    else:
        x0, x1 = tl.split(x)
        x2 = x0
        x3 = x1
    return x0, x1, x2, x3


@triton.jit
def gathered(x, tile, BT: tl.constexpr, BK: tl.constexpr):
    """``[BT, BK]`` of x ``[BT, BT / 16 * BK]``: of each token's row its own tile's columns."""
    x0, x1, x2, x3 = apart(x, BT, BK)
    result = tl.where(tile == 0, x0, x1)
    if BT == 4 * TILE:
        result = tl.where(tile == 2, x2, result)
        result = tl.where(tile == 3, x3, result)
    return result
