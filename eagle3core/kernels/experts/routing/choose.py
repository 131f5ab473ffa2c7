"""Kernel that takes the largest logits of every row, makes their shares, and lists the rows of every chosen expert.

One block: a warp chooses for one row at a time and leaves a bit for every expert; then a thread an expert counts the
rows that have its bit, all experts together find where its places begin, and it goes over the rows once more to write
them. So lists are ascending by expert and row, and nothing in them depends on who came first.

Source: derived here.
"""

from __future__ import annotations

from typing import Any

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import PLAIN_TORCH, SHARED_BYTES, Variant, overlaps, parameters
from eagle3core.kernels.experts.routing.pick import make_leave, make_pick, words_of
from eagle3core.kernels.isa.reductions import make_block_prefix_pair_i32

_WARPS = 16
_THREADS = 32 * _WARPS
_PARAMETERS = parameters("logits:in chosen:out shares:out groups:out places:out rows:i32")
MOST_EXPERTS, MOST_CHOSEN = 512, 16  # a thread each; and as many rounds as there are chosen
_FEW_ROWS = 64


def make_choose(
    isa: Any, *, experts: int, n_chosen: int, is_normalised: bool, group_rows: int, most_rows: int, overlap: bool
) -> Any:
    """The kernel; one block, up to `most_rows` rows."""
    cuda, i32, i64, f32 = isa.cuda, isa.i32, isa.i64, isa.f32
    n_words = words_of(experts)
    scratch_at, group_shift = 4 * n_words * most_rows, group_rows.bit_length() - 1
    pick = make_pick(isa, experts=experts, n_chosen=n_chosen)
    leave = make_leave(isa, experts=experts, n_chosen=n_chosen, is_normalised=is_normalised)
    prefix_pair = make_block_prefix_pair_i32(isa, _WARPS)

    def choose_row(logits: Any, chosen: Any, shares: Any, row: Any, lane: Any, bits: Any) -> None:
        values = cuda.local.array(n_words, f32)
        taken, top, _ = pick(values, logits, row, lane)
        leave(values, taken, top, chosen, shares, row, lane)
        for j in range(n_words):
            word = isa.ballot((taken >> j) & 1)
            if lane == 0:
                isa.shared_store_u32(i32(bits + j * 4), word)

    choose_row = isa.inlined(choose_row)

    def choose(logits: Any, chosen: Any, shares: Any, groups: Any, places: Any, rows: Any) -> None:
        tid = i32(cuda.threadIdx.x)
        base = isa.shared_address(cuda.shared.array(0, f32, alignment=128))
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        row = i32(tid >> 5)
        while row < rows:
            choose_row(logits, chosen, shares, row, i32(tid & 31), i32(base + row * (4 * n_words)))
            row = i32(row + _WARPS)
        cuda.syncthreads()
        count, column, shift = i32(0), i32(base + (tid >> 5) * 4), i32(tid & 31)
        if tid < experts:
            for r in range(rows):
                count = i32(count + ((isa.shared_load_u32(i32(column + r * (4 * n_words))) >> shift) & 1))
        n_own = i32((count + (group_rows - 1)) >> group_shift)
        first, group, n_groups = prefix_pair(count, n_own, i32(base + scratch_at), tid)
        if tid == 0:
            isa.store_u32x4(groups, n_groups, i32(0), i32(0), i32(0))
        for i in range(n_own):
            at, done = groups + i64(1 + group + i) * 16, i32(i << group_shift)
            isa.store_u32x4(at, tid, i32(first + done), i32(min(count - done, group_rows)), i32(0))
        if count > 0:
            for r in range(rows):
                word = isa.shared_load_u32(i32(column + r * (4 * n_words)))
                if (word >> shift) & 1 != 0:
                    # Which of the row's experts this is: how many have a lower number.
                    before = isa.popcount(i32(word & ((1 << shift) - 1)))
                    for j in range(n_words):
                        if j < tid >> 5:
                            before = i32(before + isa.popcount(isa.shared_load_u32(i32(base + (r * n_words + j) * 4))))
                    isa.store_u32(places + i64(first) * 4, i32(r * n_chosen + before))
                    first = i32(first + 1)

    return choose


def check_choice(experts: int, n_chosen: int) -> None:
    """A warp can choose so many of so many, for several rows here or for one where it is read.

    Raises:
        KernelLimit: it cannot.
    """
    if experts > MOST_EXPERTS or n_chosen > MOST_CHOSEN:
        raise KernelLimit(
            f"a layer has {experts} experts and chooses {n_chosen}", f"up to {MOST_EXPERTS}, {MOST_CHOSEN} chosen",
            PLAIN_TORCH,
        )  # fmt: skip


def choose_variant(
    arch: str, experts: int, n_chosen: int, is_normalised: bool, group_rows: int, rows: int
) -> Variant:  # fmt: skip
    """The kernel for so many experts, and rows up to a power of two.

    Raises:
        KernelLimit: more experts, or chosen ones, than the block handles; or more rows than its memory has bits for.
    """
    check_choice(experts, n_chosen)
    most_rows = max(_FEW_ROWS, 1 << (rows - 1).bit_length())
    shared = 4 * words_of(experts) * most_rows + 8 * _WARPS
    if shared > SHARED_BYTES[arch]:
        raise KernelLimit(f"{rows} rows for a router of {experts} experts", "fewer rows", "a smaller prefill_chunk")
    return Variant(
        name=f"route_choose_{n_chosen}of{experts}{'' if is_normalised else '_all'}_g{group_rows}_r{most_rows}",
        make=make_choose,
        constants={
            "experts": experts, "n_chosen": n_chosen, "is_normalised": is_normalised, "group_rows": group_rows,
            "most_rows": most_rows, "overlap": overlaps(arch),
        },
        parameters=_PARAMETERS, threads=_THREADS, shared_bytes=shared, max_registers=64, dependent=overlaps(arch),
        rounds_itself=True,
    )  # fmt: skip
