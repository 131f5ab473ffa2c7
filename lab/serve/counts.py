"""What a server has done so far, as Prometheus reads it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from eagle3core import Response


@dataclass
class Counts:
    """Sums over all requests that have ended.

    Attributes:
        ended: requests by how they ended: a response's finish reason.
        refused: requests that got no place.
    """

    ended: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def add(self, response: Response) -> None:
        """Count a request that has ended."""
        self.ended[response.finish_reason] += 1
        self.prompt_tokens += response.n_prompt_tokens
        self.generated_tokens += len(response.token_ids)
        for step in response.req_metrics.steps:
            self.steps += 1
            self.drafted_tokens += step.n_draft
            self.accepted_tokens += step.n_accepted


class Now(NamedTuple):
    """What an engine is, and what it holds at this moment.

    Attributes:
        path: what computes: `kernels` or `torch`. slots: requests that can be decoded together.
        running, waiting: requests.
        blocks: of the cache; held by requests; kept: held by nobody, for what is in them.
        put_back, found_tokens: so far, of `CacheCounts`. plain_answers: so far, of `ChatAnswers`.
    """

    path: str
    slots: int
    running: int
    waiting: int
    blocks: int
    held: int
    kept: int
    put_back: int
    found_tokens: int
    plain_answers: int


def prometheus(counts: Counts, now: Now) -> str:
    """Gauges and counters in the text form of Prometheus, version 0.0.4."""
    lines: list[str] = []

    def told(name: str, kind: str, help: str, values: dict[str, int]) -> None:
        lines.extend([f"# HELP eagle3_{name} {help}", f"# TYPE eagle3_{name} {kind}"])
        lines.extend(f"eagle3_{name}{labels} {value}" for labels, value in values.items())

    told("engine_info", "gauge", "What computes, in the label.", {f'{{path="{now.path}"}}': 1})
    told("slots", "gauge", "Requests that can be decoded together.", {"": now.slots})
    told("requests_running", "gauge", "Requests that are read or decoded.", {"": now.running})
    told("requests_waiting", "gauge", "Requests that wait for a slot.", {"": now.waiting})
    told("cache_blocks", "gauge", "Blocks of the cache.", {"": now.blocks})
    told("cache_blocks_held", "gauge", "Blocks that requests hold.", {"": now.held})
    told("cache_blocks_kept", "gauge", "Blocks that nobody holds, kept for what is in them.", {"": now.kept})
    told("requests_put_back_total", "counter", "Requests put back as blocks ran out.", {"": now.put_back})
    told("found_tokens_total", "counter", "Tokens not read, as their blocks were kept.", {"": now.found_tokens})
    ended = {f'{{reason="{reason}"}}': n for reason, n in sorted(counts.ended.items())}
    told("requests_total", "counter", "Requests that ended, by reason.", ended)
    told("requests_refused_total", "counter", "Requests that found no place to wait.", {"": counts.refused})
    told("chat_answers_broken_total", "counter", "Answers that broke their chat format.", {"": now.plain_answers})
    told("prompt_tokens_total", "counter", "Tokens of the prompts of ended requests.", {"": counts.prompt_tokens})
    told("generated_tokens_total", "counter", "Tokens of their answers.", {"": counts.generated_tokens})
    told("steps_total", "counter", "Speculative steps of ended requests.", {"": counts.steps})
    told("drafted_tokens_total", "counter", "Tokens drafted in them.", {"": counts.drafted_tokens})
    told("accepted_tokens_total", "counter", "Drafted tokens accepted in them.", {"": counts.accepted_tokens})
    return "\n".join(lines) + "\n"
