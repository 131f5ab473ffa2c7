"""Speculation changes no bit: tokens of every depth and company, and logits, are plain decoding's alone.

Source: docs/requirements.md R-54, R-113; the house's rule that a row of work gives the same bits at any batch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from eagle3core.config import GenerationConfig
from lab.probes.proofs.check import Check, Verdict
from lab.probes.proofs.logit_bits import LogitBits
from lab.probes.proofs.subject import Setting, Subject

PART = "identity"
SHUFFLE_SEED = 7

Tokens = list[list[int]]


@dataclass(frozen=True)
class IdentityPlan:
    """What is compared with plain decoding of one request at a time.

    Attributes:
        ks: depths; 0 is plain decoding in company. slots: sizes of companies. n_tokens: of every prompt.
        session_len: of the engines.
        shuffled: a company whose requests come in another order, or 0 for none.
        logit_slots: companies whose logits are compared, a prompt a slot. logit_tokens: of each of them.
    """

    ks: tuple[int, ...]
    slots: tuple[int, ...]
    n_tokens: int
    session_len: int
    shuffled: int = 0
    logit_slots: tuple[int, ...] = ()
    logit_tokens: int = 0

    def settings(self) -> list[Setting]:
        """Every engine that is made."""
        companies = sorted({1, *self.slots, *self.logit_slots, *((self.shuffled,) if self.shuffled else ())})
        return [Setting(k, batch, self.session_len) for batch in companies for k in sorted({0, *self.ks})]


class Identity:
    """Checks of one pair over one set of prompts."""

    def __init__(self, subject: Subject, prompts: Sequence[Sequence[int]], plan: IdentityPlan) -> None:
        self.subject, self.prompts, self.plan = subject, [list(prompt) for prompt in prompts], plan

    def checks(self) -> list[Check]:
        """All of them, the planted map first, the largest companies last."""
        plan, made = self.plan, []
        if self.subject.tokens is not None:
            made.append(self._check("the map", 0, 1, self._follows_map))
        for slots in plan.slots:
            for k in plan.ks:
                if (k, slots) != (0, 1):  # that one is the baseline itself
                    made.append(self._check(f"spec-{k} x {slots}", k, slots, partial(self._tokens_equal, k, slots)))
        for k in plan.ks if plan.shuffled else ():
            name = f"spec-{k} x {plan.shuffled} shuffled"
            made.append(self._check(name, k, plan.shuffled, partial(self._tokens_equal, k, plan.shuffled, True)))
        for slots in plan.logit_slots:
            for k in plan.ks:
                if (k, slots) != (0, 1):
                    name = f"logits spec-{k} x {slots}"
                    made.append(self._check(name, k, slots, partial(self._logits_equal, k, slots)))
        return made

    def _check(self, name: str, k: int, slots: int, judge: object) -> Check:
        parameters = {
            "pair": self.subject.name, "spec_k": k, "slots": slots, "n_prompts": len(self.prompts),
            "context": max(map(len, self.prompts)), "n_tokens": self.plan.n_tokens,
        }  # fmt: skip
        return Check(PART, f"{self.subject.name} {name}", parameters, judge)  # type: ignore[arg-type]

    @cached_property
    def baseline(self) -> Tokens:
        """Tokens of plain decoding, one request at a time."""
        return self._decode(0, 1, self.prompts)

    def _decode(self, k: int, slots: int, prompts: Tokens) -> Tokens:
        engine = self.subject.engine(Setting(k, slots, self.plan.session_len))
        responses = engine.generate(prompts, GenerationConfig(self.plan.n_tokens, ignore_eos=True))
        return [list(response.token_ids) for response in responses]

    def _follows_map(self) -> Verdict:
        tokens = self.subject.tokens
        assert tokens is not None, "the pair is planted"
        wanted = [tokens.follow(prompt[-1], self.plan.n_tokens) for prompt in self.prompts]
        return compare_tokens(self.baseline, wanted)

    def _tokens_equal(self, k: int, slots: int, shuffled: bool = False) -> Verdict:
        order = list(range(len(self.prompts)))
        if shuffled:
            random.Random(SHUFFLE_SEED).shuffle(order)
        got = self._decode(k, slots, [self.prompts[i] for i in order])
        return compare_tokens(got, [self.baseline[i] for i in order])

    @cached_property
    def _baseline_bits(self) -> dict[int, Tensor]:
        return {}

    def _bits(self, k: int, slots: int, prompts: Tokens) -> list[Tensor]:
        """Bits of the logits of each prompt, a prompt a slot."""
        n = self.plan.logit_tokens
        trace = LogitBits(self.subject.target.geometry.vocab_size)
        engine = self.subject.engine(Setting(k, slots, self.plan.session_len), trace=trace)
        trace.state = engine.runner.state
        engine.generate(prompts, GenerationConfig(n, ignore_eos=True))
        return [trace.bits(slot, n) for slot in range(len(prompts))]

    def _logits_equal(self, k: int, slots: int) -> Verdict:
        prompts = self.prompts[:slots]
        for i, prompt in enumerate(prompts):
            if i not in self._baseline_bits:
                [self._baseline_bits[i]] = self._bits(0, 1, [prompt])
        return compare_bits(self._bits(k, slots, prompts), [self._baseline_bits[i] for i in range(len(prompts))])


def compare_tokens(got: Tokens, wanted: Tokens) -> Verdict:
    """Whether every prompt's tokens are equal; if not, where the first difference is."""
    where = [
        (
            i,
            next(
                (j for j, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
            ),
        )
        for i, (ours, theirs) in enumerate(zip(got, wanted, strict=True))
        if ours != theirs
    ]
    n_tokens = sum(map(len, wanted))
    values = {"n_prompts": len(wanted), "n_tokens": n_tokens, "n_differing_prompts": len(where)}
    if not wanted or not n_tokens:
        return Verdict(None, "no tokens were compared")
    if not where:
        return Verdict(True, f"{len(wanted)} prompts, {n_tokens} tokens equal", values)
    i, j = where[0]
    return Verdict(
        False, f"{len(where)} of {len(wanted)} prompts differ, prompt {i} from token {j}: {got[i][j:j + 4]} for "
        f"{wanted[i][j:j + 4]}", {**values, "first_prompt": i, "first_token": j},
    )  # fmt: skip


def compare_bits(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> Verdict:
    """Whether rows of logits `[T, V]` are equal bit by bit, prompt by prompt."""
    n_rows = sum(len(rows) for rows in wanted)
    if n_rows == 0:
        return Verdict(None, "no rows were compared")
    first, n_wrong = "", 0
    for i, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        if ours.shape != theirs.shape:
            return Verdict(False, f"prompt {i}: rows {tuple(ours.shape)} where {tuple(theirs.shape)} are expected")
        rows = (ours != theirs).any(dim=1).nonzero().flatten().tolist()
        if rows and not first:
            n_bits = int(torch.count_nonzero(ours[rows[0]] != theirs[rows[0]]))
            first = f"; first: prompt {i}, row {rows[0]}, {n_bits} logits"
        n_wrong += len(rows)
    values = {"n_rows": n_rows, "n_differing_rows": n_wrong}
    return Verdict(n_wrong == 0, f"{n_rows - n_wrong} of {n_rows} rows of logits equal bit by bit{first}", values)
