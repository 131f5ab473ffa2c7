"""Drafts that the host gives: written where the step's program looks for the tokens of its nodes, before it runs.

The copy is enqueued in the order of the stream, so it comes after the step before and before the one it is for. Its
source is written again by the host only when the results of that step have been read, hence after the copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from eagle3core.errors import InvariantViolated
from eagle3core.step.buffers import rows_of
from eagle3core.step.results import ResultQueue

NO_TOKEN = -1  # of a node without a draft: its row embeds as zeros, and the target never chooses it


class GivenDrafts:
    """Tokens of the nodes behind the root, from the host to the device.

    Args:
        drafted: `[n_nodes * S]` int32 on the device, of which a step of B rows reads `[n_nodes, B]`, the roots first.
        n_nodes: of the tree, the root included. results: of the steps.
    """

    def __init__(self, drafted: Tensor, n_nodes: int, results: ResultQueue) -> None:
        self._drafted, self._n_nodes, self._results = drafted, n_nodes, results
        self._host = torch.empty(drafted.shape, dtype=torch.int32, pin_memory=drafted.device.type == "cuda")

    def write(self, drafts: Mapping[int, Sequence[int]], batch: int) -> None:
        """Drafts by slot for a step of `batch` rows; nodes that get none, and rows past the slots', hold no token.

        Raises:
            InvariantViolated: results are under way, so that the newest tokens are not known, nor the last copy's end.
        """
        if self._results:
            raise InvariantViolated(
                f"drafts were given with {len(self._results)} results under way",
                "drafts that follow the newest tokens",
                "make the runner with n_behind=0, and collect after every step",
            )
        n = self._n_nodes - 1
        rows = [drafts[slot] for slot in sorted(drafts)]  # as a step orders its slots
        host = rows_of(self._host, n, batch)
        padded = [[*row[:n], *[NO_TOKEN] * (n - len(row))] for row in rows]
        padded += [[NO_TOKEN] * n] * (batch - len(rows))
        host.copy_(torch.tensor(padded, dtype=torch.int32).T)
        rows_of(self._drafted, n + 1, batch)[1:].copy_(host, non_blocking=True)
