"""Keeps an accepted path as one contiguous run of the paged cache: row start + path[i] moves to row start + i.

A path ascends and path[i] >= i, so a row is never overwritten before it has been read if one thread moves the rows of
its 16-byte piece in order; four are read before the first is written. A chain moves nothing.
Source: EAGLE, arXiv 2401.15077, section 4; docs/requirements.md R-59; paging after Kwon et al., arXiv 2309.06180.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import PLAIN_TORCH, Card, Case, Cost, Launch, Op, Tensors, Variant, overlaps, parameters
from eagle3core.kernels.isa.by_row import alone, count
from eagle3core.kernels.isa.early import make_early

THREADS = 128
GROUP = 4  # rows a thread has in flight, a power of two
STAGED = 128  # blocks of a sequence that a warp fetches ahead; further ones are looked up


def compact_kv_reference(
    pages: Tensor, block_tables: Tensor, starts: Tensor, path: Tensor, counts: Tensor
) -> Tensor:  # fmt: skip
    """`pages: [L, n_blocks, K, block, D]` after the moves of every sequence.

    `block_tables: [B, M]`, `starts, counts: [B]`, `path: [B, P]`; the first counts[b] entries of a path are kept.
    """
    made, block = pages.clone(), pages.shape[3]
    for b, n_kept in enumerate(counts.tolist()):
        source = starts[b].long() + path[b, :n_kept].long()
        target = starts[b].long() + torch.arange(n_kept, device=pages.device)
        held = block_tables[b].long()
        made[:, held[target // block], :, target % block] = pages[:, held[source // block], :, source % block]
    return made


def make_compact_kv(isa: Any, *, head_dim: int, block: int, overlap: bool) -> Any:
    """Grid (pieces of a row, layers of k then of v, sequences), a thread a 16-byte piece of one head.

    A warp fetches path and block table beside the start, a lane an entry each. Lane i then finds where the i-th of four
    rows comes from and lane 4 + i where it goes: rows wait for one load before them and not for three.
    """
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    per_head_shift, block_shift, block_mask = (head_dim // 8).bit_length() - 1, block.bit_length() - 1, block - 1
    group_words, parts, early = GROUP * 4, STAGED // 32, make_early(isa, THREADS)

    def find(held: Any, tables: Any, token: Any, is_kept: Any) -> Any:
        index = i32(token >> block_shift)
        # The table lies in the lanes, 32 entries a register: a shuffle a register instead of a load.
        page = isa.shuffle_i32(held[0], index & 31)
        for p in range(1, parts):
            other = isa.shuffle_i32(held[p], index & 31)
            if index >> 5 == p:
                page = other
        if index >= STAGED and is_kept:
            page = isa.load_u32(tables + i64(index) * 4)
        return i32((page << block_shift) + (token & block_mask))

    def offset(line: Any, kv_heads: Any, head: Any) -> Any:
        return (((i64(line >> block_shift) * kv_heads + head) << block_shift) + (line & block_mask)) * (head_dim * 2)

    find, offset = isa.inlined(find), isa.inlined(offset)

    def kernel(
        k_pages: Any, v_pages: Any, block_tables: Any, starts: Any, path: Any, counts: Any, layers: Any,
        n_blocks: Any, kv_heads: Any, entries: Any, width: Any,
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        item, lane = i32(cuda.blockIdx.x * THREADS + tid), i32(tid & 31)
        layer, sequence = i32(cuda.blockIdx.y), i64(cuda.blockIdx.z)
        words, held = cuda.local.array(group_words, i32), cuda.local.array(parts, i32)
        head, piece = i32(item >> per_head_shift), i32(item & (head_dim // 8 - 1))
        pages = k_pages
        if layer >= layers:
            pages, layer = v_pages, i32(layer - layers)
        pages += ((i64(layer) * n_blocks * kv_heads) << block_shift) * (head_dim * 2) + piece * 16
        tables, row = block_tables + sequence * entries * 4, path + sequence * width * 4
        at, first = i32(1 + (lane & (GROUP - 1))), i32(1)
        early((tables + lane * 4) ^ (row + at * 4) ^ starts ^ counts ^ pages)
        if overlap:
            isa.wait_previous()
            isa.let_next_start()  # only now: see `tree.grow_tree_kernel`
        start, n_kept, node = isa.load_u32(starts + sequence * 4), isa.load_u32(counts + sequence * 4), i32(0)
        if at < width:
            node = isa.load_u32(row + at * 4)
        for p in range(parts):
            held[p] = i32(0)
            if p * 32 + lane < entries:
                held[p] = isa.load_u32(tables + (p * 32 + lane) * 4)
        if start < 0:  # no sequence; and both numbers are asked for before either is needed
            n_kept = i32(0)
        # Groups upwards, and within one all loads before the stores. A row goes to its place or below (the i-th of a
        # path has an index of at least i), so no later row is overwritten before it is read.
        while first < n_kept:
            is_kept, token = i32(at < n_kept), i32(start + node)
            if (lane & GROUP) != 0:
                token = i32(start + at)
            line, moves = find(held, tables, token, is_kept), isa.ballot(is_kept & i32(node != at))
            if head >= kv_heads:
                moves = i32(0)
            for i in range(GROUP):
                source = isa.shuffle_i32(line, i)
                if (moves >> i) & 1:
                    loaded = isa.load_u32x4(pages + offset(source, kv_heads, head))
                    for w in range(4):
                        words[i * 4 + w] = loaded[w]
            for i in range(GROUP):
                target = isa.shuffle_i32(line, GROUP + i)
                if (moves >> i) & 1:
                    goes = pages + offset(target, kv_heads, head)
                    isa.store_u32x4(goes, words[i * 4], words[i * 4 + 1], words[i * 4 + 2], words[i * 4 + 3])
            first, at = i32(first + GROUP), i32(at + GROUP)
            if at < n_kept:
                node = isa.load_u32(row + at * 4)

    return kernel


def compact_kv_variant(arch: str, head_dim: int, block: int) -> Variant:
    """The moves for one head size and cache block, of any sixteen-bit dtype; a head in bytes counts half.

    Raises:
        KernelLimit: either is not a power of two, or the head size is below 8.
    """
    for name, size, least in (("head size", head_dim, 8), ("block", block, 1)):
        if size < least or size & (size - 1):
            raise KernelLimit(f"{name} is {size}", f"a power of two, {least} or more", PLAIN_TORCH)
    return Variant(
        name=f"compact_kv_{head_dim}_{block}",
        make=make_compact_kv,
        constants={"head_dim": head_dim, "block": block, "overlap": overlaps(arch)},
        parameters=parameters(
            "k_pages:inout v_pages:inout block_tables:in starts:in path:in counts:in layers:i32 n_blocks:i32 "
            "kv_heads:i32 entries:i32 width:i32"
        ),
        threads=THREADS,
        max_registers=96,
        dependent=overlaps(arch),
    )


def compact_kv(
    arch: str, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, starts: Tensor, path: Tensor, counts: Tensor
) -> list[Launch]:
    """Moves in `k_pages, v_pages: [L, n_blocks, K, block, D]` in place; the rest as the reference's, int32.

    Raises:
        KernelLimit: head size or block is not a power of two.
    """
    layers, n_blocks, kv_heads, block, head_dim = k_pages.shape
    head_dim = head_dim * k_pages.element_size() // 2  # rows are moved as they lie, 16 bits at a time
    tiles = -(-kv_heads * (head_dim // 8) // THREADS)
    return [
        compact_kv_variant(arch, head_dim, block).launch(
            (tiles, 2 * layers, len(path)), k_pages=k_pages, v_pages=v_pages, block_tables=block_tables, starts=starts,
            path=path, counts=counts, layers=layers, n_blocks=n_blocks, kv_heads=kv_heads,
            entries=block_tables.shape[1], width=path.shape[1],
        )
    ]  # fmt: skip


def compact_kv_meaning(
    k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, starts: Tensor, path: Tensor, counts: Tensor
) -> None:
    """What `compact_kv` computes, in plain torch."""
    for pages in (k_pages, v_pages):
        pages.copy_(compact_kv_reference(pages, block_tables, starts, path, counts))


COMPACT_KV = Op("compact_kv", compact_kv, compact_kv_meaning)


def compact_kv_cost(batch: int, moved: int, layers: int, kv_heads: int, head_dim: int) -> Cost:
    """`moved` rows a sequence, of k and of v, in every layer, in and out; their path entries, two numbers."""
    return Cost(batch * (moved * (2 * layers * kv_heads * head_dim * 4 + 4) + 8))


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    batch, width, block = case["batch"], case["path_len"], case["block"]
    per_row = -(-(case["longest"] + 3 * width) // block)
    shape = (case["layers"], batch * per_row, case["kv_heads"], block, case["head_dim"])

    def pages() -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case["dtype"])

    steps = torch.randint(1, 3, (batch, width), generator=generator, device=device, dtype=torch.int32)
    counts = torch.randint(0, width + 1, (batch,), generator=generator, device=device, dtype=torch.int32)
    steps[0], counts[0] = 2, width  # one path with a move at every node
    path = steps.cumsum(1).int() - steps[:, :1]
    order = torch.randperm(batch * per_row, generator=generator, device=device).int()
    return {
        "k_pages": pages(),
        "v_pages": pages(),
        "block_tables": order.view(batch, per_row),
        "starts": torch.randint(case["longest"], (batch,), generator=generator, device=device, dtype=torch.int32),
        "path": torch.where(torch.arange(width, device=device) < counts[:, None], path, -1),
        "counts": counts,
    }


_PAGES = ("k_pages", "v_pages")


def _read(inputs: Tensors) -> Tensors:
    return {name: tensor for name, tensor in inputs.items() if name not in _PAGES}


CARD = Card(
    name="compact_kv",
    equation="kv[start + i] = kv[start + path[i]] for i < count, in every layer",
    source="EAGLE, arXiv 2401.15077, section 4",
    example=_example,
    outputs=lambda case, inputs: {name: inputs[name].clone() for name in _PAGES},
    reference=lambda case, inputs: {
        name: compact_kv_reference(inputs[name], **_read(inputs)) for name in _PAGES
    },
    launches=lambda arch, case, inputs, outputs: compact_kv(arch, **outputs, **_read(inputs)),
    cost=lambda case: compact_kv_cost(
        case["batch"], case["path_len"] - 1, case["layers"], case["kv_heads"], case["head_dim"]
    ),
    variants=lambda arch: [compact_kv_variant(arch, 128, 64)],
    slow_variants=lambda arch: [compact_kv_variant(arch, 64, 64), compact_kv_variant(arch, 128, 16)],
    cases=(
        {"batch": 2, "path_len": 11, "layers": 2, "kv_heads": 3, "head_dim": 16, "block": 4, "longest": 9,
         "dtype": torch.bfloat16},
    ),
    slow_cases=(
        {"batch": 3, "path_len": 4, "layers": 1, "kv_heads": 9, "head_dim": 128, "block": 16, "longest": 40,
         "dtype": torch.float16},
        {"batch": 3, "path_len": 4, "layers": 1, "kv_heads": 1, "head_dim": 16, "block": 1, "longest": 2000,
         "dtype": torch.bfloat16},
    ),
    shapes=tuple(
        {"batch": b, "path_len": 4, "layers": 32, "kv_heads": 8, "head_dim": 128, "block": 64, "longest": 512,
         "dtype": torch.bfloat16} for b in (1, 4)
    ),
    hand_counts=(
        (
            {"batch": 2, "path_len": 4, "layers": 3, "kv_heads": 2, "head_dim": 16},
            Cost(2 * (3 * (2 * 3 * 128 + 4) + 8)),
        ),
    ),
    exact=frozenset(_PAGES),
    alone=alone("batch", "block_tables", "starts", "path", "counts"),
    row_of=lambda case, inputs, outputs, row: {
        name: outputs[name][:, inputs["block_tables"][row].long()] for name in _PAGES
    },
    n_rows=count("batch"),
)  # fmt: skip
