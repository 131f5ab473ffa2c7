"""The draft's vocabulary: which target id each row of its logits stands for, and the proof that the map says so.

`d2t` holds offsets, `target_id = row + d2t[row]`; tables of absolute ids, of 0, 1, 2 ... and of zeros that were never
filled have all been published, load without a word and draft almost nothing. Where the mask `t2d` is stored it proves
the map; without it, offsets are told from ids by their order. Source: docs/checkpoints.md; derived here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3core.checkpoint.tensors import NamedTensors
from eagle3core.errors import CheckpointError
from eagle3core.geometry import Decision, DraftGeometry

MAP, MASK = "d2t", "t2d"
# Rows from which a table without two equal neighbours is taken for ids: two neighbouring ids of the target, both kept,
# make equal offsets, and of a real vocabulary's thousands some are.
LEAST_ROWS = 32
_OFFSETS = "store offsets, not absolute ids: target_id = draft_id + d2t[draft_id]"


def read_map(
    files: NamedTensors, stored_as: dict[str, str], geometry: DraftGeometry, ends: tuple[int, ...] = ()
) -> tuple[Tensor | None, list[Decision]]:
    """Absolute target ids `[Vd]` int64, None where both vocabularies are one; and what is worth saying of them.

    Raises:
        CheckpointError: wrong shape or dtype, an id outside the target's vocabulary or named twice, a map that its mask
            contradicts, or one that holds no offsets.
    """
    n, vocab = geometry.draft_vocab_size, geometry.vocab_size
    mask = _read_mask(files, stored_as, geometry) if MASK in stored_as else None
    if MAP not in stored_as:
        return None, []
    name = stored_as[MAP]
    offsets, where = files.read(name), files.where(name)
    if tuple(offsets.shape) != (n,) or offsets.dtype not in (torch.int64, torch.int32):
        raise CheckpointError(
            f"{where} has shape {list(offsets.shape)} and dtype {str(offsets.dtype).removeprefix('torch.')}",
            f"[{n}] (draft_vocab_size) of int64 or int32",
            "pair the map with its own config.json",
        )
    offsets = offsets.to(torch.int64)
    ids = torch.arange(n) + offsets
    if n == vocab and not bool(offsets.any()):
        return None, []
    _require_ids(where, ids, offsets, vocab)
    evidence = _proof(where, ids, offsets, mask, vocab)
    said = [Decision("vocabulary", f"{n} of {vocab} target ids, from offsets", evidence)]
    absent = sorted(set(ends) - set(ids.tolist()))
    if absent:
        said.append(Decision("end tokens", "never drafted", f"the draft vocabulary lacks the target's {absent}"))
    return ids, said


def _read_mask(files: NamedTensors, stored_as: dict[str, str], geometry: DraftGeometry) -> Tensor:
    name = stored_as[MASK]
    mask = files.read(name)
    if tuple(mask.shape) != (geometry.vocab_size,) or mask.dtype.is_floating_point:
        raise CheckpointError(
            f"{files.where(name)} has shape {list(mask.shape)} and dtype {str(mask.dtype).removeprefix('torch.')}",
            f"[{geometry.vocab_size}] (the target's vocabulary) of bool",
            "pair the mask with its own config.json, or remove it",
        )
    return mask != 0


def _require_ids(where: str, ids: Tensor, offsets: Tensor, vocab: int) -> None:
    """Every id is one of the target's, and none is named twice."""
    outside = ((ids < 0) | (ids >= vocab)).nonzero().flatten()
    if len(outside):
        row = int(outside[0])
        raise CheckpointError(
            f"{where} maps {len(outside)} draft ids outside the target's vocabulary, first {row} -> {int(ids[row])} "
            f"(offset {int(offsets[row])}){_mistaken(offsets, vocab)}",
            f"target ids from 0 to {vocab - 1}",
            "pair the draft with its own target; d2t holds offsets, target_id = draft_id + d2t[draft_id]",
        )
    order = ids.sort(stable=True)
    twice = (order.values[1:] == order.values[:-1]).nonzero().flatten()
    if len(twice):
        at = int(twice[0])
        first, second = int(order.indices[at]), int(order.indices[at + 1])
        raise CheckpointError(
            f"{where} maps draft ids {first} and {second} to {int(order.values[at])} both{_mistaken(offsets, vocab)}",
            "every target id once",
            _OFFSETS,
        )


def _proof(where: str, ids: Tensor, offsets: Tensor, mask: Tensor | None, vocab: int) -> str:
    """Why the map is taken for what it says.

    Raises:
        CheckpointError: the mask contradicts it, or it can be no table of offsets.
    """
    n = len(ids)
    if mask is not None:
        n_kept, n_hit = int(mask.sum()), int(mask[ids].sum())
        if n_kept == n and n_hit == n:
            return "t2d marks the very ids"
        raise CheckpointError(
            f"{where} maps {n_hit} of {n} draft ids to ids that t2d marks, and t2d marks {n_kept}"
            f"{_mistaken(offsets, vocab, mask)}",
            f"a map to the {n} ids that t2d marks",
            _OFFSETS,
        )
    if n >= LEAST_ROWS and bool((offsets[1:] > offsets[:-1]).all()):
        raise CheckpointError(
            f"{where} ascends over all {n} rows{_mistaken(offsets, vocab)}",
            "offsets: they repeat wherever two neighbouring target ids are both kept",
            _OFFSETS,
        )
    return "offsets repeat, as ids would not, and there is no t2d to prove more" if n > 1 else "there is but one"


def _mistaken(offsets: Tensor, vocab: int, mask: Tensor | None = None) -> str:
    """What a table that cannot be right looks like, with the words that introduce it; empty if like nothing known."""
    n = len(offsets)
    in_range = bool(((offsets >= 0) & (offsets < vocab)).all())
    if bool((offsets == torch.arange(n)).all()) and n > 1:
        return ": it holds 0, 1, 2 ..., a default that was never filled"
    if not bool(offsets.any()):
        return ": it holds zeros, a map that was never loaded"
    if in_range and mask is not None and bool(mask[offsets].all()) and len(set(offsets.tolist())) == n:
        return ": it holds absolute ids"
    if in_range and mask is None and bool((offsets[1:] > offsets[:-1]).all()):
        return ": it holds absolute ids"
    return ": it is another head's" if mask is not None else ""
