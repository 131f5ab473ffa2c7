"""What the router leaves: logits, choice and shares; and for the kernels of the maps, which rows go to which expert.

Source: derived here.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3core.kernels.experts.seats import new_seats


class Routed(NamedTuple):
    """What the router leaves: `logits: [n, X]`, `chosen: [n, k]` int32 ascending, `shares: [n, k]` of the sum.

    Logits and shares are one precision up from 16-bit rows.
    """

    logits: Tensor
    chosen: Tensor
    shares: Tensor


class Lists(NamedTuple):
    """Work for the experts' maps, of n rows that have k experts each.

    Attributes:
        norms: `[n]` fp32, 1 / rms of the rows.
        groups: `[1 + n k, 4]` int32: how many groups there are, then (expert, first place, rows) of each, experts
            ascending. places: `[n k]` int32, row * k + which of its experts, by expert and row.
        seats: where blocks of the maps count, see `seats`.
        group_rows: rows of a group at most, a power of two.
    """

    norms: Tensor
    groups: Tensor
    places: Tensor
    seats: Tensor
    group_rows: int


def lists_of(chosen: Tensor, group_rows: int) -> tuple[Tensor, Tensor]:
    """(groups, places) of `chosen: [n, k]`, as `Lists` has them; what no group takes is zero."""
    flat = chosen.flatten()
    places = flat.long().sort(stable=True).indices.int()
    groups = torch.zeros(1 + len(flat), 4, dtype=torch.int32, device=chosen.device)
    n_groups = first = 0
    for expert, rows in sorted(Counter(flat.tolist()).items()):
        for at in range(0, rows, group_rows):
            n_groups += 1
            groups[n_groups, :3] = torch.tensor([expert, first + at, min(group_rows, rows - at)])
        first += rows
    groups[0, 0] = n_groups
    return groups, places


def new_lists(n: int, n_chosen: int, device: torch.device) -> Lists:
    """Room for the lists of up to n rows; each pass has groups of its own size (`group_rows` is 1 here)."""
    groups = torch.zeros(1 + n * n_chosen, 4, dtype=torch.int32, device=device)
    places = torch.zeros(n * n_chosen, dtype=torch.int32, device=device)
    return Lists(torch.zeros(n, dtype=torch.float32, device=device), groups, places, new_seats(device), 1)
