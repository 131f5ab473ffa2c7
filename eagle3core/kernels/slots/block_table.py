"""Block tables follow the sequences' lengths: blocks are taken from the free stack to grow, returned to shrink.

A sequence of n tokens holds ceil(n / block) blocks, so a rewind frees those with index from ceil(new / block) up to
ceil(old / block) and no block that is still partly used. A sequence whose blocks cannot all be had gets none, and says
how many are missing: then nothing may be written for it. Rows are served in order; a returned block is the first to be
taken again. Source: Kwon et al., arXiv 2309.06180; docs/requirements.md R-61, R-65..R-68, 1.X-9.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import Card, Case, Cost, Launch, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.isa.reductions import make_block_min_i32, make_block_prefix_pair_i32
from eagle3core.kernels.slots.cache_rows import check_block

THREADS = 256  # a thread a row
GROUP = 4  # blocks of a row that move together


class BlockPool(NamedTuple):
    """Tables and the stack of free blocks, updated in place; int32.

    Attributes:
        tables: `[S, M]` block ids a slot, -1 where it holds none.
        free: `[n_blocks]` the stack, top at n_free - 1; entries above are left as they are.
        n_free: `[1]`.
    """

    tables: Tensor
    free: Tensor
    n_free: Tensor


def block_table_reference(
    pool: BlockPool, slots: Tensor, old_lens: Tensor, new_lens: Tensor, block: int
) -> tuple[BlockPool, Tensor, Tensor]:
    """The pool after the update; blocks gained (negative: returned) and blocks missing, `[B]` each.

    `slots: [B]` distinct; `old_lens, new_lens: [B]` tokens.
    """
    made = BlockPool(*(tensor.clone() for tensor in pool))
    changed, missing = torch.zeros_like(slots), torch.zeros_like(slots)
    at_start = top = int(pool.n_free[0])
    rows = list(zip(slots.tolist(), old_lens.tolist(), new_lens.tolist(), strict=True))
    wanted = 0
    for row, (slot, old, new) in enumerate(rows):
        have, want = -(-old // block), -(-new // block)
        fits = want <= pool.tables.shape[1]
        wanted += max(want - have, 0) if fits else 0
        if want > have and fits and wanted <= at_start:
            for index in range(have, want):
                top -= 1
                made.tables[slot, index] = pool.free[top]
            changed[row] = want - have
        elif want > have:
            missing[row] = want - have
    for row, (slot, old, new) in enumerate(rows):
        have, want = -(-old // block), -(-new // block)
        for index in range(have - 1, want - 1, -1):
            made.free[top] = pool.tables[slot, index]
            made.tables[slot, index] = -1
            top += 1
        changed[row] = min(int(changed[row]), want - have) if want < have else changed[row]
    made.n_free[0] = top
    return made, changed, missing


def make_block_table(isa: Any, *, block: int, overlap: bool) -> Any:
    """One block of threads; everything is taken before anything is returned.

    The rows that are served come before the first that is not, so the last one served says how many blocks are taken.
    Blocks move four at a time, loads before stores, so that their latencies overlap.
    """
    cuda, i32, i64 = isa.cuda, isa.i32, isa.i64
    warps, pair_words, shift = THREADS // 32, THREADS // 16, block.bit_length() - 1
    prefix_pair, block_min = make_block_prefix_pair_i32(isa, warps), make_block_min_i32(isa, warps)

    def kernel(
        slots: Any, old_lens: Any, new_lens: Any, tables: Any, free: Any, n_free: Any, changed: Any, missing: Any,
        batch: Any, entries: Any, n_blocks: Any,
    ) -> None:  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        first = isa.shared_address(cuda.shared.array(pair_words, i32))
        second = isa.shared_address(cuda.shared.array(warps, i32))
        moved, given = cuda.local.array(GROUP, i32), cuda.local.array(GROUP, i32)
        if overlap:
            isa.let_next_start()
            isa.wait_previous()
        old, new, slot, available = i32(0), i32(0), i32(0), isa.load_u32(n_free)
        if tid < batch:
            old, new = isa.load_u32(old_lens + tid * 4), isa.load_u32(new_lens + tid * 4)
            slot = isa.load_u32(slots + tid * 4)
        have, want = i32((old + (block - 1)) >> shift), i32((new + (block - 1)) >> shift)
        row = tables + i64(slot) * entries * 4
        takes, returns, short = max(i32(want - have), i32(0)), max(i32(have - want), i32(0)), i32(0)
        for i in range(GROUP):
            given[i] = i32(0)
            if i < returns:
                given[i] = isa.load_u32(row + (have - 1 - i) * 4)
        if want > entries:
            takes, short = i32(0), i32(takes)
        # Blocks that rows before this one take, and return: one barrier for both.
        before, ahead, returned = prefix_pair(takes, returns, first, tid)
        upto = i32(0)
        # A row gets all it wants or nothing; those before it count whether or not they fit, so none later fits either.
        if before + takes > available:
            takes, short = i32(0), i32(takes)
        if takes > 0:
            upto = i32(before + takes)
        done = i32(0)
        while done < takes:
            for i in range(GROUP):
                if done + i < takes:
                    moved[i] = isa.load_u32(free + i64(available - 1 - before - done - i) * 4)
            for i in range(GROUP):
                if done + i < takes:
                    isa.store_u32(row + (have + done + i) * 4, moved[i])
            done = i32(done + GROUP)
        # The barrier in the minimum: all is taken, and `available` has been read.
        base, done = i32(available + block_min(i32(-upto), second, tid)), i32(0)
        while done < returns:
            for i in range(GROUP):
                if done + i < returns:
                    # The bound only matters if a caller's lengths do not fit the tables; nothing outside is written.
                    if base + ahead + done + i < n_blocks:
                        isa.store_u32(free + i64(base + ahead + done + i) * 4, given[i])
                    isa.store_u32(row + (have - 1 - done - i) * 4, -1)
            done = i32(done + GROUP)
            for i in range(GROUP):
                if done + i < returns:
                    given[i] = isa.load_u32(row + (have - 1 - done - i) * 4)
        if tid < batch:
            isa.store_u32(changed + tid * 4, takes - returns)
            isa.store_u32(missing + tid * 4, short)
        if tid == 0:
            isa.store_u32(n_free, min(i32(base + returned), n_blocks))

    return kernel


def block_table_variant(arch: str, block: int) -> Variant:
    """The update for one block size.

    Raises:
        KernelLimit: `block` is not a power of two.
    """
    check_block(block)
    return Variant(
        name=f"block_table_{block}",
        make=make_block_table,
        constants={"block": block, "overlap": overlaps(arch)},
        parameters=parameters(
            "slots:in old_lens:in new_lens:in tables:inout free:inout n_free:inout changed:out missing:out batch:i32 "
            "entries:i32 n_blocks:i32"
        ),
        threads=THREADS,
        max_registers=64,
        instructions={"BAR": 2},
        dependent=overlaps(arch),
    )


def block_table(
    arch: str,
    pool: BlockPool,
    slots: Tensor,
    old_lens: Tensor,
    new_lens: Tensor,
    changed: Tensor,
    missing: Tensor,
    block: int,
) -> list[Launch]:
    """`pool` in place, `changed` and `missing: [B]`, from distinct `slots` and lengths `[B]`; all int32.

    Raises:
        KernelLimit: more than 256 rows, or a block size that is not a power of two.
    """
    if len(slots) > THREADS:
        raise KernelLimit(f"{len(slots)} sequences", f"at most {THREADS}", "lower max_batch_size")
    return [
        block_table_variant(arch, block).launch(
            (1,), slots=slots, old_lens=old_lens, new_lens=new_lens, **pool._asdict(), changed=changed,
            missing=missing, batch=len(slots), entries=pool.tables.shape[1], n_blocks=len(pool.free),
        )
    ]  # fmt: skip


def block_table_cost(batch: int, moved: int) -> Cost:
    """Slot and two lengths in, two numbers out a row; `moved` table and stack entries in and out in all."""
    return Cost(batch * 20 + moved * 8 + 8)


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    batch, n_slots, entries, block = case["batch"], case["slots"], case["entries"], case["block"]

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator, device=device, dtype=torch.int32)

    old, new = integers(entries * block + 1, batch), integers(entries * block + 1, batch)
    slots = torch.randperm(n_slots, generator=generator, device=device)[:batch].int()
    if batch > 4:
        new[1] = old[1]
        old[2], new[2] = 0, (entries + 1) * block  # longer than a table
    held, n_held = -(-old // block), int((-(-old // block)).sum())
    blocks = torch.randperm(n_held + case["spare"], generator=generator, device=device).int()
    tables = torch.full((n_slots, entries), -1, dtype=torch.int32, device=device)
    taken = torch.arange(entries, device=device) < held[:, None]
    rows = torch.full((batch, entries), -1, dtype=torch.int32, device=device)
    rows[taken] = blocks[:n_held]
    tables[slots.long()] = rows
    free = torch.cat([blocks[n_held:], torch.full((n_held,), -7, dtype=torch.int32, device=device)])
    n_free = torch.tensor([case["spare"]], dtype=torch.int32, device=device)
    return {"slots": slots, "old_lens": old, "new_lens": new, "tables": tables, "free": free, "n_free": n_free}


def _split(inputs: Tensors) -> tuple[BlockPool, Tensors]:
    pool = BlockPool(*(inputs[name] for name in BlockPool._fields))
    return pool, {name: inputs[name] for name in ("slots", "old_lens", "new_lens")}


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    made = {name: tensor.clone() for name, tensor in _split(inputs)[0]._asdict().items()}
    device = inputs["slots"].device
    return {
        **made,
        **{name: poison(case["batch"], dtype=torch.int32, device=device) for name in ("changed", "missing")},
    }


def _reference(case: Case, inputs: Tensors) -> Tensors:
    pool, read = _split(inputs)
    made, changed, missing = block_table_reference(pool, **read, block=case["block"])
    return {**made._asdict(), "changed": changed, "missing": missing}


def _launches(arch: str, case: Case, inputs: Tensors, outputs: Tensors) -> list[Launch]:
    pool = BlockPool(*(outputs[name] for name in BlockPool._fields))
    own = {name: outputs[name] for name in ("changed", "missing")}
    return block_table(arch, pool, **_split(inputs)[1], **own, block=case["block"])


CARD = Card(
    name="block_table",
    equation="hold ceil(length / block) blocks: take from the free stack, or return the ones past it",
    source="arXiv 2309.06180",
    example=_example,
    outputs=_outputs,
    reference=_reference,
    launches=_launches,
    cost=lambda case: block_table_cost(case["batch"], case.get("moved", case["batch"])),
    variants=lambda arch: [block_table_variant(arch, 64)],
    slow_variants=lambda arch: [block_table_variant(arch, 16)],
    cases=(
        {"batch": 7, "slots": 9, "entries": 5, "block": 4, "spare": 20},
        {"batch": 6, "slots": 6, "entries": 4, "block": 8, "spare": 3},
    ),
    slow_cases=({"batch": 1, "slots": 2, "entries": 3, "block": 1, "spare": 0},),
    shapes=tuple(
        {"batch": b, "slots": b, "entries": 4, "block": 64, "spare": 4 * b, "moved": 2 * b} for b in (1, 4, 64)
    ),
    hand_counts=(({"batch": 3, "moved": 4}, Cost(60 + 32 + 8)),),
)  # fmt: skip
