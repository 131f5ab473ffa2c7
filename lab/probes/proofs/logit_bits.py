"""The bits of the logits that chose each token, slot by slot, in any company and at any depth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from eagle3core.step import DeviceState
from eagle3core.trace import Trace


class LogitBits(Trace):
    """Keeps, of every step, the rows of logits that the slot's committed tokens were chosen from.

    Attributes:
        rows: a `[tokens, V]` int16 list a slot, on the CPU; rows past a slot's end may follow and mean nothing.
        state: of the runner that is traced; set before the first request.
    """

    is_detailed = True

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        self.rows: dict[int, list[Tensor]] = defaultdict(list)
        self.state: DeviceState | None = None
        self._last, self._in_step = torch.empty(0), False

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        self._in_step = name.startswith("step") or (self._in_step and name != "prefill")
        if name == "prefill":
            self._last = torch.empty(0)
        yield
        if name == "prefill":  # no row where steps follow before a prompt's end
            for logits, (slot, *_) in zip(self._last[:, None], self._state.last_results(), strict=False):
                self._keep(slot, logits)
        elif name.startswith("step"):
            sizes = self._state.sizes
            by_row = self._last.view(-1, sizes.nodes, self._last.shape[1])
            paths = self._state.last_paths(len(by_row)).long()
            for logits, path, (slot, n_accepted, *_) in zip(by_row, paths, self._state.last_results(), strict=False):
                if slot >= 0:
                    self._keep(slot, logits[path[: n_accepted + 1]])

    def tap(self, name: str, value: Tensor, valid: Tensor | None = None) -> None:
        if name == "target.head":  # of a step all rows, of prompts' ends those that are there
            self._last = value[0] if self._in_step or valid is None else value[valid]

    def bits(self, slot: int, n_tokens: int) -> Tensor:
        """`[n_tokens, V]` int16 of a slot's first tokens."""
        return torch.cat(self.rows[slot])[:n_tokens]

    @property
    def _state(self) -> DeviceState:
        assert self.state is not None, "the traced runner's state is set before the first request"
        return self.state

    def _keep(self, slot: int, logits: Tensor) -> None:
        self.rows[slot].append(logits[:, : self.n_vocab].to("cpu", copy=True).contiguous().view(torch.int16))
