"""One level of a draft tree: every beam node's k most likely tokens are scored, and the best k are the next beam.

Level and beam are those of `growth`, a node's candidates those of `top_k`. One launch does both: the block that is the
last of its tree to find a node's candidates goes on with all of them.
Source: EAGLE-2, arXiv 2406.16858, section 4; docs/requirements.md R-39.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import DTYPES, Card, Case, Cost, Launch, Op, Tensors, Variant, overlaps, parameters, poison
from eagle3core.kernels.isa.by_row import alone, count, row_of
from eagle3core.kernels.isa.powers import PIECE
from eagle3core.kernels.isa.reductions import redux
from eagle3core.kernels.tree.grow_tree_kernel import make_grow_tree
from eagle3core.kernels.tree.growth import Growth, grow_tree_reference, mask_words, new_growth, pool_size
from eagle3core.kernels.tree.top_k import MOST_K, MOST_PIECES, top_k_reference, with_pieces
from eagle3core.kernels.tree.top_k_kernel import THREADS
from eagle3core.kernels.tree.top_k_keys import per_thread


class Offers(NamedTuple):
    """Room for what the blocks of a tree hand over, n rows of k candidates.

    Attributes:
        log_probs: f32 and ids: int32 `[B, n, k]` candidates of each row, best first; target ids.
        arrived: `[B]` int32, 0 between launches.
    """

    log_probs: Tensor
    ids: Tensor
    arrived: Tensor


class HeadRows(NamedTuple):
    """What the draft's head leaves of a level: n rows a sequence, 1 at level 0 (the root) and k later.

    Attributes:
        logits: `[B * n, V]`. best, powers: `[B * n, V / 16]` f32 of every 16 logits (`isa.powers`).
    """

    logits: Tensor
    best: Tensor
    powers: Tensor


def grow_tree_variant(
    arch: str, dtype: str, k: int, n_columns: int, words: int, *, maps: bool, fixed: bool = False
) -> Variant:
    """One level for `k` candidates a node, chosen from rows of `n_columns`; masks have `words` words.

    Raises:
        KernelLimit: k is not in 1..16, or more than 262144 columns, or a mask has more than 8 words.
    """
    if not 1 <= k <= MOST_K or words > 8:
        raise KernelLimit(
            f"top_k {k} with {words} mask words", f"top_k in 1..{MOST_K} and at most 256 beam nodes in all",
            "draft with fewer candidates or levels",
        )  # fmt: skip
    pieces = n_columns // PIECE
    if pieces > MOST_PIECES:
        raise KernelLimit(f"{n_columns} columns", f"at most {MOST_PIECES * PIECE}", "use a draft vocabulary")
    return Variant(
        name=f"grow_tree_{dtype}_{k}_{pieces}_{words}{'_map' if maps else ''}{'_fixed' if fixed else ''}",
        make=make_grow_tree,
        constants={
            "dtype": dtype, "k": k, "pieces": pieces, "held": per_thread(pieces), "words": words, "maps": maps,
            "fixed": fixed, "overlap": overlaps(arch),
        },
        parameters=parameters(
            "logits:in best:in powers:in fixed_scores:const draft_to_target:const log_probs:inout ids:inout "
            "arrived:inout scores:out tokens:out parents:out beam_scores:inout beam_flat:inout beam_tokens:out "
            "beam_rows:out beam_mask:inout level:i32 pool:i32 n_columns:i32"
        ),
        threads=THREADS,
        max_registers=128,
        instructions={redux(arch): 2, "BAR": 8, "MUFU": 2},
        dependent=overlaps(arch),
    )  # fmt: skip


def grow_tree(
    arch: str, growth: Growth, rows: HeadRows, draft_to_target: Tensor | None, level: int, offers: Offers,
    fixed: Tensor | None = None,
) -> list[Launch]:  # fmt: skip
    """Add level `level` to `growth` in place.

    `draft_to_target: [V]` int32, or None; `fixed: [B, n, k]` f32 stands for the log-probabilities of a static tree.

    Raises:
        KernelLimit: as `grow_tree_variant`, V is not a multiple of 16 or less than k, or `level` lies beyond the levels
            that `growth` has room for.
    """
    batch, n_rows, k = offers.ids.shape
    pool, n_columns = growth.scores.shape[1], rows.logits.shape[1]
    if level < 0 or pool_size(k, level + 1) > pool:
        raise KernelLimit(f"level {level} in a pool of {pool}", f"pool_size({k}, level + 1)", "size it by new_growth")
    if n_columns % PIECE or n_columns < k:
        raise KernelLimit(
            f"{n_columns} logits a row with top_k {k}", f"a multiple of {PIECE}, at least top_k", "pad with -inf"
        )
    variant = grow_tree_variant(
        arch, DTYPES[rows.logits.dtype], k, n_columns, growth.beam_mask.shape[2], maps=draft_to_target is not None,
        fixed=fixed is not None,
    )  # fmt: skip
    return [
        variant.launch(
            (n_rows, batch), **rows._asdict(), fixed_scores=fixed, draft_to_target=draft_to_target, level=level,
            pool=pool, n_columns=n_columns, **offers._asdict(), **growth._asdict(),
        )
    ]  # fmt: skip


def grown(
    growth: Growth, logits: Tensor, draft_to_target: Tensor | None, level: int, fixed: Tensor | None, k: int
) -> Growth:
    """The state after `level`, from `logits: [B, n, V]`."""
    log_probs, ids, _ = top_k_reference(logits.flatten(0, 1), k)
    found = log_probs if fixed is None else fixed
    shape = (*logits.shape[:2], k)
    return grow_tree_reference(growth, found.view(shape), ids.view(shape), draft_to_target, level)


def grow_tree_meaning(
    growth: Growth, rows: HeadRows, draft_to_target: Tensor | None, level: int, offers: Offers,
    fixed: Tensor | None = None,
) -> None:  # fmt: skip
    """What `grow_tree` computes, in plain torch; `offers`, `best` and `powers` are the kernel's own and not read."""
    logits = rows.logits.view(*offers.ids.shape[:2], -1)
    made = grown(growth, logits, draft_to_target, level, fixed, offers.ids.shape[2])
    for tensor, out in zip(made, growth, strict=True):
        out.copy_(tensor)


GROW_TREE = Op("grow_tree", grow_tree, grow_tree_meaning)


def grow_tree_cost(batch: int, k: int, words: int, level: int, n_columns: int, maps: bool, fixed: bool) -> Cost:
    """Two numbers a piece of every row in, and k pieces of logits; a candidate's map entry and fixed score in, and its
    triple out; the old beam in, the new one out. Exp, a product and sums a piece."""
    rows, is_first, pieces = 1 if level == 0 else k, level == 0, n_columns // PIECE
    found = pieces * 8 + min(k * PIECE, n_columns) * 2 + k * (12 + 4 * maps + 4 * fixed)
    beam = k * (16 + 4 * words) + (0 if is_first else k * (8 + 4 * words))
    return Cost(batch * (rows * found + beam), batch * rows * (pieces * 4 + k), dependent_passes=1 if is_first else 2)


def _before(case: Case, generator: torch.Generator, device: torch.device) -> Growth:
    """The trees before the case's level."""
    batch, k = case["batch"], case["k"]
    growth = new_growth(batch, k, case["levels"], device)
    for level in range(case["level"]):
        # Quarters, zero among them: ties between siblings, cousins, and a child and its parent.
        shape = (batch, 1 if level == 0 else k, k)
        ids = torch.randint(200, shape, generator=generator, device=device, dtype=torch.int32)
        growth = grow_tree_reference(growth, _quarters(shape, generator, device), ids, None, level)
    # What no level has scored yet is finite here, so that a difference from it is a number.
    return growth._replace(scores=growth.scores.nan_to_num(neginf=0.0))


def _quarters(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    """Log-probabilities of candidates, best first, many of them equal."""
    steps = torch.randint(-12, 1, shape, generator=generator, device=device).float() / 4
    return steps.sort(dim=-1, descending=True).values


def _is_clear(growth: Growth, logits: Tensor, level: int, k: int) -> bool:
    """Whether candidates are equal in score exactly, as siblings may be, or further apart than fp32 rounds."""
    wide = Growth(*(t.double() if t.is_floating_point() else t for t in growth))
    made, start = grown(wide, logits.double(), None, level, None, k), 0 if level == 0 else pool_size(k, level)
    gaps = made.scores[:, start : start + logits.shape[1] * k].sort(dim=1).values.diff(dim=1)
    return bool(((gaps == 0) | (gaps > 2e-5)).all())


def _example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    batch, k, level, n_columns = case["batch"], case["k"], case["level"], case["columns"]
    growth, shape = _before(case, generator, device), (batch, 1 if level == 0 else k, n_columns)
    while True:
        # Rounding to quarters makes ties common, so that the order of equal logits is tested as well.
        logits = 3 * torch.randn(shape, generator=generator, device=device)
        logits = (logits.mul(4).round() / 4).to(case["dtype"])
        if case["fixed"] or _is_clear(growth, logits, level, k):
            break
    pieces = {name: t.view(*shape[:2], -1) for name, t in with_pieces(logits.flatten(0, 1)).items()}
    made = {**pieces, **growth._asdict()}
    if case["fixed"]:
        made["fixed"] = _quarters((*shape[:2], k), generator, device)
    if case["maps"]:
        order = torch.randperm(4 * n_columns, generator=generator, device=device)[:n_columns]
        made["draft_to_target"] = order.sort().values.int()
    return made


def _growth(tensors: Tensors) -> Growth:
    return Growth(*(tensors[name] for name in Growth._fields))


def _outputs(case: Case, inputs: Tensors) -> Tensors:
    made = {name: tensor.clone() for name, tensor in _growth(inputs)._asdict().items()}
    for name in ("beam_tokens", "beam_rows"):
        made[name] = poison(*made[name].shape, dtype=torch.int32, device=made[name].device)
    return made


def _reference(case: Case, inputs: Tensors) -> Tensors:
    read = (inputs["logits"], inputs.get("draft_to_target"), case["level"], inputs.get("fixed"), case["k"])
    return dict(grown(_growth(inputs), *read)._asdict())


def _launches(arch: str, case: Case, inputs: Tensors, outputs: Tensors) -> list[Launch]:
    shape, device = (*inputs["logits"].shape[:2], case["k"]), inputs["logits"].device
    offers = Offers(
        poison(*shape, dtype=torch.float32, device=device), poison(*shape, dtype=torch.int32, device=device),
        torch.zeros(shape[0], dtype=torch.int32, device=device),
    )  # fmt: skip
    rows = HeadRows(*(inputs[name].flatten(0, 1) for name in HeadRows._fields))
    return grow_tree(
        arch, _growth(outputs), rows, inputs.get("draft_to_target"), case["level"], offers, inputs.get("fixed")
    )


def _row_of(case: Case, inputs: Tensors, outputs: Tensors, row: int) -> Tensors:
    """The tree's own outputs; rows of the beam before are counted from its first one."""
    made = row_of(case, inputs, outputs, row)
    return {**made, "beam_rows": made["beam_rows"] - row * inputs["logits"].shape[1]}


def _cost(case: Case) -> Cost:
    words = mask_words(case["k"], case["levels"])
    return grow_tree_cost(case["batch"], case["k"], words, case["level"], case["columns"], case["maps"], case["fixed"])


_BF16 = torch.bfloat16
_TREE = {"k": 10, "levels": 8, "maps": True, "fixed": False, "dtype": _BF16}

CARD = Card(
    name="grow_tree",
    equation="score = parent's score + log p of its k likeliest; beam = the k best, equal ones by lower flat id",
    source="EAGLE-2, arXiv 2406.16858, section 4",
    example=_example,
    outputs=_outputs,
    reference=_reference,
    launches=_launches,
    cost=_cost,
    variants=lambda arch: [grow_tree_variant(arch, "bf16", 10, 32000, 3, maps=True)],
    slow_variants=lambda arch: [
        grow_tree_variant(arch, "f16", 8, 16, 1, maps=False),
        *(
            grow_tree_variant(arch, "bf16", k, columns, words, maps=maps, fixed=fixed)
            for k, columns, words, maps, fixed in (
                (1, 32000, 1, True, False), (4, 32000, 1, False, True), (10, 128256, 3, False, False),
                (16, 201088, 4, False, False), (16, 32000, 8, True, False),
            )
        ),
    ],
    cases=(
        {**_TREE, "batch": 2, "k": 3, "levels": 11, "level": 10, "columns": 208},
        {**_TREE, "batch": 1, "k": 3, "levels": 2, "level": 0, "columns": 2080, "maps": False},
        {**_TREE, "batch": 1, "k": 4, "levels": 3, "level": 2, "columns": 96, "fixed": True},
    ),
    slow_cases=(
        {"batch": 1, "k": 16, "levels": 4, "level": 3, "columns": 640, "maps": False, "fixed": True, "dtype": _BF16},
        {"batch": 2, "k": 1, "levels": 3, "level": 2, "columns": 48, "maps": True, "fixed": False, "dtype": _BF16},
        {"batch": 1, "k": 8, "levels": 3, "level": 1, "columns": 16, "maps": False, "fixed": False,
         "dtype": torch.float16},
        {**_TREE, "batch": 1, "level": 0, "columns": 65552},
    ),
    shapes=tuple(
        {**_TREE, "batch": batch, "level": level, "columns": columns}
        for batch, columns in ((1, 32000), (4, 32000), (1, 128256)) for level in (0, 4)
    ),
    hand_counts=(
        (
            {"batch": 2, "k": 3, "levels": 2, "level": 0, "columns": 1024, "maps": False, "fixed": False},
            Cost(2 * (512 + 96 + 3 * 12 + 3 * 20), 2 * (256 + 3)),
        ),
        (
            {"batch": 2, "k": 3, "levels": 2, "level": 1, "columns": 1024, "maps": True, "fixed": True},
            Cost(2 * (3 * (512 + 96 + 3 * 20) + 3 * 20 + 3 * 12), 2 * 3 * (256 + 3), 2),
        ),
    ),
    order={"powers": "16 columns where they are made; then dealt round 512 threads, butterfly, warps in order"},
    alone=alone("batch", "logits", "best", "powers", "fixed", *Growth._fields),
    row_of=_row_of,
    n_rows=count("batch"),
)  # fmt: skip
