"""How attention's work is cut up: units of keys, streams of units, splits, and the rows of a query tile.

Keys are cut into units of 16; unit u belongs to stream u mod (splits * streams), streams of one split being neighbours.
A row walks the units of a stream in ascending order; the streams of a split are joined one after the other, then the
splits of a bundle, then the bundles by `attention_combine`. None of it depends on the number of keys, of queries or of
sequences, nor on which kernel runs, so a row's bits do not either.

Source: splits after Flash-Decoding (Dao et al.); the fixed interleave is derived here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

UNIT = 16  # keys
BUNDLE = 4  # splits; where a block handles all of a bundle, a quarter of the sums leaves it
BLOCK_SHIFT = 6  # keys of a cache block: 64
EARLIER_BITS = 9  # lowest bits of `behind`: how many earlier keys there are, or tokens of a path; a window is above
FLOOR = np.float32(-1e30)  # the running maximum before any visible key; finite, so that differences are never NaN
LOG2_E = 1.4426950408889634

TILE_TOTAL, TILE_SPAN_EMPTY, TILE_MASK_EMPTY, TILE_EXECUTED = range(4)  # places in the counters


@dataclass(frozen=True)
class Shape:
    """Sizes of one head's work that a kernel is compiled for.

    Attributes:
        dtype: "bf16" or "f16".
        dim: head size, 64 or 128.
        group: query heads of a key head.
        splits, streams: powers of two; they set the order of sums.
    """

    dtype: str
    dim: int
    group: int
    splits: int
    streams: int

    @property
    def bundle(self) -> int:
        """Splits that are joined with each other before they meet any other."""
        return min(BUNDLE, self.splits)

    @property
    def pieces(self) -> int:
        """64-byte pieces of a query."""
        return self.dim // 32

    @property
    def is_fp8(self) -> bool:
        """Whether keys and values are cached in e4m3; else they are in the dtype."""
        return False

    @property
    def product_dtype(self) -> str:
        """Of the operands of both products."""
        return "f16" if self.is_fp8 else self.dtype

    @property
    def row_bytes(self) -> int:
        """A cached key or value."""
        return self.dim if self.is_fp8 else 2 * self.dim

    @property
    def row_pieces(self) -> int:
        """64-byte pieces of a cached key or value."""
        return self.row_bytes // 64

    @property
    def least_units(self) -> int:
        """Units of a set of `attention_streams`, at least: its place in the ring also takes a tile's sums."""
        return 2 if self.is_fp8 else 1

    @property
    def half_bytes(self) -> int:
        """Keys, or values, of one unit in shared memory."""
        return UNIT * self.row_bytes

    @property
    def unit_bytes(self) -> int:
        """A unit in shared memory: keys first."""
        return 2 * self.half_bytes


@dataclass(frozen=True)
class Fp8Shape(Shape):
    """The same over a cache in e4m3. In its kernels keys and values lie in half the shared memory.

    Products are of fp16, in which e4m3 is exact; so is a query of bf16 between 2^-14 and 65504, and below a sum loses
    less than bf16 would round.

    Attributes:
        converts: the target makes fp16 of e4m3 by an instruction, which sm_80 has none for.
    """

    converts: bool = True

    @property
    def is_fp8(self) -> bool:
        return True


def shape_over(arch: str, fp8: bool, dtype: str, dim: int, group: int, order: tuple[int, int]) -> Shape:
    """A head's work over a cache in the dtype, or in e4m3, on a target; `order`: (splits, streams)."""
    if fp8:
        return Fp8Shape(dtype, dim, group, *order, converts=arch != "sm_80")
    return Shape(dtype, dim, group, *order)


def make_token_of(isa: Any, group: int) -> Any:
    """`token_of(row)`: the query token of a row; rows are ordered by token, then by head of the group."""
    i32 = isa.i32
    factor = 65536 // group + 1  # exact for row * group < 65536

    def token_of(row: Any) -> Any:
        return i32((row * factor) >> 16)

    return isa.inlined(token_of)


def make_walk(isa: Any, shape: Shape) -> tuple[Any, Any]:
    """`first_of(stream, first_unit)` and `advance(stream, unit, step, end, first_unit, n_units)`.

    `advance` gives the stream and unit that follow `unit`, going on to later streams, `step` apart, while the stream
    has no unit left; stream >= end means that there is none.
    """
    i32 = isa.i32
    interleave = shape.splits * shape.streams

    def first_of(stream: Any, first_unit: Any) -> Any:
        return i32(first_unit + ((stream - first_unit) & (interleave - 1)))

    first_of = isa.inlined(first_of)

    def advance(stream: Any, unit: Any, step: Any, end: Any, first_unit: Any, n_units: Any) -> Any:
        unit = i32(unit + interleave)
        while unit >= n_units and stream < end:
            stream = i32(stream + step)
            unit = first_of(stream, first_unit)
        return stream, unit

    return first_of, isa.inlined(advance)


def make_span(isa: Any, *, earlier: bool = False, paths: bool = False, windowed: bool = False) -> Any:
    """`span(ctx, tokens, window)`: (end of the keys, units of them, first unit any row sees, first key all rows see).

    A window of w keys lets a query at position p see keys p - w + 1 .. p; 0 is no window. Queries stand at position ctx
    or later. A negative ctx is an empty slot: no units.

    Args:
        earlier: the third operand is no window, but how many masked keys lie before the T newest.
        paths: it is the tokens of a tree's longest path, and units are those of positions (`paths`).
        windowed: with either: the third operand is `behind`, that number and a window in one.
    """
    i32 = isa.i32

    def span_of_many(ctx: Any, tokens: Any, n_earlier: Any) -> Any:
        end = i32(ctx + n_earlier + tokens)
        n_units = i32((end + (UNIT - 1)) >> 4)
        if ctx < 0:
            n_units = i32(0)
        return end, n_units, i32(0), i32(0)

    def span_of_many_near(ctx: Any, tokens: Any, behind: Any) -> Any:
        end, window = i32(ctx + (behind & ((1 << EARLIER_BITS) - 1)) + tokens), i32(behind >> EARLIER_BITS)
        n_units, nearest = i32((end + (UNIT - 1)) >> 4), i32(max(ctx - window + 1, 0))
        if ctx < 0:
            n_units = i32(0)
        return end, n_units, i32(nearest >> 4), i32(end - window)  # no query stands behind the last key

    def span_of_paths(ctx: Any, tokens: Any, path_len: Any) -> Any:
        n_units = i32((ctx + path_len + (UNIT - 1)) >> 4)
        if ctx < 0:
            n_units = i32(0)
        return i32(ctx + tokens), n_units, i32(0), i32(0)

    def span_of_paths_near(ctx: Any, tokens: Any, behind: Any) -> Any:
        window, after = i32(behind >> EARLIER_BITS), i32(ctx + (behind & ((1 << EARLIER_BITS) - 1)))
        n_units, nearest = i32((after + (UNIT - 1)) >> 4), i32(max(ctx - window + 1, 0))
        if ctx < 0:
            n_units = i32(0)
        return i32(ctx + tokens), n_units, i32(nearest >> 4), i32(after - window)  # no node stands at `after` or behind

    def span(ctx: Any, tokens: Any, window: Any) -> Any:
        end = i32(ctx + tokens)
        n_units, first_unit, seen_by_all = i32((end + (UNIT - 1)) >> 4), i32(0), i32(0)
        if window > 0:
            seen_by_all = i32(end - window)
            if ctx + 1 > window:
                first_unit = i32((ctx + 1 - window) >> 4)
        if ctx < 0:
            n_units = i32(0)
        return end, n_units, first_unit, seen_by_all

    if paths:
        return isa.inlined(span_of_paths_near if windowed else span_of_paths)
    if earlier:
        return isa.inlined(span_of_many_near if windowed else span_of_many)
    return isa.inlined(span)


def make_fp8_order(isa: Any, shape: Shape) -> tuple[Any, Any]:
    """What differs in a lane's 16 bytes of a query where keys are in e4m3.

    A lane reads 16 bytes of a key, elements 16t .. 16t + 15 of 64: of pieces 2j and 2j + 1 eight each. So products take
    elements in an order of their own, the same of keys and queries.

    `beside(lane, piece)`: bytes from where a query's piece is read for a 16-bit cache.
    `as_operands(v)`: four words of a query in the dtype of the products.
    """
    i32, pack = isa.i32, isa.PACK[shape.product_dtype]
    low, high, is_same = isa.LOW[shape.dtype], isa.HIGH[shape.dtype], shape.dtype == shape.product_dtype

    def beside(lane: Any, piece: Any) -> Any:
        return i32((lane & 3) * 16 - (piece & 1) * 48)  # 128 (piece / 2) + 32t + 16 (piece mod 2) in all

    def as_operand(word: Any) -> Any:
        if is_same:
            return word
        return pack(high(word), low(word))

    as_operand = isa.inlined(as_operand)

    def as_operands(v: Any) -> Any:
        return as_operand(v[0]), as_operand(v[1]), as_operand(v[2]), as_operand(v[3])

    return isa.inlined(beside), isa.inlined(as_operands)


def make_own_words(isa: Any) -> Any:
    """`own_words(v, lane)`: what a lane multiplies of 64 bytes of a row that four lanes have read, 16 each.

    Lane t has words 4t .. 4t + 3 and gets words t, t + 4, t + 8 and t + 12: elements 2t and 2t + 1 of each eight. All
    lanes of a warp exchange them together. Loads of four bytes would need no exchange, but are four times as many.
    """
    i32 = isa.i32

    def exchange(a: Any, b: Any, is_upper: Any, apart: Any) -> Any:
        # The lower of two lanes keeps its a, the upper one its b.
        given = b
        if is_upper != 0:
            given = a
        taken = isa.shuffle_xor_i32(given, apart)
        if is_upper != 0:
            a = taken
        else:
            b = taken
        return a, b

    exchange = isa.inlined(exchange)

    def own_words(v: Any, lane: Any) -> Any:
        odd, far = i32(lane & 1), i32(lane & 2)
        a, b = exchange(v[0], v[1], odd, i32(1))
        c, d = exchange(v[2], v[3], odd, i32(1))
        a, c = exchange(a, c, far, i32(2))
        b, d = exchange(b, d, far, i32(2))
        return a, b, c, d

    return isa.inlined(own_words)


def make_load_queries(isa: Any, shape: Shape) -> Any:
    """`load_queries(q, at, m, b, kv_head, n_kv, tokens, row0, lane, piece)`: one lane's fragment of 16 rows, 32 of D.

    Eight int32 go to `at[8 m ..]`, zeros for rows that do not exist.
    """
    i32, i64 = isa.i32, isa.i64
    token_of = make_token_of(isa, shape.group)
    group, row_bytes, fp8 = shape.group, 2 * shape.dim, shape.is_fp8
    (beside, as_operands), own_words = make_fp8_order(isa, shape), make_own_words(isa)

    def load_queries(
        q: Any, at: Any, m: Any, b: Any, kv_head: Any, n_kv: Any, tokens: Any, row0: Any, lane: Any, piece: Any
    ) -> None:
        for far in range(2):
            row, v = i32(row0 + far * 8 + (lane >> 2)), (i32(0), i32(0), i32(0), i32(0))
            if row < tokens * group:
                token = token_of(row)
                head = i32(kv_head * group + (row - token * group))
                source = (i64(b * tokens + token) * (n_kv * group) + head) * row_bytes + piece * 64 + (lane & 3) * 16
                if fp8:
                    source += beside(lane, piece)
                v = isa.load_u32x4(q + source)
                if fp8:
                    v = as_operands(v)
            if not fp8:
                v = own_words(v, lane)
            for c in range(4):
                at[m * 8 + 2 * c + far] = v[c]

    return isa.inlined(load_queries)
