"""Attention's example inputs, poisoned outputs, and one row of a case as a case of its own.

Unused rows and blocks of the cache are NaN and blocks lie in random order, so that a key read by mistake shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3core.kernels.attention.layout import BLOCK_SHIFT
from eagle3core.kernels.card import DTYPES, E4M3, Case, Tensors, poison
from eagle3core.kernels.tree.mask_words import pack_words

BLOCK = 1 << BLOCK_SHIFT
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def prefixes_of(case: Case) -> tuple[int, ...]:
    """Old keys of every sequence; a shape to measure gives `batch` equal lengths, the masked keys included."""
    return tuple(case["prefix"]) if "prefix" in case else (case["kv"] - masked_of(case),) * case["batch"]


def masked_of(case: Case) -> int:
    """Keys after the prefix: those that earlier passes left, then the new tokens."""
    return int(case.get("earlier", 0) + case["tokens"])


def further_words_of(case: Case) -> int:
    """Words of a row's mask, `words` of the case or as few as there can be; 0 where it has just those of the pass."""
    least = -(-masked_of(case) // 32)
    words = int(case.get("words", least))
    return words if case.get("earlier", 0) or words > least else 0


def scales_of(case: Case) -> tuple[float, float]:
    """Of keys and values in e4m3; 1 of others."""
    return (0.7, 1.3) if case.get("fp8") else (1.0, 1.0)


def attention_example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    """Fresh queries, a cache whose unused rows and blocks are NaN, random block order, a random tree.

    `tree` of a case: "chain", "random", or "none" (nobody sees a masked key). With `earlier` keys the tree has that
    many nodes more, and its last ones are the queries; `words` are those of a row's mask, more than it takes.
    """
    dtype, dim, tokens, prefixes = TORCH_DTYPES[case["dtype"]], case["dim"], case["tokens"], prefixes_of(case)
    earlier, masked = case.get("earlier", 0), masked_of(case)
    batch, width = len(prefixes), -(-(max(prefixes) + masked) // BLOCK) + 1
    lengths = [max(p + masked, 0) if p >= 0 else 0 for p in prefixes]
    used = [-(-n // BLOCK) for n in lengths]
    n_blocks = sum(used) + 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    def cached() -> Tensor:
        pages = normal(n_blocks, case["kv_heads"], BLOCK, dim)
        return pages.to(E4M3) if case.get("fp8") else pages

    order = torch.randperm(n_blocks, generator=generator, device=device).to(torch.int32)
    tables = torch.full((batch, width), -1, dtype=torch.int32, device=device)
    k, v = cached(), cached()
    first = 0
    for b, n in enumerate(lengths):
        own = order[first : first + used[b]]
        tables[b, : used[b]] = own
        first += used[b]
        if n % BLOCK:
            k[own[-1].long(), :, n % BLOCK :] = float("nan")
            v[own[-1].long(), :, n % BLOCK :] = float("nan")
    parents = _parents(case.get("tree", "random"), batch, masked, generator, device)
    mask, depth = (each[:, earlier:].contiguous() for each in _ancestors(parents))
    if case.get("tree") == "none":
        mask = torch.zeros_like(mask)
    prefix = torch.tensor(prefixes, dtype=torch.int32, device=device)
    room = max(0, 32 * further_words_of(case) - masked)
    inputs = {
        "q": normal(batch, tokens, case["heads"], dim), "k": k, "v": v, "tables": tables, "prefix": prefix,
        "mask": mask, "words": pack_words(torch.nn.functional.pad(mask, (0, room))),
        "positions": (prefix[:, None] + depth).to(torch.int32),
    }  # fmt: skip
    if case.get("sinks"):
        inputs["sinks"] = torch.randn(case["heads"], generator=generator, device=device) * 2
    return inputs


def _parents(tree: str, batch: int, nodes: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """`[B, N]` the parent of every node, before it; the root is its own."""
    index = torch.arange(nodes, device=device)
    if tree == "chain":
        return (index - 1).clamp_min(0).expand(batch, -1)
    random = torch.rand(batch, nodes, generator=generator, device=device)
    return (random * index).long()


def _ancestors(parents: Tensor) -> tuple[Tensor, Tensor]:
    """(mask `[B, N, N]`: node t sees itself and its ancestors; depth `[B, N]`)."""
    batch, nodes = parents.shape
    mask = torch.eye(nodes, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    for t in range(1, nodes):
        mask[:, t] |= mask[torch.arange(batch), parents[:, t]]
    return mask, mask.sum(-1) - 1


def attention_outputs(case: Case, inputs: Tensors) -> Tensors:
    """Poisoned outputs; the counters start at zero, since they are added to."""
    q = inputs["q"]
    made = {"out": poison(*q.shape, dtype=TORCH_DTYPES[case["dtype"]], device=q.device)}
    if case.get("counting"):
        made["counters"] = torch.zeros(4, dtype=torch.int32, device=q.device)
    return made


def attention_alone(case: Case, inputs: Tensors, row: int) -> tuple[Case, Tensors]:
    """Row `row` = (sequence, token). A chain's token alone is plain decode: the tokens before it are old keys.

    A tree's token keeps the tokens before it, since its ancestors do not lie next to the prefix: as rows of its pass,
    or, in a case with earlier rows, as further ones of those. With `paths` it is plain decode too.
    """
    b, t = divmod(row, case["tokens"])
    if case.get("paths"):
        return _decoded_alone(case, inputs, b, t)
    is_chain, earlier = case.get("tree") == "chain", case.get("earlier", 0)
    kept = 1 if is_chain or earlier else t + 1
    first = t + 1 - kept
    old = earlier + first if is_chain else 0  # masked keys that become old ones
    prefix = inputs["prefix"][b : b + 1].clone()
    prefix += old * (prefix >= 0)  # an empty slot stays one
    mask = inputs["mask"][b : b + 1, first : t + 1, old : earlier + t + 1].clone()
    single = {
        **inputs, "q": inputs["q"][b : b + 1, first : t + 1].clone(), "tables": inputs["tables"][b : b + 1].clone(),
        "prefix": prefix, "mask": mask, "words": pack_words(mask),
        "positions": inputs["positions"][b : b + 1, first : t + 1].clone(),
    }  # fmt: skip
    others = {key: value for key, value in case.items() if key not in ("counting", "kv", "batch", "earlier", "words")}
    if mask.shape[2] > kept:
        others["earlier"] = mask.shape[2] - kept
    return {**others, "tokens": kept, "prefix": (int(prefix),), "shown": kept - 1}, single


def path_len_of(case: Case, inputs: Tensors) -> int:
    """Tokens of the longest path, where rows add their ancestors as plain decode does; else 0."""
    return int(inputs["mask"].sum(-1).max()) if case.get("paths") else 0


def _decoded_alone(case: Case, inputs: Tensors, b: int, t: int) -> tuple[Case, Tensors]:
    """Token t after its ancestors, which are old keys, in a cache where they lie next to the prefix."""
    table, prefix = inputs["tables"][b], int(inputs["prefix"][b])
    mask = inputs["mask"][b, t]
    k, v, depth = inputs["k"].clone(), inputs["v"].clone(), 0
    for node in mask.nonzero().flatten().tolist() if prefix >= 0 else ():
        (to, to_row), (of, of_row) = (divmod(prefix + n, BLOCK) for n in (depth, node))
        for cache, source in ((k, inputs["k"]), (v, inputs["v"])):
            cache[table[to].long(), :, to_row] = source[table[of].long(), :, of_row]
        depth += 1
    own = torch.ones(1, 1, 1, dtype=torch.bool, device=mask.device)
    length = inputs["prefix"][b : b + 1] + max(depth - 1, 0)
    single = {
        **inputs, "q": inputs["q"][b : b + 1, t : t + 1].clone(), "k": k, "v": v, "tables": table[None].clone(),
        "prefix": length, "mask": own, "words": pack_words(own), "positions": length[:, None].clone(),
    }  # fmt: skip
    others = {key: value for key, value in case.items() if key not in ("counting", "kv", "batch", "paths")}
    return {**others, "tree": "chain", "tokens": 1, "prefix": (int(length),), "shown": 0}, single


def attention_row_of(case: Case, inputs: Tensors, outputs: Tensors, row: int) -> Tensors:
    """`[H, D]` of one query token."""
    b, t = divmod(row, case["tokens"])
    return {"out": outputs["out"][b, case.get("shown", t)]}
