"""Whether what the head was trained on is what it is asked, and whether its figure is the one that was promised."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle3core.lookup import LOOKUPS
from lab.acceptance.controls import replayed_steps
from lab.acceptance.intervals import Interval
from lab.acceptance.loops import looped_tokens
from lab.doctor.draft.case import Case
from lab.doctor.draft.definitions import definitions
from lab.doctor.draft.evidence import row_cosine
from lab.doctor.draft.forward import propose
from lab.doctor.draft.lamp import Finding, Lamp, Repair
from lab.doctor.draft.measure import is_certain_gain, length_outside_loops, measure
from lab.doctor.draft.reading import Reading
from lab.doctor.draft.refit import STEPS, is_affordable, refit_and_measure
from lab.doctor.draft.renderings import other_renderings

# The shipped vocabulary leaves out 9 % of its text; one that was chosen on other text leaves out far more.
LEAST_OUTSIDE, LEAST_GAIN = 0.15, 0.10
KIN = 0.3  # mean cosine from which a head's rows are the target's, trained further
DRAWS = 8  # walks over the same text with other luck, of which the mean is taken
LEAST_PROMPTS = 4  # of which one half teaches and the other asks
LEAST_PLACES = 60  # outside loops, to count followers on
SAME_EVERYWHERE = 0.9  # of all places: the two commonest drafts of a head that says the same whatever it reads
LIKE_CLAIMED = 0.03  # share by which a figure may miss a claim that is the same


def look_at_coverage(case: Case) -> Finding:
    """What tokens outside the draft vocabulary cost, if the head knew them as well as the others."""
    ids = case.reading.draft_to_target
    if case.lacks_map:
        return Finding("coverage", "unknown", "the vocabulary map is refused: nothing says which tokens the head knows")
    if ids is None:
        return Finding("coverage", "green", "the draft vocabulary is the target's")
    if not case.prompts:
        return Finding("coverage", "unknown", "no prompts: which tokens matter is told by what the target writes")
    answers = torch.tensor([token for answer in case.text.answers for token in answer])
    outside = float((~torch.isin(answers, ids.cpu())).double().mean())
    before, whole = case.before, with_all_ids(case)
    if whole is None:
        after = if_covered(case)
        is_gain, how = after - case.base.length > LEAST_GAIN * case.base.length, "drafted as well as the others"
    else:
        measured, how = case.measured(whole), "with the target's own rows for the ids left out"
        if outside > LEAST_OUTSIDE and _can_be_trained(case, whole):
            absent = torch.ones(len(case.text.head), dtype=torch.bool, device=ids.device).index_fill_(0, ids, False)
            rows = absent.nonzero().flatten().to(case.torch_device)
            trained, fitted = refit_and_measure(whole, case.text, case.k, rows=rows)
            if trained.length > measured.length:
                measured, whole, how = trained, fitted, f"{how}, trained for {STEPS} steps on half the texts"
        after, is_gain = measured.length, is_certain_gain(case.base, measured)
    said = f"{outside:.1%} of what the target writes is outside the head's {len(ids)} ids; {how} {after:.2f} tokens"
    values = (("outside", outside), ("length_if_covered", after))
    if outside > LEAST_OUTSIDE and is_gain and after > before:
        change = "use a head whose draft vocabulary was chosen from what this target writes to such prompts"
        repair = Repair(change, before, after)
        return Finding("coverage", "red", f"{said} a step", repair, 0.7, values, mended=whole)
    return Finding("coverage", "green", f"{said} a step instead of {case.base.length:.2f}", values=values)


def _can_be_trained(case: Case, whole: Reading) -> bool:
    """Whether there are texts to train on and others to measure on, and the time for it."""
    return len(case.prompts) >= LEAST_PROMPTS and is_affordable(whole, case.text)


def with_all_ids(case: Case) -> Reading | None:
    """The head with the target's rows for the ids that it leaves out; None where its own rows are no kin of those."""
    reading, ids = case.reading, case.reading.draft_to_target
    own, rows = reading.weights.get("lm_head.weight"), case.text.head
    if own is None or ids is None or own.shape[1] != rows.shape[1] or row_cosine(own, rows[ids]) < KIN:
        return None
    return replace(
        reading, geometry=replace(reading.geometry, draft_vocab_size=len(rows)), draft_to_target=None,
        weights={**reading.weights, "lm_head.weight": rows.index_copy(0, ids.to(rows.device), own)},
    )  # fmt: skip


def if_covered(case: Case) -> float:
    """Mean acceptance length if tokens outside the vocabulary were accepted as often as those inside.

    Where one is, the levels behind it are drawn too: what the head would have made of it is not known.
    """
    text, k, ids = case.text, case.k, case.reading.draft_to_target
    assert ids is not None, "asked of a head with a vocabulary of its own"
    drafted = propose(case.reading, text, k).cpu()
    at = (text.roots()[:, None] + torch.arange(1, k + 1)).clamp(max=len(text.tokens) - 1)
    follows = text.tokens.cpu()[at]
    inside, agrees = torch.isin(follows, ids.cpu()), drafted == follows
    shares = _shares_inside(agrees, inside)
    lengths = []
    for seed in range(DRAWS):
        lucky = torch.rand(agrees.shape, generator=torch.Generator().manual_seed(seed)) < shares
        unknown = (~inside).cumsum(dim=1) > 0  # from the first token outside on
        imagined = torch.where(unknown, torch.where(lucky, follows, -1), drafted)
        lengths.append(measure(imagined, case.base.likelihood, text).length)
    return sum(lengths) / DRAWS


def _shares_inside(agrees: Tensor, inside: Tensor) -> Tensor:
    """By level, acceptance among roots whose earlier levels agreed and whose token is in the vocabulary: `[k]`."""
    reached, shares = torch.ones(len(agrees), dtype=torch.bool), list[float]()
    for level in range(agrees.shape[1]):
        asked = reached & inside[:, level]
        before = shares[-1] if shares else 0.0
        shares.append(float(agrees[asked, level].double().mean()) if bool(asked.any()) else before)
        reached = reached & agrees[:, level]
    return torch.tensor(shares)


def look_at_life(case: Case) -> Finding:
    """Whether the head's first choices, whatever they stand for, know more of what follows than the last token does."""
    lamp = "dead_head"
    if len(case.prompts) < LEAST_PROMPTS:
        why = f"{len(case.prompts)} prompts: at least {LEAST_PROMPTS}, to count on some and ask of others"
        return Finding(lamp, "unknown", why)
    places = _fresh_places(case)
    if len(places) < LEAST_PLACES:
        return Finding(lamp, "unknown", f"{len(places)} tokens outside loops, at least {LEAST_PLACES} are needed")
    drafted = [place.drafted for place in places]
    known, bigram = (_foretold(signs, places) for signs in (drafted, [place.last for place in places]))
    right = sum(place.drafted == place.follows for place in places) / len(places)
    commonest = Counter(drafted).most_common(1)[0][1] / len(places)
    said = (
        f"outside loops its first drafts are right at {right:.0%} of {len(places)} places; read as mere signs they "
        f"foretell {known:.0%} of the next tokens, the last token alone {bigram:.0%}; its commonest draft is "
        f"{commonest:.0%} of all"
    )
    values = (("right", right), ("foretold", known), ("foretold_by_bigram", bigram), ("commonest_draft", commonest))
    if max(known, right) > bigram:
        return Finding(lamp, "green", said, values=values)
    lengths = {name: _looked_up(case, name) for name in LOOKUPS}
    best = max(lengths, key=lambda name: lengths[name])
    change = f"train the head, and until then draft without it: SpeculativeConfig(method={best!r})"
    if lengths[best] <= (1 + LEAST_GAIN) * case.before:
        why = f"; {best} accepts {lengths[best]:.2f} tokens a step, so this text may be one that nothing foretells"
        return Finding(lamp, "unknown", said + why, values=values)
    repair = Repair(change, case.before, lengths[best])
    # A head of two drafts is dead whatever else is found; less than that may be what another cause does.
    two = sum(n for _, n in Counter(drafted).most_common(2)) / len(places)
    mended = None if two >= SAME_EVERYWHERE else case.reading
    return Finding(lamp, "red", said, repair, 0.8, values, mended=mended, is_substitute=True)


@dataclass(frozen=True)
class _Place:
    """A place of a text: which text, the first draft made there, the last token, and the one that follows."""

    text: int
    drafted: int
    last: int
    follows: int


def _fresh_places(case: Case) -> list[_Place]:
    """Every root whose next token is no loop's."""
    text, drafted = case.text, propose(case.reading, case.text, 1)[:, 0].tolist()
    places, begin = list[_Place](), 0
    for i, (prompt, answer) in enumerate(zip(text.prompts, text.answers, strict=True)):
        loops = looped_tokens(prompt, answer)
        for at in range(len(answer) - 1):
            if not loops[at + 1]:
                places.append(_Place(i, drafted[begin + at], answer[at], answer[at + 1]))
        begin += max(len(answer) - 1, 0)
    return places


def _foretold(signs: Sequence[int], places: Sequence[_Place]) -> float:
    """Share of next tokens that a table from signs to their commonest follower gets right, counted on other texts."""
    right = 0
    for half in (0, 1):
        table: dict[int, Counter[int]] = {}
        for sign, place in zip(signs, places, strict=True):
            if place.text % 2 != half:
                table.setdefault(sign, Counter())[place.follows] += 1
        likeliest = {sign: counts.most_common(1)[0][0] for sign, counts in table.items()}
        right += sum(
            place.text % 2 == half and likeliest.get(sign) == place.follows
            for sign, place in zip(signs, places, strict=True)
        )
    return right / len(places)


def _looked_up(case: Case, name: str) -> float:
    """Mean acceptance length of a look-up on the same text."""
    pairs = zip(case.text.prompts, case.text.answers, strict=True)
    steps = [step for p, a in pairs for step in replayed_steps(LOOKUPS[name](), p, a, case.k) if not step.cut]
    return sum(step.n_committed for step in steps) / len(steps) if steps else 1.0


def look_at_rendering(case: Case) -> Finding:
    """The same questions written as they were not: plain for templated, templated for plain, without thinking."""
    lamp = "chat_template"
    if not case.prompts:
        return Finding(lamp, "unknown", "no prompts to write otherwise")
    others, why = other_renderings(case.target, case.prompts)
    if not others:
        return Finding(lamp, "unknown" if why else "green", why or "there is no other way to write these prompts")
    own = length_outside_loops(case.base, case.text)
    best: tuple[str, str, Case, Interval] | None = None
    for name, (change, prompts) in others.items():
        other = replace(case, prompts=prompts)
        length = length_outside_loops(other.base, other.text)
        if best is None or (length.mean or 0.0) > (best[3].mean or 0.0):
            best = name, change, other, length
    assert best is not None, "there is another rendering"
    name, change, other, length = best
    said = f"{own.words} tokens a step outside loops as the prompts are, {length.words} {name}"
    is_apart = own.high is not None and length.low is not None and length.low > own.high
    if is_apart and other.before > case.before:
        return Finding(lamp, "red", said, Repair(change, case.before, other.before), weight=0.6)
    if (length.mean or 0.0) > (1 + LEAST_GAIN) * (own.mean or math.inf):
        return Finding(lamp, "unknown", f"{said}: {len(case.prompts)} prompts are too little text to tell them apart")
    return Finding(lamp, "green", said)


def look_at_metric(case: Case) -> Finding:
    """Every definition of acceptance of one run; red where a claimed figure is another one of them."""
    if not case.prompts:
        return Finding("metric", "unknown", "no prompts: no run whose acceptance could be told in several ways")
    if case.by_engine is None:
        return Finding("metric", "unknown", "the engine refuses the head, so there is no run to count")
    told: Mapping[str, float] = definitions(case.by_engine)
    ours, *others = told
    said, values = ", ".join(f"{name} {value:.3g}" for name, value in told.items()), tuple(told.items())
    if case.claimed is None:
        return Finding("metric", "green", said, values=values)
    claimed = case.claimed
    if abs(claimed - told[ours]) <= LIKE_CLAIMED * told[ours]:
        return Finding("metric", "green", f"the claimed {claimed:g} is the {ours}: {said}", values=values)
    asked = dict(told)
    if claimed > case.k + 1:  # more than any length: a share in per cent
        asked |= {name: 100 * value for name, value in told.items() if value <= 1}
    nearest = min(others, key=lambda name: abs(claimed - asked[name]) / max(asked[name], 1e-9))
    if abs(claimed - asked[nearest]) > LIKE_CLAIMED * asked[nearest]:
        return Finding("metric", "green", f"the claimed {claimed:g} is none of these: {said}", values=values)
    change = f"compare the claimed {claimed:g} with the {nearest} here, {told[nearest]:.3g}"
    sentence = (
        f"the claimed {claimed:g} is no {ours}, which is {told[ours]:.3g}, but the {nearest}, {told[nearest]:.3g}"
    )
    return Finding("metric", "red", sentence, Repair(change), weight=0.95, values=values)


DATA: tuple[Lamp, ...] = (
    Lamp("coverage", "Does the draft vocabulary hold what the target writes?", look_at_coverage),
    Lamp("dead_head", "Does it know more than a table of token pairs?", look_at_life),
    Lamp("chat_template", "Are the prompts written as those that it was trained on?", look_at_rendering, is_long=True),
    Lamp("metric", "Is the figure that it is held against of the same definition?", look_at_metric),
)
