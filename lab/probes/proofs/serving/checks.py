"""What has to hold of a server under load: answers, blocks of those who left, refusals, and its end.

Source: docs/serve.md; the greedy answers of plain decoding, one request at a time, as in `proofs.identity`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

from lab.probes.proofs.check import Check, Verdict
from lab.probes.proofs.serving.load import HELD, Load, run_load
from lab.probes.proofs.serving.plan import ServingPlan

PART = "serving"


@dataclass
class Serving:
    """Checks of one run, which the first of them makes.

    Args:
        run: gives what came of a plan.
    """

    plan: ServingPlan
    run: Callable[[ServingPlan], Load] = field(default=run_load)

    def checks(self) -> list[Check]:
        """All of them; the end is the last."""
        judges: dict[str, Callable[[Load], Verdict]] = {
            "every answer is the offline one": partial(judge_answers, path=self.plan.path),
            "who leaves frees its blocks": judge_blocks,
            "bad requests are refused": judge_refusals,
            "the server ends in order": judge_end,
        }
        plan = self.plan
        shared = {"pair": "shipped", "clients": plan.clients, "seconds": plan.seconds, "spec_k": plan.k,
                  "slots": plan.slots, "dtype": plan.dtype}  # fmt: skip
        return [Check(PART, name, shared, partial(self._judge, judge)) for name, judge in judges.items()]

    def _judge(self, judge: Callable[[Load], Verdict]) -> Verdict:
        return judge(self.load)

    @cached_property
    def load(self) -> Load:
        """What came of the run."""
        return self.run(self.plan)


def judge_answers(load: Load, path: str) -> Verdict:
    """Whether no request failed, and every answer is the offline one of an engine that drafts, computing by `path`."""
    tally, first = load.tally, sorted(load.tally.first_s)
    values = {
        "n_requests": tally.n_answers + tally.n_left + len(tally.errors), "n_answers": tally.n_answers,
        "n_tokens": tally.n_tokens, "n_errors": len(tally.errors), "n_differing": len(tally.differing),
        "first_text_p50_s": at_share(first, 0.5), "first_text_p99_s": at_share(first, 0.99),
        "tokens_per_s": tally.n_tokens / load.seconds, "seconds": load.seconds,
        "n_steps": load.figure("steps_total"), "n_accepted": load.figure("accepted_tokens_total"),
        "n_found_tokens": load.figure("found_tokens_total"), "n_put_back": load.figure("requests_put_back_total"),
    }  # fmt: skip
    detail = (
        f"{tally.n_answers} answers, {tally.n_tokens} tokens, {len(tally.errors)} errors, {len(tally.differing)} differ"
        f"; first text p50 {values['first_text_p50_s']:.3f} s, p99 {values['first_text_p99_s']:.3f} s, "
        f"{values['tokens_per_s']:.0f} tokens/s"
    )
    wrong = [*tally.errors[:1], *tally.differing[:1]]
    if wrong:
        return Verdict(False, "; ".join([detail, *wrong]), values)
    if not load.figure(f'engine_info{{path="{path}"}}'):
        return Verdict(False, f"{detail}; the server does not compute by {path}", values)
    if not (tally.n_answers and values["n_accepted"]):
        return Verdict(None, f"{detail}; nothing was answered, or no draft accepted", values)
    return Verdict(True, detail, values)


def judge_blocks(load: Load) -> Verdict:
    """Whether clients left, blocks were held, and none is once all have left."""
    held, n_cancelled = load.figure(HELD), load.figure('requests_total{reason="cancelled"}')
    in_it = load.figure("requests_running") + load.figure("requests_waiting")
    values = {"n_left": load.tally.n_left, "n_cancelled": n_cancelled, "most_held": load.most_held,
              "held_after": held, "n_requests_after": in_it, "n_blocks": load.figure("cache_blocks"),
              "kept_after": load.figure("cache_blocks_kept")}  # fmt: skip
    detail = (
        f"{load.tally.n_left} streams were left, {n_cancelled} of them under way; at most {load.most_held} of "
        f"{values['n_blocks']} blocks held, {held} after all had left, with {in_it} requests"
    )
    if held or in_it:
        return Verdict(False, detail, values)
    return Verdict(True if n_cancelled and load.most_held else None, detail, values)


def judge_refusals(load: Load) -> Verdict:
    """Whether every bad request got its 4xx in three parts."""
    n, wrong = load.tally.n_refused, load.tally.not_refused
    values, detail = {"n_refused": n, "n_not_refused": len(wrong)}, f"{n} refused in three parts, {len(wrong)} not"
    if wrong:
        return Verdict(False, f"{detail}: {wrong[0]}", values)
    return Verdict(True if n else None, detail, values)


def judge_end(load: Load) -> Verdict:
    """Whether the signal ended the server with code 0, and it told of no error."""
    lines = load.log.strip().splitlines()
    detail = f"exit code {'none: it was killed' if load.code is None else load.code}, {len(lines)} lines in its log"
    is_clean = load.code == 0 and "Traceback" not in load.log
    return Verdict(is_clean, "; ".join([detail, *lines[-1:]]), {"code": load.code, "n_log_lines": len(lines)})


def at_share(ordered: list[float], share: float) -> float:
    """The value that `share` of ordered ones are not above; 0 of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
