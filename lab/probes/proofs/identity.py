"""Speculation changes no bit: tokens of every depth and company, and logits, are plain decoding's alone.

Source: docs/requirements.md R-54, R-113; the house's rule that a row of work gives the same bits at any batch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from eagle3core import Engine
from eagle3core.config import GenerationConfig
from eagle3core.request import own_tokens
from lab.probes.proofs.check import Check, Verdict
from lab.probes.proofs.logit_bits import LogitBits
from lab.probes.proofs.subject import Setting, Subject, tree_setting

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
        trees: names of shapes. tree_slots: companies of these; the largest is the one that comes in another order.
        crowded_ks, crowded_slots, crowded_blocks: depths, beside the trees, and the company that share a cache of so
            many blocks: too few, so that requests wait again and are read again, or begin with what others left.
    """

    ks: tuple[int, ...]
    slots: tuple[int, ...]
    n_tokens: int
    session_len: int
    shuffled: int = 0
    logit_slots: tuple[int, ...] = ()
    logit_tokens: int = 0
    trees: tuple[str, ...] = ()
    tree_slots: tuple[int, ...] = ()
    crowded_ks: tuple[int, ...] = ()
    crowded_slots: int = 0
    crowded_blocks: int = 0

    @property
    def baseline(self) -> Setting:
        """Plain decoding of one request at a time."""
        return Setting(0, 1, self.session_len)

    def settings(self) -> list[Setting]:
        """Every engine that is made."""
        return list(
            dict.fromkeys([self.baseline, *self.by_tokens(), *self.reordered(), *self.by_logits(), *self.crowded()])
        )

    def by_tokens(self) -> list[Setting]:
        """Those whose tokens are compared with the baseline's."""
        return self._chains(self.slots) + self._trees(self.tree_slots)

    def reordered(self) -> list[Setting]:
        """Those whose requests also come in another order."""
        chains = self._chains((self.shuffled,) if self.shuffled else ())
        return chains + self._trees(self.tree_slots[-1:])

    def crowded(self) -> list[Setting]:
        """Those that share a cache too small for all of them."""
        if not self.crowded_slots:
            return []
        chains = [Setting(k, self.crowded_slots, self.session_len) for k in self.crowded_ks]
        made = chains + self._trees((self.crowded_slots,))
        return [replace(setting, cache_blocks=self.crowded_blocks) for setting in made]

    def by_logits(self) -> list[Setting]:
        """Those whose logits are compared with the baseline's."""
        return self._chains(self.logit_slots) + self._trees(self.logit_slots)

    def _chains(self, slots: tuple[int, ...]) -> list[Setting]:
        made = [Setting(k, batch, self.session_len) for batch in slots for k in self.ks]
        return [setting for setting in made if setting != self.baseline]

    def _trees(self, slots: tuple[int, ...]) -> list[Setting]:
        return [tree_setting(tree, batch, self.session_len) for tree in self.trees for batch in slots]


class Identity:
    """Checks of one pair over one set of prompts."""

    def __init__(self, subject: Subject, prompts: Sequence[Sequence[int]], plan: IdentityPlan) -> None:
        self.subject, self.prompts, self.plan = subject, [list(prompt) for prompt in prompts], plan

    def checks(self) -> list[Check]:
        """All of them, the planted map first, the largest companies last."""
        plan, made = self.plan, []
        if self.subject.tokens is not None:
            made.append(self._check("the map", plan.baseline, self._follows_map))
        for setting in plan.by_tokens():
            made.append(self._check(name_of(setting), setting, partial(self._tokens_equal, setting)))
        for setting in plan.reordered():
            judge = partial(self._tokens_equal, setting, shuffled=True)
            made.append(self._check(f"{name_of(setting)} shuffled", setting, judge))
        for setting in plan.crowded():
            made.append(self._check(f"{name_of(setting)} crowded", setting, partial(self._crowded_equal, setting)))
        for setting in plan.by_logits():
            made.append(self._check(f"logits {name_of(setting)}", setting, partial(self._logits_equal, setting)))
        return made

    def _check(self, name: str, setting: Setting, judge: object) -> Check:
        parameters = {
            "pair": self.subject.name, "spec_k": setting.k, "slots": setting.batch, "n_prompts": len(self.prompts),
            "context": max(map(len, self.prompts)), "n_tokens": self.plan.n_tokens,
            **({"tree": setting.tree} if setting.tree else {}),
            **({"cache_blocks": setting.cache_blocks} if setting.cache_blocks else {}),
        }  # fmt: skip
        return Check(PART, f"{self.subject.name} {name}", parameters, judge)  # type: ignore[arg-type]

    @cached_property
    def baseline(self) -> Tokens:
        """Tokens of plain decoding, one request at a time."""
        return self._decode(self.plan.baseline, self.prompts)

    def _decode(self, setting: Setting, prompts: Tokens, engine: Engine | None = None) -> Tokens:
        engine = engine or self.subject.engine(setting)
        responses = engine.generate(prompts, GenerationConfig(self.plan.n_tokens, ignore_eos=True))
        return [list(response.token_ids) for response in own_tokens(responses)]

    def _follows_map(self) -> Verdict:
        tokens = self.subject.tokens
        assert tokens is not None, "the pair is planted"
        wanted = [tokens.follow(prompt[-1], self.plan.n_tokens) for prompt in self.prompts]
        return compare_tokens(self.baseline, wanted)

    def _tokens_equal(self, setting: Setting, shuffled: bool = False) -> Verdict:
        order = list(range(len(self.prompts)))
        if shuffled:
            random.Random(SHUFFLE_SEED).shuffle(order)
        got = self._decode(setting, [self.prompts[i] for i in order])
        return compare_tokens(got, [self.baseline[i] for i in order])

    def _crowded_equal(self, setting: Setting) -> Verdict:
        """Twice in one engine, the second time in another order, so that blocks are found and requests put back."""
        engine, order = self.subject.engine(setting), list(range(len(self.prompts)))
        first = self._decode(setting, self.prompts, engine)
        random.Random(SHUFFLE_SEED).shuffle(order)
        again = self._decode(setting, [self.prompts[i] for i in order], engine)
        equal = compare_tokens([*first, *again], [*self.baseline, *(self.baseline[i] for i in order)])
        counts = engine.book.blocks.counts
        values = {**equal.values, "n_put_back": counts.n_put_back, "n_found_tokens": counts.n_found_tokens}
        detail = f"{equal.detail}; {counts.n_put_back} times put back, {counts.n_found_tokens} tokens found, not read"
        is_asked = counts.n_put_back > 0 and counts.n_found_tokens > 0
        held = equal.held if is_asked or equal.held is False else None
        return Verdict(held, detail, values)

    @cached_property
    def _baseline_bits(self) -> dict[int, Tensor]:
        return {}

    def _bits(self, setting: Setting, prompts: Tokens) -> list[Tensor]:
        """Bits of the logits of each prompt, a prompt a slot."""
        n = self.plan.logit_tokens
        trace = LogitBits(self.subject.target.geometry.vocab_size)
        engine = self.subject.engine(setting, trace=trace)
        trace.state = engine.runner.state
        engine.generate(prompts, GenerationConfig(n, ignore_eos=True))
        return [trace.bits(slot, n) for slot in range(len(prompts))]

    def _logits_equal(self, setting: Setting) -> Verdict:
        prompts = self.prompts[: setting.batch]
        for i, prompt in enumerate(prompts):
            if i not in self._baseline_bits:
                [self._baseline_bits[i]] = self._bits(self.plan.baseline, [prompt])
        return compare_bits(self._bits(setting, prompts), [self._baseline_bits[i] for i in range(len(prompts))])


def name_of(setting: Setting) -> str:
    """What is drafted, and in which company."""
    return f"{setting.drafts} x {setting.batch}"


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
