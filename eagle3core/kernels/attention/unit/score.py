"""Scores of a unit's keys by the queries of a warp: what `tile` begins with.

A product takes 16 elements of a 16-bit key in their order. Keys lie in shared memory as values do and `ldmatrix` reads
them from the same places, but does not turn them. In e4m3 keys lie as the lanes read them, 16 bytes each: a lane's 16
elements of two 32-element pieces, which become operands just before they are multiplied. Queries come in the same order
of elements (`layout.make_fp8_order`).

Source: derived here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3core.kernels.attention.layout import Fp8Shape, Shape


def make_score(
    isa: Any, shape: Shape, *, tiles: int, half: bool, held: int, units: int, first_tile: int
) -> tuple[Any, Any]:
    """`score` and `score_apart` of `tile.Steps`; arguments of `tile.make_steps`."""
    cuda, i32 = isa.cuda, isa.i32
    mma = isa.MMA[shape.product_dtype]
    widen: Any = isa.F16_OF_E4M3[shape.converts] if isinstance(shape, Fp8Shape) else None
    pieces, row_pieces, unit_bytes, fp8 = shape.pieces, shape.row_pieces, shape.unit_bytes, shape.is_fp8
    unit_scores, n_keys, n_stored = 8 * tiles, 8 * units, 8 * units
    n_scores, zero = unit_scores * units, np.float32(0)
    # Of the four blocks that ldmatrix reads for a product of a unit, which one has the second 8 keys, and which the
    # second 8 elements: with `half` in the order in which values are the first operand.
    far_keys, far_elements = (2, 1) if half else (1, 2)

    def multiply(j: Any, scores: Any, keys: Any, queries: Any, q_at: Any) -> None:
        # Along D the order of a score's sum: pieces upwards, two products each. Rows g and g + 8 of a tile are a
        # lane's, keys 2t and 2t + 1 of each eight.
        for c in range(2):
            for m in range(tiles):
                if j < held:
                    o = ((first_tile + m) * held + j) * 8 + c * 4
                    a = (queries[o], queries[o + 1], queries[o + 2], queries[o + 3])
                else:
                    tile = (first_tile + m) * (pieces - held)
                    a = isa.shared_load_u32x4(i32(q_at + (tile + j - held) * 1024 + c * 512))
                for i in range(2 * units):
                    s, x = (i >> 1) * unit_scores + m * 8 + (i & 1) * 4, i * 4 + c * 2
                    d = mma(
                        a[0], a[1], a[2], a[3], keys[x], keys[x + 1],
                        scores[s], scores[s + 1], scores[s + 2], scores[s + 3],
                    )  # fmt: skip
                    for e in range(4):
                        scores[s + e] = d[e]

    multiply = isa.inlined(multiply)

    def widen_keys(half: Any, stored: Any, keys: Any) -> None:
        """The first or second 8 of a lane's 16 elements of every key, as operands."""
        for i in range(2 * units):
            a, b = widen(stored[i * 4 + half * 2]), widen(stored[i * 4 + half * 2 + 1])
            keys[i * 4], keys[i * 4 + 1], keys[i * 4 + 2], keys[i * 4 + 3] = a[0], a[1], b[0], b[1]

    widen_keys = isa.inlined(widen_keys)

    def multiply_stored(j: Any, scores: Any, stored: Any, keys: Any, queries: Any, q_at: Any) -> None:
        widen_keys(0, stored, keys)
        multiply(2 * j, scores, keys, queries, q_at)
        widen_keys(1, stored, keys)
        multiply(2 * j + 1, scores, keys, queries, q_at)

    multiply_stored = isa.inlined(multiply_stored)

    def read_keys(u: Any, c: Any, keys: Any, at: Any) -> None:
        # Product c of a piece, of 16 keys: lane (g, t) gets elements 2t and 2t + 1 of each eight of keys g and g + 8.
        k = isa.ldmatrix_x4(at)
        for h in range(2):
            for e in range(2):
                keys[(u * 2 + h) * 4 + c * 2 + e] = k[h * far_keys + e * far_elements]

    read_keys = isa.inlined(read_keys)

    # The two products of a piece lie as the two steps of values do: 32 bytes apart but for the exchange of columns.
    def score_piece(j: Any, scores: Any, keys: Any, queries: Any, q_at: Any, k_even: Any, k_odd: Any) -> None:
        for u in range(units):
            read_keys(u, 0, keys, i32(k_even + u * unit_bytes + j * 512))
            read_keys(u, 1, keys, i32(k_odd + u * unit_bytes + j * 512))
        multiply(j, scores, keys, queries, q_at)

    def score_stored(j: Any, scores: Any, stored: Any, keys: Any, queries: Any, q_at: Any, k_at: Any) -> None:
        for i in range(2 * units):
            k = isa.shared_load_u32x4(i32(k_at + (i >> 1) * unit_bytes + ((i & 1) * row_pieces + j) * 512))
            for c in range(4):
                stored[i * 4 + c] = k[c]
        multiply_stored(j, scores, stored, keys, queries, q_at)

    def score_piece_apart(j: Any, scores: Any, keys: Any, queries: Any, q_at: Any, places: Any) -> None:
        for u in range(units):
            read_keys(u, 0, keys, i32(places[u] + j * 512))
            read_keys(u, 1, keys, i32((places[u] ^ 32) + j * 512))
        multiply(j, scores, keys, queries, q_at)

    def score_stored_apart(j: Any, scores: Any, stored: Any, keys: Any, queries: Any, q_at: Any, places: Any) -> None:
        for i in range(2 * units):
            k = isa.shared_load_u32x4(i32(places[i] + j * 512))
            for c in range(4):
                stored[i * 4 + c] = k[c]
        multiply_stored(j, scores, stored, keys, queries, q_at)

    score_piece, score_piece_apart = isa.inlined(score_piece), isa.inlined(score_piece_apart)
    score_stored, score_stored_apart = isa.inlined(score_stored), isa.inlined(score_stored_apart)

    def score_apart(scores: Any, queries: Any, q_at: Any, places: Any) -> None:
        keys = cuda.local.array(n_keys, i32)
        for i in range(n_scores):
            scores[i] = zero
        score_piece_apart(0, scores, keys, queries, q_at, places)
        score_piece_apart(1, scores, keys, queries, q_at, places)
        if pieces == 4:
            score_piece_apart(2, scores, keys, queries, q_at, places)
            score_piece_apart(3, scores, keys, queries, q_at, places)

    def score(scores: Any, queries: Any, q_at: Any, k_at: Any) -> None:
        keys, k_odd = cuda.local.array(n_keys, i32), i32(k_at ^ 32)
        for i in range(n_scores):
            scores[i] = zero
        score_piece(0, scores, keys, queries, q_at, k_at, k_odd)
        score_piece(1, scores, keys, queries, q_at, k_at, k_odd)
        if pieces == 4:
            score_piece(2, scores, keys, queries, q_at, k_at, k_odd)
            score_piece(3, scores, keys, queries, q_at, k_at, k_odd)

    def score_of_fp8(scores: Any, queries: Any, q_at: Any, k_at: Any) -> None:
        stored, keys = cuda.local.array(n_stored, i32), cuda.local.array(n_keys, i32)
        for i in range(n_scores):
            scores[i] = zero
        score_stored(0, scores, stored, keys, queries, q_at, k_at)
        if row_pieces == 2:
            score_stored(1, scores, stored, keys, queries, q_at, k_at)

    def score_apart_of_fp8(scores: Any, queries: Any, q_at: Any, places: Any) -> None:
        stored, keys = cuda.local.array(n_stored, i32), cuda.local.array(n_keys, i32)
        for i in range(n_scores):
            scores[i] = zero
        score_stored_apart(0, scores, stored, keys, queries, q_at, places)
        if row_pieces == 2:
            score_stored_apart(1, scores, stored, keys, queries, q_at, places)

    if fp8:
        return isa.inlined(score_of_fp8), isa.inlined(score_apart_of_fp8)
    return isa.inlined(score), isa.inlined(score_apart)
