"""Drafts that are looked up: for every running request what its own text, prompt and output, proposes to go on with.

Asked once before each step. Who runs is the book's to know: a look-up is made when its request is first seen running,
gets the tokens that are new since, and is dropped when its request no longer runs. Source: docs/requirements.md R-02.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from eagle3core.lookup import LOOKUPS, Lookup
from eagle3core.request import Request
from eagle3core.speculative import SpeculativeConfig
from eagle3core.step.results import NO_TOKEN
from eagle3core.step.run import DeviceRunner


class Proposals:
    """The look-ups of the requests that run; nothing at all where drafts are not looked up.

    Args:
        spec: the settings of drafts, or None for plain decoding.
    """

    def __init__(self, spec: SpeculativeConfig | None) -> None:
        self._make: Callable[[], Lookup] | None = None if spec is None else LOOKUPS.get(spec.method)
        self._n = 0 if spec is None else spec.num_speculative_tokens
        self._lookups: dict[int, Lookup] = {}  # by request id
        self._known: dict[int, int] = {}  # generated tokens that a look-up has, its prompt being known

    def write(self, runner: DeviceRunner, running: Mapping[int, Request]) -> None:
        """Give the runner the drafts of its next step, whose requests are `running`, by id.

        Raises:
            InvariantViolated: the runner has results that nobody has read, so that newer tokens are not known.
        """
        if self._make is None:
            return
        for ended in self._lookups.keys() - running.keys():
            del self._lookups[ended], self._known[ended]
        drafts = {request.slot: self._extended(request, self._make).propose(self._n) for request in running.values()}
        runner.write_drafts(drafts)

    def made_of(self, drafts: list[int], most: int | None) -> list[int]:
        """Of a step's drafts those that were proposed and used; a look-up that found less, and a request that uses
        `most` on a path, left the rest without a token."""
        if self._make is None and most is None:
            return drafts
        return [token for token in drafts if token != NO_TOKEN]

    def forget(self) -> None:
        """Drop every look-up, since nothing runs."""
        self._lookups.clear()
        self._known.clear()

    def _extended(self, request: Request, make: Callable[[], Lookup]) -> Lookup:
        """The look-up of a request, up to its newest token."""
        if request.id not in self._lookups:
            self._lookups[request.id] = make()
            self._lookups[request.id].extend(request.prompt)
            self._known[request.id] = 0
        lookup, n_known = self._lookups[request.id], self._known[request.id]
        lookup.extend(request.token_ids[n_known:])
        self._known[request.id] = len(request.token_ids)
        return lookup
