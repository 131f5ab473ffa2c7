"""What a server has done so far, as Prometheus reads it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

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


def prometheus(counts: Counts, *, running: int, waiting: int, slots: int) -> str:
    """Gauges and counters in the text form of Prometheus, version 0.0.4."""
    lines: list[str] = []

    def told(name: str, kind: str, help: str, values: dict[str, int]) -> None:
        lines.extend([f"# HELP eagle3_{name} {help}", f"# TYPE eagle3_{name} {kind}"])
        lines.extend(f"eagle3_{name}{labels} {value}" for labels, value in values.items())

    told("slots", "gauge", "Requests that can be decoded together.", {"": slots})
    told("requests_running", "gauge", "Requests that are read or decoded.", {"": running})
    told("requests_waiting", "gauge", "Requests that wait for a slot.", {"": waiting})
    ended = {f'{{reason="{reason}"}}': n for reason, n in sorted(counts.ended.items())}
    told("requests_total", "counter", "Requests that ended, by reason.", ended)
    told("requests_refused_total", "counter", "Requests that found no place to wait.", {"": counts.refused})
    told("prompt_tokens_total", "counter", "Tokens of the prompts of ended requests.", {"": counts.prompt_tokens})
    told("generated_tokens_total", "counter", "Tokens of their answers.", {"": counts.generated_tokens})
    told("steps_total", "counter", "Speculative steps of ended requests.", {"": counts.steps})
    told("drafted_tokens_total", "counter", "Tokens drafted in them.", {"": counts.drafted_tokens})
    told("accepted_tokens_total", "counter", "Drafted tokens accepted in them.", {"": counts.accepted_tokens})
    return "\n".join(lines) + "\n"
