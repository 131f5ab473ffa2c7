"""A head that chooses among fewer tokens: the rows of those it keeps, and the map to their ids.

Nothing else of the head changes, so what it thinks of a token it keeps is the same to the bit. Verification knows
every token, and so the output of greedy decoding stays what it was; only acceptance can change.
Source: FR-Spec (arXiv 2502.14856), section 3; docs/requirements.md R-93, R-94, R-97.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from eagle3core.checkpoint.plan import HEAD
from eagle3core.checkpoint.writing.head import Head
from eagle3core.errors import CheckpointError


def cut_head(head: Head, kept: Sequence[int]) -> Head:
    """The head with the rows of some target ids alone, ascending.

    Args:
        head: with an output head of its own. kept: target ids, in any order.

    Raises:
        CheckpointError: no id, one named twice, or one that the head does not choose among.
    """
    ids, vocab = torch.tensor(sorted(kept), dtype=torch.int64), head.geometry.vocab_size
    own = head.draft_to_target if head.draft_to_target is not None else torch.arange(head.geometry.draft_vocab_size)
    what = ""
    if not len(ids):
        what = "no id is kept"
    elif len(twice := ids[:-1][ids[1:] == ids[:-1]]):
        what = f"{int(twice[0])} is kept twice"
    elif bool((missing := ~torch.isin(ids, own)).any()):
        what = f"{int(missing.sum())} kept ids are none of the draft's own, the first {int(ids[missing][0])}"
    if what:
        raise CheckpointError(
            what, f"target ids among the {len(own)} that the draft chooses among, each once", "correct the list of ids"
        )
    row_of = torch.full((vocab,), -1).index_copy_(0, own, torch.arange(len(own)))
    weights = {**head.weights, HEAD: head.weights[HEAD][row_of[ids]].contiguous()}
    # All ids of the target in order are no map: both vocabularies are one.
    mapping = None if len(ids) == vocab else ids
    return replace(
        head, geometry=replace(head.geometry, draft_vocab_size=len(ids)), weights=weights, draft_to_target=mapping
    )
