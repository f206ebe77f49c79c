"""Column blocks of a chunk held as the operands of a tensor core's small products hold them.

A product of tiles ``[16, 16]`` is an instruction or two of a warp: of its left operand a thread has rows l and l + 8,
and in each the columns 2t, 2t + 1, 2t + 8, 2t + 9. Here a column block ``[BT, BK]`` is ``[8, BT / 16, 2, BK]``: row of
half a tile, tile, half, column. Loaded four neighbouring columns at a time with a warp for each tile, that is such an
operand once the columns are counted in another order (``operand``; what is summed over may come in any): what a thread
loaded is what it multiplies, and no shared memory, barrier or shuffle lies between. Only the other operand, which every
tile meets, passes through shared memory, once a column block.

Requirements
------------
1. Programs have one warp for each 16 rows of the chunk; any other number is right and slow.
2. In the names of ``decay_kernels``: the left rows are multiplied by a, the right ones by r, one r for each tile I,
   zero in rows behind the tile: ``[BT / 16, BT, BK]`` in all.
3. Numbers of tiles, ``[BT / 16, KD]`` with KD whole column blocks, pass from tile to tile through memory: one lane of a
   warp writes them, all read them behind a barrier of the program, which the caller sets.

For pairs that end in tile I (``column_factors``) a token's own factor is multiplied by one number a channel: a product
of whole tiles' decays.
"""

# ruff: noqa: SIM108  (compile-time conditions choose what is compiled)
import triton
import triton.language as tl

from graphsafe_kernels.kda.decay_kernels import TILE


@triton.jit
def row_order(BT: tl.constexpr):
    """The row of the chunk of each ``[8, BT / 16, 2, 1]``."""
    r = tl.arange(0, 8)[:, None, None, None]
    w = tl.arange(0, BT // TILE)[None, :, None, None]
    b = tl.arange(0, 2)[None, None, :, None]
    return w * TILE + b * 8 + r


@triton.jit
def quads(BK: tl.constexpr):
    """0 to BK - 1, of which a thread takes four neighbours."""
    return tl.max_contiguous(tl.arange(0, BK), 4)


@triton.jit
def operand_rows(pointer, STRIDE: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """Pointers ``[8, BT / 16, 1, BK]`` to the first half's rows of each tile, rows STRIDE apart."""
    r = tl.arange(0, 8)[:, None, None, None]
    w = tl.arange(0, BT // TILE)[None, :, None, None]
    return pointer + (w * TILE + r) * STRIDE + quads(BK)[None, None, None, :]


@triton.jit
def both_halves(pointers, STRIDE: tl.constexpr):
    """Pointers ``[8, BT / 16, 2, BK]`` from those of :func:`operand_rows`."""
    # apart by a constant, so that one address serves both
    return pointers + tl.arange(0, 2)[None, None, :, None] * (8 * STRIDE)


@triton.jit
def columns_inside(column, K: tl.constexpr, BK: tl.constexpr):
    """Which of the BK columns from ``column`` there are: where blocks are whole, one answer for all."""
    if K % BK == 0:
        inside = column < K
    else:
        inside = column + tl.arange(0, BK)[None, None, None, :] < K
    return inside


@triton.jit
def store_operand(pointers, x, column, STRIDE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Store x to all rows of a chunk's own memory, columns below K; pointers as of :func:`operand_rows`."""
    x = x.to(pointers.dtype.element_ty)
    if K % BK == 0:
        tl.store(both_halves(pointers, STRIDE), x)
    else:
        tl.store(both_halves(pointers, STRIDE), x, mask=columns_inside(column, K, BK))


@triton.jit
def operand(x, BT: tl.constexpr, BK: tl.constexpr):
    """x as left operands of tiles ``[BT / 16, 16, BK]``: of each four columns the first two, then the last two."""
    x = tl.permute(tl.reshape(x, [8, BT // TILE, 2, BK // 16, 4, 2, 2]), [1, 2, 0, 3, 5, 4, 6])
    return tl.reshape(x, [BT // TILE, TILE, BK])


@triton.jit
def from_operand(x, BT: tl.constexpr, BK: tl.constexpr):
    """The inverse of :func:`operand`, of a product ``[BT / 16, 16, BK]``."""
    x = tl.reshape(x, [BT // TILE, 2, 8, BK // 16, 2, 4, 2])
    return tl.reshape(tl.permute(x, [2, 0, 1, 3, 5, 4, 6]), [8, BT // TILE, 2, BK])


@triton.jit
def as_tiles(x, BT: tl.constexpr, BK: tl.constexpr):
    """x as ``[BT / 16, 16, BK]``, columns in their order."""
    return tl.reshape(tl.permute(x, [1, 2, 0, 3]), [BT // TILE, TILE, BK])


@triton.jit
def from_tiles(x, BT: tl.constexpr, BK: tl.constexpr):
    """The inverse of :func:`as_tiles`."""
    return tl.permute(tl.reshape(x, [BT // TILE, 2, 8, BK]), [2, 0, 1, 3])


@triton.jit
def of_tiles(index, x0, x1, x2, x3, NT: tl.constexpr):
    """Of NT tensors the one that ``index`` names; those past the last are ignored."""
    x = tl.where(index == 0, x0, x1)
    if NT == 4:
        x = tl.where(index == 2, x2, x)
        x = tl.where(index == 3, x3, x)
    return x


@triton.jit
def side_by_side(x0, x1, x2, x3, BT: tl.constexpr, BK: tl.constexpr):
    """``[8, BT / 16, 2 BK, BT / 16]``: one column block, halves and columns as one axis, for each tile of a chunk;
    those past the last are ignored (:func:`of_tiles`)."""
    # The tiles are the last axis: the order in which shared memory is laid out.
    NT: tl.constexpr = BT // TILE
    index = tl.arange(0, NT)[None, None, None, :]
    return of_tiles(index, tl.reshape(x0, [8, NT, 2 * BK, 1]), tl.reshape(x1, [8, NT, 2 * BK, 1]),
                    tl.reshape(x2, [8, NT, 2 * BK, 1]), tl.reshape(x3, [8, NT, 2 * BK, 1]), NT)  # fmt: skip


@triton.jit
def right_operand(x, BT: tl.constexpr, BK: tl.constexpr):
    """x of :func:`side_by_side` as right operands ``[BT / 16, BK, BT]`` of every tile, columns as of
    :func:`operand`."""
    NT: tl.constexpr = BT // TILE
    x = tl.permute(tl.reshape(x, [8, NT, 2, BK // 16, 4, 2, 2, NT]), [7, 3, 5, 4, 6, 1, 2, 0])
    return tl.reshape(x, [NT, BK, BT])


@triton.jit
def tile_operands(x, y, BT: tl.constexpr, BK: tl.constexpr):
    """``[BT / 16 * BT / 16, BK, 32]``: the rows of tile I of x and then of y for each pair of tiles (I, J), J fastest,
    columns as of :func:`operand`: a right operand of every J."""
    NT: tl.constexpr = BT // TILE
    second = tl.arange(0, 2)[None, None, None, None, :] == 1
    x = tl.where(second, tl.reshape(y, [8, NT, 2 * BK, 1, 1]), tl.reshape(x, [8, NT, 2 * BK, 1, 1]))
    x = tl.broadcast_to(x, [8, NT, 2 * BK, NT, 2])
    x = tl.permute(tl.reshape(x, [8, NT, 2, BK // 16, 4, 2, 2, NT, 2]), [1, 7, 3, 5, 4, 6, 8, 2, 0])
    return tl.reshape(x, [NT * NT, BK, 2 * TILE])


@triton.jit
def from_tile_operands(x, BT: tl.constexpr, BK: tl.constexpr):
    """A product ``[BT / 16 * BT / 16, 16, BK]`` of pairs of tiles (I, J), rows of J, as of :func:`side_by_side`: the
    rows of each J, and I the last axis."""
    NT: tl.constexpr = BT // TILE
    x = tl.reshape(x, [NT, NT, 2, 8, BK // 16, 2, 4, 2])
    return tl.reshape(tl.permute(x, [3, 1, 2, 4, 6, 5, 7, 0]), [8, NT, 2 * BK, NT])


@triton.jit
def weighed(x, w0, w1, w2, w3, BT: tl.constexpr, BK: tl.constexpr):
    """The sum over the last axis of x of :func:`side_by_side`, of each tile times its w ``[8, BT / 16, 1, BK]``."""
    NT: tl.constexpr = BT // TILE
    index = tl.arange(0, NT)[None, None, None, None, :]
    w = of_tiles(index, w0[:, :, :, :, None], w1[:, :, :, :, None], w2[:, :, :, :, None], w3[:, :, :, :, None], NT)
    return tl.sum(tl.reshape(x, [8, NT, 2, BK, NT]) * w, 4)


@triton.jit
def quad_sums(x, BT: tl.constexpr, BK: tl.constexpr):
    """``[8, BT / 16, 2, BK / 4]``: sums of four neighbouring columns, which one thread has."""
    return tl.sum(tl.reshape(x, [8, BT // TILE, 2, BK // 4, 4]), 4)


@triton.jit
def row_sums(x, BT: tl.constexpr):
    """The sums of x's rows, ``[BT]``, in the order of the chunk."""
    return tl.reshape(tl.permute(tl.sum(x, 3), [1, 2, 0]), [BT])


@triton.jit
def running_sums(x):
    """Of each token of x ``[8, BT / 16, 2, BK]``, the sum from its tile's start to itself."""
    later = tl.arange(0, 2)[None, None, :, None] == 1
    first = tl.sum(tl.sum(tl.where(later, 0.0, x), 2), 0)
    return tl.cumsum(x, 0) + tl.where(later, first[None, :, None, :], 0.0)


@triton.jit
def sums_over_chunk(ahead, behind, BT: tl.constexpr):
    """Of each token t, the sum of ``ahead`` over i >= t and of ``behind`` over i < t."""
    NT: tl.constexpr = BT // TILE
    s = behind - ahead
    tile_s = tl.sum(tl.sum(s, 2), 0)
    tile_a = tl.sum(tl.sum(ahead, 2), 0)
    # Every tile's sum for each tile, in one exchange between warps; then each takes its own.
    k = tl.arange(0, NT)[:, None, None]
    t = tl.arange(0, NT)[None, :, None]
    before = tl.sum(tl.where(t < k, tile_s[None, :, :], 0.0) + tile_a[None, :, :], 1)
    own = tl.sum(tl.where(t == k, before[:, None, :], 0.0), 0)
    return running_sums(s) - s + own[None, :, None, :]


@triton.jit
def store_of_tiles(x, tiles, column, KD: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """Write the last of the eight rows of x ``[8, BT / 16, BK]`` to ``tiles`` ``[BT / 16, KD]``; nothing from KD up."""
    r = tl.arange(0, 8)[:, None, None]
    w = tl.arange(0, BT // TILE)[None, :, None]
    tl.store(tiles + (w * KD + r * 0) + (column + quads(BK)[None, None, :]), x, mask=(r == 7) & (column < KD))


@triton.jit
def store_decays(y, tile_decays, column, KD: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """Write the tiles' decays, of the sums y within tiles."""
    last = tl.sum(tl.where(tl.arange(0, 2)[None, None, :, None] == 1, y, 0.0), 2)
    store_of_tiles(tl.exp2(last), tile_decays, column, KD, BT, BK)


@triton.jit
def store_sums(x, tiles, column, KD: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """Write the sums of x over each tile's rows."""
    total = tl.sum(tl.sum(x, 2), 0)
    store_of_tiles(tl.broadcast_to(total[None, :, :], [8, BT // TILE, BK]), tiles, column, KD, BT, BK)


@triton.jit
def load_decay(tile_decays, index, column, KD: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """The decay of a tile of a chunk for each tile, ``[8, BT / 16, 1, BK]``; from KD up there is none."""
    # A pointer a row, all the same, so that a thread loads its channels together.
    c = column + quads(BK)[None, None, :]
    place = tile_decays + index * KD + tl.zeros([8, BT // TILE, 1], tl.int32) + c
    return tl.load(place, mask=column < KD, other=0.0)[:, :, None, :]


@triton.jit
def load_decays(tile_decays, column, KD: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """The decays of the chunk's tiles, four of :func:`load_decay`; of two tiles the second thrice."""
    d0 = load_decay(tile_decays, 0, column, KD, BT, BK)
    d1 = load_decay(tile_decays, 1, column, KD, BT, BK)
    d2 = d1
    d3 = d1
    if BT == 4 * TILE:
        d2 = load_decay(tile_decays, 2, column, KD, BT, BK)
        d3 = load_decay(tile_decays, 3, column, KD, BT, BK)
    return d0, d1, d2, d3


@triton.jit
def over_tiles(tiles, out, K: tl.constexpr, KD: tl.constexpr, BT: tl.constexpr, PRODUCT: tl.constexpr):
    """Write the sums over the tiles of ``tiles`` ``[BT / 16, KD]``, or their products, to ``out`` ``[K]``."""
    for column in tl.static_range(0, KD, 128):
        c = column + tl.arange(0, 128)
        total = tl.load(tiles + c, mask=c < K, other=0.0)
        for index in tl.static_range(1, BT // TILE):
            one = tl.load(tiles + index * KD + c, mask=c < K, other=0.0)
            total = total * one if PRODUCT else total + one
        tl.store(out + c, total, mask=c < K)


@triton.jit
def column_factors(tile, d0, d1, d2, d3, NT: tl.constexpr, SAFE: tl.constexpr):
    """What makes a token's own factor r for each of four tiles, and for the chunk's end, from the tiles' decays
    ``[8, NT, 1, BK]``: at its own tile 1 with SAFE, else at the next; zero before."""
    if SAFE:
        r0 = tl.where(tile == 0, 1.0, 0.0)
        r1 = tl.where(tile == 1, 1.0, r0 * d0)
        end = r1 * d1
    else:
        r0 = tl.where(tile < 0, 1.0, 0.0)
        r1 = tl.where(tile == 0, 1.0, 0.0)
        end = tl.where(tile == 1, 1.0, r1 * d1)
    r2 = r1
    r3 = r1
    if NT == 4:
        if SAFE:
            r2 = tl.where(tile == 2, 1.0, end)
            r3 = tl.where(tile == 3, 1.0, r2 * d2)
            end = r3 * d3
        else:
            r2 = end
            r3 = tl.where(tile == 2, 1.0, r2 * d2)
            end = tl.where(tile == 3, 1.0, r3 * d3)
    return r0, r1, r2, r3, end


@triton.jit
def start_factor(tile, d0, d1, d2, NT: tl.constexpr):
    """The decay from the chunk's start to each tile, ``[8, NT, 1, BK]``."""
    before = tl.where(tile > 0, d0, 1.0)
    if NT == 4:
        before *= tl.where(tile > 1, d1, 1.0)
        before *= tl.where(tile > 2, d2, 1.0)
    return before
