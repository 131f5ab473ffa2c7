"""Whether the engine does with the head what it should: the same drafts wherever and beside whomever a request runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eagle3core.request import Response
from lab.doctor.draft.case import Case
from lab.doctor.draft.conditions import (
    LEAST_ROOTS,
    LEAST_SHARE,
    SMALL_BATCH,
    Difference,
    complete,
    difference,
    mean_length,
    n_equal,
    ranks,
)
from lab.doctor.draft.lamp import Finding, Lamp, Repair
from lab.doctor.draft.lamps.drawn import AS_DISTRIBUTION
from lab.doctor.draft.lamps.greedy import GREEDY_TEXT
from lab.doctor.draft.lamps.runs import runs

LEAST_FOUND = 2  # roots behind a prefix hit that may draft otherwise, less one: what is stale is little at times
LEAST_BELOW = 0.02  # of the steps of a tree: below its chain by more than near ties of two computations explain


def repair(case: Case, change: str, good: float, bad: float) -> Repair:
    """What a condition costs, on the length of all the case's prompts: `good` and `bad` are of those that were run."""
    after = case.base.length if is_offline(case) else good
    return Repair(change, after * bad / good, after)


def is_offline(case: Case) -> bool:
    """Whether one request alone accepts what the head in plain torch does, but for near ties."""
    walks = [case.base.steps[i] for i in case.conditions.chosen]
    own = [complete(response) for response in case.conditions.alone]
    shared = [
        (steps[step.start], step)
        for steps, walk in zip(own, walks, strict=True)
        for step in walk
        if not step.cut and step.start in steps
    ]
    others = sum(one.n_accepted != other.n_accepted for one, other in shared)
    return others < max(LEAST_ROOTS, LEAST_SHARE * len(shared))


def _judged(case: Case, lamp: str, found: Difference, change: str, red: str, green: str) -> Finding:
    values = (("good_length", found.good), ("bad_length", found.bad), ("n_roots", found.n_roots),
              ("n_other", found.n_other))  # fmt: skip
    if not found.costs:
        return Finding(lamp, "green", f"{green}: {found.said}", values=values)
    at = found.first
    assert at is not None, "what differs does so somewhere"
    place = f"first at position {len(case.conditions.prompts[at[0]]) + at[1]} of prompt {at[0]}"
    mended = repair(case, change, found.good, found.bad)
    return Finding(lamp, "red", f"{red}: {found.said}, {place}", mended, 0.8, values)


@runs("chunk_seam")
def look_at_chunks(case: Case) -> Finding:
    """The same requests alone, their prompts read in one chunk and in many."""
    at, block = case.conditions, case.conditions.block
    longest = max(map(len, at.prompts))
    if longest <= block:
        return Finding("chunk_seam", "unknown", f"the longest prompt has {longest} tokens; a seam needs over {block}")
    seams = ", ".join(str(n) for n in range(block, longest, block)[:4])
    return _judged(
        case, "chunk_seam", difference(at.alone, at.in_chunks),
        "prefill_chunk of at least the longest prompt, until the engine carries the draft's state over a seam",
        f"prompts read in chunks of {block} draft otherwise than in one (seams at {seams}, ...)",
        f"prompts read in chunks of {block} and in one draft alike",
    )  # fmt: skip


@runs("stale_prefix")
def look_at_prefix(case: Case) -> Finding:
    """The same conversations with and without the prefix cache."""
    if (why := _spoiled_otherwise(case)) is not None:
        return Finding("stale_prefix", "unknown", f"{why}, so what a prefix hit does cannot be told apart")
    cold, warm = case.conditions.cold_turns, case.conditions.warm_turns
    n_found = sum(response.req_metrics.num_cached_tokens for response in warm)
    if not n_found:
        return Finding("stale_prefix", "unknown", "no block of these prompts was found again in the prefix cache")
    found = difference(cold, warm)
    values = (("good_length", found.good), ("bad_length", found.bad), ("n_other", found.n_other))
    if found.n_other < LEAST_FOUND and not found.n_texts:
        said = f"requests that begin with {n_found} tokens of the prefix cache draft as cold ones do: {found.said}"
        return Finding("stale_prefix", "green", said, values=values)
    texts = f", {found.n_texts} of {len(cold)} answers are others" if found.n_texts else ""
    said = f"requests that begin with {n_found} tokens of the prefix cache draft otherwise than cold ones"
    change = (
        "prefix_cache=False, until a block is kept only with the draft's final rows, under the name of all before it"
    )
    mended = repair(case, change, found.good, min(found.good, found.bad))
    return Finding("stale_prefix", "red", f"{said}: {found.said}{texts}", mended, 0.8, values)


def _spoiled_otherwise(case: Case) -> str | None:
    """What else changes the drafts of a request that begins in the prefix cache, in a slot that served others."""
    at = case.conditions
    if difference(at.alone, at.in_chunks).differs:
        return "prompts read in parts draft otherwise (chunk_seam)"
    if difference(at.alone, at.after_others).differs:
        return "a slot that served others drafts otherwise (company)"
    return "the draft keeps its own states (own_states)" if at.keeps_own_states else None


@runs("own_states")
def look_at_states(case: Case) -> Finding:
    """Steps behind accepted drafts, against the first step of a request that was given the text up to there."""
    alone, pairs, lamp = case.conditions.alone, case.conditions.read_anew, "own_states"
    others = sum(ranks(one) != ranks(other) for one, other in pairs)
    change = "let the draft's first pass write the entries of accepted tokens anew, from the target's states"
    values = (("n_steps", len(pairs)), ("n_other", others), ("by_engine", mean_length(alone)))
    if not pairs:
        return Finding(lamp, "unknown", "no draft was accepted, so the draft has no states of its own to keep")
    said = f"{others} of {len(pairs)} steps behind accepted drafts draft otherwise than from the text read anew"
    if any(r.token_ids != case.plain[i].token_ids for i, r in zip(case.conditions.chosen, alone, strict=True)):
        return Finding(lamp, "unknown", f"{said}, but the text itself is another (greedy_text)", values=values)
    if case.conditions.keeps_own_states and difference(alone, case.conditions.after_others).differs:
        return Finding(lamp, "unknown", f"{said}, but so does a slot that served others (company)", values=values)
    if case.conditions.keeps_own_states:
        own, head = mean_length(alone), case.base.length
        said += f"; {own:.2f} tokens a step, {head:.2f} by the head in plain torch"
        return Finding(lamp, "red", said, Repair(change, min(own, head), head), 0.8, values)
    if not is_offline(case):
        why = "the engine drafts otherwise than the head in plain torch from a request's first step on"
        return Finding(lamp, "unknown", f"{why}, which no kept state explains: eagle3lab parity names the stage")
    return Finding(lamp, "green", said, values=values)


@runs("padding")
def look_at_padding(case: Case) -> Finding:
    """The same requests alone and seven in eight slots, where steps have rows of nobody."""
    at = case.conditions
    if in_company(case)[0].differs:
        why = "acceptance falls beside others in steps without padding too, so padding cannot be told apart"
        return Finding("padding", "unknown", f"{why}: see company")
    return _judged(
        case, "padding", difference(at.alone, at.padded),
        "leave rows of padding out of what the draft reads; until then a max_batch_size of at most 4",
        f"requests in steps with rows of padding (7 in {2 * SMALL_BATCH}) draft otherwise than alone",
        "requests draft the same in steps with rows of padding",
    )  # fmt: skip


def in_company(case: Case) -> tuple[Difference, str]:
    """The worst of three companies against one request alone, and which it is."""
    at = case.conditions
    full = [_only(r, kept) for r, kept in zip(at.in_full, at.while_full(at.in_full), strict=True)]
    asked = (
        (at.in_company, f"{SMALL_BATCH} requests that fill their step"),
        (full, f"{2 * SMALL_BATCH} requests that fill their step"),
        (at.after_others, "a slot that served others before"),
    )
    found = [(difference(at.alone, run), what) for run, what in asked]
    return max(found, key=lambda each: (each[0].differs, each[0].good - each[0].bad))


def _only(response: Response, starts: set[int]) -> Response:
    """A response with some of its steps alone."""
    metrics = response.req_metrics
    kept = tuple(step for step in metrics.steps if step.start in starts)
    return replace(response, req_metrics=replace(metrics, steps=kept))


@runs("company")
def look_at_company(case: Case) -> Finding:
    """Requests alone, and beside others in steps without a row of padding."""
    found, what = in_company(case)
    return _judged(
        case, "company", found, "keep every sequence's rows to itself in the draft; until then max_batch_size=1",
        f"{what}: the draft drafts otherwise than for one request alone",
        "one request alone, beside others and after others drafts alike",
    )  # fmt: skip


def tree_choices(k: int) -> tuple[tuple[int, ...], ...]:
    """A tree of the chain of `k` drafts, and of those that begin with the second and the third choice."""
    return tuple((first, *(0,) * depth) for depth in range(k) for first in range(3))


@runs("tree_below_chain")
def look_at_tree(case: Case) -> Finding:
    """A tree with the chain in it: no step of it may accept less than the chain from the same root."""
    lamp, at, base = "tree_below_chain", case.conditions, case.base
    if at.keeps_own_states:
        return Finding(lamp, "unknown", "the draft keeps its own states (own_states), in a chain and a tree unlike")
    choices = tree_choices(case.k)
    tree = at.each_alone(drafts={"choices": choices, "num_speculative_tokens": case.k}, collect_draft_ranks=False)
    other_text = sum(a.token_ids != b.token_ids for a, b in zip(tree, at.alone, strict=True))
    pairs = _beside_chain(case, tree)
    below = sum(one < other for one, other in pairs)
    own, chain = mean_length(tree), mean_length(at.alone)
    values = (("tree_length", own), ("chain_length", chain), ("n_below", below), ("n_other_texts", other_text))
    said = f"a tree of {len(choices) + 1} nodes accepts {own:.2f} tokens a step, its chain {chain:.2f}"
    if below < max(LEAST_ROOTS, LEAST_BELOW * len(pairs)) and not (other_text and own < chain):
        return Finding(lamp, "green", f"{said}; no step of it stands below the chain", values=values)
    least = 1 + sum(max(pair) for pair in pairs) / len(pairs) if pairs else base.length
    change = "draft the chain (leave choices and use_dynamic_tree out), until the tree is grown right"
    said += f"; {below} of {len(pairs)} of its steps stand below the chain"
    said += f", {other_text} answers are others" if other_text else ""
    return Finding(lamp, "red", said, Repair(change, own, max(base.length, least)), 0.9, values)


def _beside_chain(case: Case, tree: Sequence[Response]) -> list[tuple[int, int]]:
    """Accepted drafts of the tree's complete steps, and of the chain from the same root: by the head in plain torch, or
    where the engine's chain is another, by the engine itself at the roots that both have."""
    at, text, found = case.conditions, case.text, list[tuple[int, int]]()
    sizes = [max(len(answer) - 1, 0) for answer in text.answers]
    by_head = is_offline(case)
    for i, one, chain in zip(at.chosen, tree, at.alone, strict=True):
        same, begin = n_equal(one.token_ids, text.answers[i]), sum(sizes[:i])
        steps = complete(chain)
        for start, step in complete(one).items():
            if start <= same and start - 1 < sizes[i] and (by_head or start in steps):
                other = int(case.base.accepted[begin + start - 1]) if by_head else steps[start].n_accepted
                found.append((step.n_accepted, other))
    return found


_COMPANY = ("alone", "in_company", "in_full", "after_others")

ENGINE: tuple[Lamp, ...] = (
    Lamp(
        "chunk_seam", "Does a prompt read in chunks draft as one read whole?", look_at_chunks,
        reads=("alone", "in_chunks"),
    ),
    Lamp(
        "stale_prefix", "Does a prefix hit find the draft's rows as they ought to be?", look_at_prefix,
        reads=("alone", "in_chunks", "after_others", "read_anew", "cold_turns", "warm_turns"),
    ),
    Lamp(
        "own_states", "Are the draft's own states replaced by the target's behind accepted drafts?", look_at_states,
        reads=("alone", "after_others", "read_anew"),
    ),
    Lamp(
        "padding", "Do rows of padding leave the others alone?", look_at_padding, reads=(*_COMPANY, "padded"),
    ),
    Lamp("company", "Does a request draft alike alone and beside others?", look_at_company, reads=_COMPANY),
    Lamp(
        "tree_below_chain", "Does a tree accept at least what its chain does?", look_at_tree,
        reads=("alone", "read_anew"), is_long=True,
    ),
    AS_DISTRIBUTION,
    GREEDY_TEXT,
)  # fmt: skip
