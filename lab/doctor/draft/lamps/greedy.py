"""Whether greedy text with drafts is that of plain decoding, and if not, at which stage the bits part first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from eagle3core.request import Response
from lab.doctor.draft.conditions import mean_length, n_equal
from lab.doctor.draft.lamp import Finding, Lamp, Repair
from lab.doctor.draft.lamps.runs import runs
from lab.probes.bits.compare import strips_of, worst
from lab.probes.bits.hashes import record_hashes

if TYPE_CHECKING:
    from lab.doctor.draft.case import Case

NEAR_TIE = 1e-4  # of the largest logit: what fp32 may decide


@runs("greedy_text")
def look_at_text(case: Case) -> Finding:
    """The engine's text against plain decoding's, and plain decoding's against Hugging Face's choices."""
    at, lamp = case.conditions, "greedy_text"
    answers = [case.plain[i].token_ids for i in at.chosen]
    parted = _parted(case, [response.token_ids for response in at.alone], answers)
    n_tokens = sum(map(len, answers))
    if not parted:
        wrong = _unlike_hugging_face(case)
        if wrong is None:
            said = f"{n_tokens} tokens of {len(answers)} answers are those of plain decoding and of Hugging Face"
            return Finding(lamp, "green", said)
        change = "run eagle3lab parity on the target: it names the stage"
        said = f"plain decoding itself parts from Hugging Face at token {wrong[1]} of answer {wrong[0]}"
        return Finding(lamp, "red", said, Repair(change, mean_length(at.alone), case.base.length), 0.9)
    i, token = parted[0]
    place, stage = _stage(case, i)
    said = (
        f"{len(parted)} of {len(answers)} answers are not those of plain decoding, the first from token {token} of "
        f"prompt {i} on; the bits part first at {place}, at stage {stage}"
    )
    change = f"mend stage {stage} of verification; until then decode without drafts"
    own = _as_far_as_right(at.alone, answers)
    values = (("n_parted", len(parted)), ("stage", stage))
    return Finding(lamp, "red", said, Repair(change, own, case.base.length), 0.9, values)


def _as_far_as_right(responses: Sequence[Response], answers: Sequence[Sequence[int]]) -> float:
    """Tokens of the right text a step: what a step commits beyond it is worth nothing."""
    right = sum(n_equal(r.token_ids, answer) for r, answer in zip(responses, answers, strict=True))
    return min(mean_length(responses), max(1.0, right / max(1, sum(len(r.req_metrics.steps) for r in responses))))


def _parted(case: Case, own: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(request, token) where answers first differ, by more than rounding."""
    found = []
    for i, (one, other) in enumerate(zip(own, plain, strict=True)):
        n = n_equal(one, other)
        is_tie = n < min(len(one), len(other)) and _is_near_tie(case, case.conditions.chosen[i], n, one[n])
        if list(one) != list(other) and not is_tie:
            found.append((i, n))
    return found


def _is_near_tie(case: Case, i: int, at: int, token: int) -> bool:
    """Whether rounding may choose `token` as number `at` of answer `i`."""
    text = case.text
    row = text.starts[i] + len(text.prompts[i]) + at - 1
    logits = text.head @ text.normed[row]
    return bool(logits.max() - logits[token] <= NEAR_TIE * logits.abs().max())


def _unlike_hugging_face(case: Case) -> tuple[int, int] | None:
    """Where plain decoding first chooses what Hugging Face does not, by more than rounding."""
    text = case.text
    for i, (first, answer, end) in enumerate(text.spans()):
        choices = text.choices[answer - 1 : end - 1]
        for at in (choices != text.tokens[answer:end]).nonzero().flatten().tolist():
            if not _is_near_tie(case, i, at, int(text.tokens[answer + at])):
                return i, at
        assert first < answer, "a text begins with its prompt"
    return None


def _stage(case: Case, i: int) -> tuple[str, str]:
    """Place and stage at which the bits of plain decoding and of the engine's part first.

    On a CPU both run in fp64 and their rows are rounded before they are compared: there a product's last bits depend on
    how many rows it has.
    """
    is_cpu = case.torch_device.type == "cpu"
    settings: dict[str, Any] = {"dtype": "float64"} if is_cpu else {}
    rounds = torch.bfloat16 if is_cpu else None
    prompt = list(case.prompts[case.conditions.chosen[i]].ids)
    runs_of = [
        record_hashes(case.engine(k=k, max_batch_size=1, **settings), [prompt], case.max_new_tokens, rounds=rounds)
        for k in (0, case.k)
    ]
    strip = worst(strips_of(*runs_of))
    if strip.first is None:
        return "no position: the target's rows are alike, and the walk over them is not", "accept"
    position, stage = strip.first
    return f"position {position} of prompt {i}", stage


GREEDY_TEXT = Lamp("greedy_text", "Is greedy text with drafts that of plain decoding?", look_at_text, reads=("alone",))
