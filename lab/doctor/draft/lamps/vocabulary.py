"""Whether the draft's ids mean the right target ids: what the stored tables could mean, and what the logits say.

A map that is lost can be found again: where a row of the draft's head and a row of the target's stand for one token,
their logits rise and fall together over a text. Source: docs/checkpoints.md (maps that have been published); the
recovery is derived here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3core.errors import CheckpointError
from lab.doctor.draft.alternatives import Alternative, judge
from lab.doctor.draft.case import Case
from lab.doctor.draft.forward import all_logits, propose
from lab.doctor.draft.lamp import Finding, Repair

NAME, MAP, MASK = "vocabulary_map", "d2t", "t2d"
BY_LOGITS = "the ids that the head's logits stand for"
ASKED = f"offsets, absolute ids, the ids that t2d marks, none, and {BY_LOGITS}"
# Of a map that is another head's nearly no row is right by chance; ids in no order ascend in half of all neighbours.
LEAST_RIGHT, MOST_ORDER = 0.1, 0.75
LEAST_ROWS, MOST_ROWS, MOST_PRODUCTS = 256, 2048, 2e12  # rows of text that logits are compared over
_STORE = "store offsets in d2t, target_id = draft_id + d2t[draft_id]"


def look_at_map(case: Case) -> Finding:
    """By the files alone where nothing may be run; else by what each possible map accepts."""
    n, vocab = case.reading.geometry.draft_vocab_size, case.reading.geometry.vocab_size
    if case.reading.is_eagle1 or (n == vocab and MAP not in case.stored):
        return Finding(NAME, "green", "draft and target share one vocabulary, and no map is stored")
    refused = [error for error in case.refusals if MAP in str(error) or MASK in str(error)]
    if not case.prompts:
        return _by_files(case, refused)
    readings = map_readings(case)
    judged = judge(case, NAME, ASKED, readings, by_length=True)
    found = next((each.reading.draft_to_target for each in readings if each.name == BY_LOGITS), None)
    if judged.mended is None or found is None or judged.mended.draft_to_target is not found:
        return judged
    why = _without_order(case, found)
    return judged if why is None else Finding(NAME, "unknown", f"{judged.said}; but {why}", values=judged.values)


def _without_order(case: Case, found: Tensor) -> str | None:
    """Why a map that was found again is none that a file could have lost; None where it may be.

    Maps are written in ascending order, and what spoils one spoils it in some order too: from a row on, or as a whole.
    Ids that are right for many rows, and for the others in no order, are those that the head drafts for want of better.
    """
    own = case.reading.draft_to_target
    if own is None or not torch.equal(own, own.sort().values):
        return None
    rows = torch.isin(own, propose(case.reading, case.text, 1)).nonzero().flatten()
    differ = rows[found.to(own.device)[rows] != own[rows]]
    n_right = len(rows) - len(differ)
    if n_right < LEAST_RIGHT * len(rows) or len(differ) < 2:
        return None
    ascending = float((found.to(own.device)[differ].diff() > 0).double().mean())
    if ascending > MOST_ORDER:
        return None
    return (
        f"the stored ids are right for {n_right} of the {len(rows)} rows that it drafts, and the others' better ids "
        "are in no order: the head drafts so, or single rows were exchanged; no map is lost so"
    )


def map_readings(case: Case) -> list[Alternative]:
    """The head with every map that its tables could mean, and with the one that its logits stand for."""
    own = case.reading.draft_to_target
    marked = "the ids that t2d marks"
    names = {
        "offsets": ("d2t as offsets", _STORE),
        "absolute": ("d2t as absolute ids", f"{_STORE}: the file holds absolute ids, so subtract 0, 1, 2 ..."),
        "mask": (marked, f"{_STORE}, made of {marked}"),
        "none": ("draft ids as target ids", f"{_STORE}: zeros"),
    }
    maps = stored_maps(case)
    made = [
        Alternative(f"{names[kind][0]}", names[kind][1], case.reading.with_map(ids))
        for kind, ids in maps.items()
        if own is None or not torch.equal(ids.to(own.device), own)
    ]
    if case.reading.geometry.draft_vocab_size < case.reading.geometry.vocab_size:
        found = recovered_map(case)
        change = "replace d2t by that of this head's own export (its logits say which ids the rows stand for)"
        made.append(Alternative(BY_LOGITS, change, case.reading.with_map(found)))
    return made


def stored_maps(case: Case) -> dict[str, Tensor]:
    """Absolute ids `[Vd]` that the stored tables could mean, by what they would then hold; unusable ones left out."""
    n, vocab = case.reading.geometry.draft_vocab_size, case.reading.geometry.vocab_size
    rows = torch.arange(n)
    maps = {"none": rows}
    if MAP in case.stored and len(case.stored[MAP]) == n:
        stored = case.stored[MAP].long()
        maps |= {"offsets": rows + stored, "absolute": stored}
    if MASK in case.stored:
        marked = (case.stored[MASK] != 0).nonzero().flatten()
        maps |= {"mask": marked} if len(marked) == n else {}
    return {kind: ids for kind, ids in maps.items() if _are_ids(ids, vocab)}


def _are_ids(ids: Tensor, vocab: int) -> bool:
    return int(ids.min()) >= 0 and int(ids.max()) < vocab and len(set(ids.tolist())) == len(ids)


@torch.no_grad()
def recovered_map(case: Case) -> Tensor:
    """`[Vd]` int64: of every row of the draft's head, the target id whose logit goes with the row's over the text."""
    text, n, vocab = case.text, case.reading.geometry.draft_vocab_size, case.reading.geometry.vocab_size
    rows = int(min(max(MOST_PRODUCTS / (n * vocab), LEAST_ROWS), MOST_ROWS, len(text.tokens) - 1))
    at = torch.linspace(0, len(text.tokens) - 2, rows, device=text.tokens.device).long()
    # Row r of the head's own pass reads token r + 1, so it speaks of what the target says after row r + 1.
    drafted = _standardised(all_logits(case.reading, text, at))
    said = _standardised(text.normed[at + 1] @ text.head.T)
    together = torch.cat([part.T @ said for part in torch.split(drafted, 4096, dim=1)]) / rows
    return _distinct(together)


def _standardised(logits: Tensor) -> Tensor:
    centred = logits - logits.mean(dim=1, keepdim=True)
    centred = centred - centred.mean(dim=0)
    spread: Tensor = centred.std(dim=0).clamp(min=1e-9)
    return centred / spread


def _distinct(together: Tensor) -> Tensor:
    """`[Vd]` the best id of each row of `together: [Vd, V]`, each id once: the surest rows choose first."""
    best = together.max(dim=1)
    taken, chosen = set[int](), torch.full((len(together),), -1)
    for row in best.values.argsort(descending=True).tolist():
        choice = int(best.indices[row])
        if choice in taken:
            ranked = together[row].argsort(descending=True).tolist()
            choice = next(each for each in ranked if each not in taken)
        taken.add(choice)
        chosen[row] = choice
    return chosen


def _by_files(case: Case, refused: list[CheckpointError]) -> Finding:
    """Without running anything: what the engine's own proof of the map says."""
    if refused:
        return Finding(
            NAME, "red", refused[0].what, Repair(f"{_STORE}, as this head's own export has them"), weight=1.0
        )
    decided = [each.evidence for each in case.reading.geometry.decisions if each.about == "vocabulary"]
    if MASK in case.stored:
        return Finding(NAME, "green", f"the map is proven: {decided[0] if decided else 'one vocabulary'}")
    return Finding(NAME, "unknown", "no t2d proves the map; what its ids accept needs prompts")
