"""Whether the weights are the trained ones, of this kind of head."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lab.doctor.draft.case import Case
from lab.doctor.draft.evidence import edge_ratio, is_noise, row_cosine, unlike_rows, zero_rows
from lab.doctor.draft.lamp import Finding, Lamp, Repair
from lab.doctor.draft.lamps.changed_target import look_at_target
from lab.doctor.draft.measure import doubt, gain_errors, is_certain_gain
from lab.doctor.draft.reading import Reading
from lab.doctor.draft.refit import MOST_FLOPS, STEPS, is_affordable, refit_and_measure, refit_flops

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
UNLIKE = 0.1  # mean cosine to the target's rows below which rows are no trained form of them
KIN = 0.3  # mean cosine from which rows are the target's, trained further
LOW = 0.3  # acceptance of the first draft that noise in a table could explain
# Of the length as it is: what a short refit must give for the training to have been too little. A trained head loses by
# it (shipped 2.86 to 2.48, a nano 2.29 to 2.57 without certainty), one with as much noise as weights gains 25 %.
LEAST_REFIT, TRAINED = 0.10, 0.85
LEAST_PLACES = 800  # of the answers: from half of 1,000 a spoiled head learns 25 %, from half of 300 it learns 6 %


@dataclass(eq=False)
class _Table:
    """One of the head's tables beside what the target has in its place.

    Attributes:
        name: of the tensor. own: its rows. targets: the target's, row for row; None where widths differ.
    """

    name: str
    own: Tensor
    targets: Tensor | None

    @property
    def is_lost(self) -> bool:
        """Noise, or largely zeros, where the target's own rows are neither."""
        if zero_rows(self.own) > 0.5:
            return True
        return is_noise(self.own) and self.targets is not None and not is_noise(self.targets)

    @property
    def is_unlike(self) -> bool:
        """Whether its rows have nothing of the target's: a table that was never filled, or another's."""
        return self.targets is not None and row_cosine(self.own, self.targets) < UNLIKE

    @cached_property
    def lost_rows(self) -> Tensor:
        """`[R]` bool: rows that were never filled, in a table whose other rows are the target's, trained further."""
        nothing = torch.zeros(len(self.own), dtype=torch.bool)
        if self.targets is None:
            return nothing
        kept = ~unlike_rows(self.own, self.targets, UNLIKE)
        if bool(kept.all()) or not bool(kept.any()):
            return nothing
        alike = row_cosine(self.own[kept], self.targets[kept])
        return unlike_rows(self.own, self.targets, alike / 2) if alike > KIN else nothing  # some noise is above UNLIKE

    @property
    def is_lost_in_part(self) -> bool:
        """Whether some rows were never filled, and the others are the target's."""
        return bool(self.lost_rows.any())

    @property
    def restored(self) -> Tensor:
        """Its rows with the target's, fp32, in the place of the lost ones: of all, unless others tell how long they
        are."""
        assert self.targets is not None, "asked of a table that has the target's beside it"
        if not self.is_lost_in_part:
            return self.targets.float()
        own, targets, lost = self.own.float(), self.targets.float(), self.lost_rows
        size = (own[~lost] * targets[~lost]).sum() / targets[~lost].square().sum()  # least squares
        return own.where(~lost[:, None], size * targets)

    @property
    def words(self) -> str:
        """The evidence."""
        if self.is_lost_in_part:
            lost = self.lost_rows
            assert self.targets is not None, "rows are lost beside others"
            alike = row_cosine(self.own[~lost], self.targets[~lost])
            return (
                f"{int(lost.sum())} of {len(lost)} rows of {self.name} have nothing of the target's (cosine below "
                f"{alike / 2:.2f}), the others a mean cosine of {alike:.2f}"
            )
        beside = (
            "" if self.targets is None else f", mean cosine {row_cosine(self.own, self.targets):.2f} to the target's"
        )
        zeros = f", {zero_rows(self.own):.0%} of its rows are zeros" if zero_rows(self.own) else ""
        return f"{self.name} has its largest singular value at {edge_ratio(self.own):.2f} of noise's{beside}{zeros}"


def _tables(case: Case) -> list[_Table]:
    weights, ids = case.target_files.weights, case.reading.draft_to_target
    embedding = weights["model.embed_tokens.weight"]
    head = weights.get(HEAD, embedding)
    tables = []
    for name, targets in ((HEAD, head if ids is None else head[ids.cpu()]), (EMBEDDING, embedding)):
        if name in case.stored:
            own = case.stored[name]
            tables.append(_Table(name, own, targets if targets.shape == own.shape else None))
    return tables


def _replaced(case: Case, tables: list[_Table]) -> Reading:
    """The head with the target's rows in the place of its own."""
    rows = {t.name: t.restored.to(case.torch_device) for t in tables if t.targets is not None}
    return replace(case.reading, weights={**case.reading.weights, **rows})


def look_at_tables(case: Case) -> Finding:
    """Tables by their statistics; with prompts, by what the target's own rows would accept in their place."""
    lamp, tables = "random_tensors", _tables(case)
    empty = [n for n, t in case.stored.items() if t.is_floating_point() and t.dim() == 2 and not bool(t.any())]
    suspects = [
        table for table in tables if table.is_lost or (case.prompts and (table.is_unlike or table.is_lost_in_part))
    ]
    if not suspects:
        if empty:
            change = f"restore {', '.join(empty)} from the original head"
            return Finding(lamp, "red", f"nothing but zeros: {', '.join(empty)}", Repair(change), weight=0.9)
        words = "; ".join(table.words for table in tables) or "the head brings no table of its own"
        return Finding(lamp, "green", f"no tensor is noise or zeros: {words}")
    lost = [table for table in suspects if table.is_lost]
    words = "; ".join(table.words for table in suspects)
    change = f"store the target's own rows as {' and '.join(t.name for t in suspects)} (d2t names the rows of a head)"
    if not case.prompts:
        return Finding(lamp, "red", words, Repair(change), weight=0.8)
    options = [_replaced(case, [table]) for table in suspects] + [_replaced(case, suspects)] * (len(suspects) > 1)
    best = max(options, key=lambda reading: case.measured(reading).length)
    after = case.measured(best)
    if is_certain_gain(case.base, after) and after.length > case.before:
        said = f"{words}; with the target's rows in its place {after.length:.2f} tokens a step"
        return Finding(lamp, "red", said, Repair(change, case.before, after.length), weight=0.9, mended=best)
    if lost and case.base.first < LOW:
        change = f"restore {' and '.join(t.name for t in lost)} from the original head"
        return Finding(lamp, "red", f"{words}; the target's rows do not help", Repair(change), weight=0.7)
    return Finding(lamp, "green", f"{words}; but the target's rows in its place gain nothing")


def look_at_method(case: Case) -> Finding:
    """What the tensors are against what the settings, or the config's own words, say."""
    kind, config = case.opened.method, case.config
    names = {"eagle": "EAGLE-1 or EAGLE-2", "eagle3": "EAGLE-3"}
    said = [str(name) for name in config.get("architectures") or ()] + [str(config.get("speculators_model_type", ""))]
    claims = "eagle3" if any("eagle3" in name.lower() for name in said) else kind
    asked = case.method if case.method != "auto" else claims
    why = "the settings say" if case.method != "auto" else "config.json names"
    if asked == kind:
        return Finding("method", "green", f"its tensors are those of an {names[kind]} head, method={kind!r}")
    sentence = f"its tensors are those of an {names[kind]} head, but {why} {asked!r}, with which it is refused"
    change = f"SpeculativeConfig(method={kind!r})"
    if not case.prompts:
        return Finding("method", "red", sentence, Repair(change), weight=1.0)
    return Finding("method", "red", sentence, Repair(change, 1.0, case.before), weight=1.0)


def look_at_training(case: Case) -> Finding:
    """Whether a little more training, on other texts of the same target, gives much."""
    lamp, n_texts = "training", len(case.prompts)
    if n_texts < 4:
        return Finding(lamp, "unknown", f"{n_texts} prompts: a refit takes at least 4, to be measured on others")
    if case.lacks_map:
        return Finding(lamp, "unknown", "the vocabulary map is refused: nothing says which tokens to train for")
    base = case.base
    if base.first >= TRAINED:
        return Finding(lamp, "green", f"the first draft is accepted at {base.first:.0%} of all places")
    if not is_affordable(case.reading, case.text):
        flops = refit_flops(case.reading, case.text)
        return Finding(
            lamp, "unknown", f"a refit would take {flops:.0e} operations, at most {MOST_FLOPS:.0e} are spent on a CPU"
        )
    after, fitted = refit_and_measure(case.reading, case.text, case.k)
    errors, gain = gain_errors(base, after), after.length - base.length
    said = f"{STEPS} steps of training on half the texts give {after.length:.2f} tokens a step on the other half"
    values = (("refit_length", after.length), ("errors", errors))
    if errors > 4.0 and gain > LEAST_REFIT * base.length and after.length > case.before:
        change = "train the head further, on text that this target writes to such prompts (eagle3lab train shows how)"
        repair = Repair(change, case.before, after.length)
        return Finding(lamp, "red", f"{said}, instead of {base.length:.2f}", repair, 0.4, values, mended=fitted)
    n_places = len(base.accepted)
    unsure = doubt(base, after, n_texts, LEAST_REFIT)
    if not unsure and after.length > base.length and n_places < LEAST_PLACES:
        more = math.ceil(n_texts * LEAST_PLACES / n_places)
        unsure = f"half of {n_places} places is little to learn from; about {more} prompts would tell"
    if unsure:
        return Finding(lamp, "unknown", f"{said}, the head as it is {base.length:.2f}, but {unsure}", values=values)
    return Finding(lamp, "green", f"{said}, the head as it is {base.length:.2f}", values=values)


WEIGHTS: tuple[Lamp, ...] = (
    Lamp("random_tensors", "Are head and embedding trained, and those of this pair?", look_at_tables, is_fast=True),
    Lamp("method", "Is it opened as the kind of head that it is?", look_at_method, is_fast=True),
    Lamp("target_changed", "Is the target the one that it was trained with?", look_at_target),
    Lamp("training", "Was it trained long enough, and on text like this?", look_at_training, is_long=True),
)
