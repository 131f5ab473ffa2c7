"""What a run with one shape of drafts says: acceptance, its tokens beside plain decoding's, the chains in its trees.

Means are over complete steps, as everywhere (`lab.acceptance.counts`). Needs no engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle3core.errors import InvariantViolated
from eagle3core.metrics import StepRecord
from eagle3core.request import Response
from eagle3core.trees import StepTree
from lab.acceptance.counts import acceptance_interval
from lab.acceptance.intervals import Interval
from lab.acceptance.paths import PathCounts, count_paths
from lab.acceptance.shapes import PLAIN, Shape


@dataclass(frozen=True)
class Difference:
    """The first generated token that is not plain decoding's; None stands for an answer that had ended."""

    prompt: int
    position: int
    wanted: int | None
    got: int | None

    def __str__(self) -> str:
        return f"prompt {self.prompt}, token {self.position}: {self.got} where plain decoding gives {self.wanted}"


@dataclass(frozen=True)
class ChainsInside:
    """Steps whose tree was held against every chain inside it.

    Attributes:
        n_steps, n_chains: steps, and root-to-leaf chains of all their trees.
        n_longer: complete steps that accepted more than the chain of first children in their own tree would have.
        first_chain_length: tokens a complete step that this chain would have committed, the bonus included.
    """

    n_steps: int
    n_chains: int
    n_longer: int
    first_chain_length: float | None


@dataclass(frozen=True)
class ShapeAcceptance:
    """What was measured of one shape.

    Attributes:
        n_nodes: that a step sends to the target, the root included. depth: longest path in drafts.
        n_steps, n_cut: complete verify steps, and those left out because a stop or limit shortened them.
        length: mean acceptance length with its interval; plain decoding's is 1.
        histogram: entry a counts complete steps that accepted a drafts.
        n_different, difference: generated tokens that are not plain decoding's, and the first of them.
        expected: acceptance length that the counts behind a best tree promised.
        paths, chains: of trees.
    """

    shape: Shape
    n_nodes: int
    depth: int
    n_prompts: int
    n_tokens: int
    n_steps: int
    n_cut: int
    length: Interval
    histogram: tuple[int, ...]
    n_different: int
    difference: Difference | None
    expected: float | None = None
    paths: PathCounts | None = None
    chains: ChainsInside | None = None

    @property
    def name(self) -> str:
        """The shape's."""
        return self.shape.name

    @property
    def by_depth(self) -> tuple[float, ...]:
        """Share of complete steps that accepted a draft at depth 1, 2, ...; empty without a step."""
        return tuple(sum(self.histogram[d:]) / self.n_steps for d in range(1, self.depth + 1)) if self.n_steps else ()

    @property
    def per_draft(self) -> float | None:
        """Accepted over drafted tokens of complete steps; None where nothing was drafted."""
        if self.length.mean is None or self.n_nodes == 1:
            return None
        return (self.length.mean - 1.0) / (self.n_nodes - 1)

    def row_values(self) -> dict[str, Any]:
        """What is stored of a shape."""
        chains = self.chains
        return {
            **self.length.values("acceptance_length"),
            "expected_acceptance_length": self.expected,
            "n_nodes": self.n_nodes,
            "depth": self.depth,
            "accepted_per_draft": self.per_draft,
            "acceptance_by_depth": list(self.by_depth),
            "accepted_histogram": list(self.histogram),
            "n_steps": self.n_steps,
            "num_cut_steps": self.n_cut,
            "n_tokens": self.n_tokens,
            "n_different_tokens": self.n_different,
            "first_difference": None if self.difference is None else str(self.difference),
            "n_chains_checked": chains.n_chains if chains else None,
            "n_steps_longer_than_first_chain": chains.n_longer if chains else None,
            "first_chain_length": chains.first_chain_length if chains else None,
        }


def count_shape(
    shape: Shape,
    n_nodes: int,
    depth: int,
    responses: Sequence[Response],
    plain: Sequence[Response],
    *,
    expected: float | None = None,
) -> ShapeAcceptance:
    """Everything that one shape's responses say beside those of plain decoding of the same prompts.

    Raises:
        InvariantViolated: as `check_chains`.
        ExperimentError: a tree's steps without their trees.
    """
    steps = [step for response in responses for step in response.req_metrics.steps]
    complete = [step for step in steps if not step.cut]
    is_tree = shape.kind in ("static", "dynamic")
    n_tokens = sum(len(response.token_ids) for response in responses)
    histogram = Counter(step.n_accepted for step in complete)
    n_different, difference = differences([r.token_ids for r in plain], [r.token_ids for r in responses])
    n_steps, length = len(complete), acceptance_interval([_complete(response) for response in responses])
    if shape.kind == PLAIN:  # every step commits one token; prefill samples the first
        n_steps, length = n_tokens - len(responses), Interval(1.0, 1.0, 1.0)
        histogram = Counter({0: n_steps})
    return ShapeAcceptance(
        shape, n_nodes, depth, len(responses), n_tokens, n_steps, len(steps) - len(complete), length,
        tuple(histogram[a] for a in range(depth + 1)), n_different, difference, expected,
        count_paths(steps) if is_tree and complete else None, check_chains(responses) if is_tree else None,
    )  # fmt: skip


def _complete(response: Response) -> list[StepRecord]:
    return [step for step in response.req_metrics.steps if not step.cut]


def differences(plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> tuple[int, Difference | None]:
    """How many generated tokens differ, position by position, those that one answer lacks among them; and the first."""
    n, first = 0, None
    for prompt, (wanted, got) in enumerate(zip(plain, other, strict=True)):
        for position in range(max(len(wanted), len(got))):
            pair = [ids[position] if position < len(ids) else None for ids in (wanted, got)]
            if pair[0] != pair[1]:
                n += 1
                first = first or Difference(prompt, position, *pair)
    return n, first


def agreed_drafts(tree: StepTree, text: Sequence[int]) -> list[int]:
    """Of every node, how many drafts in a row from the root towards it are the `text` that followed.

    Says nothing of what the step accepted: it reads tokens alone, so it can be held against that.
    """
    agreed = [0]
    for node, depth in enumerate(tree.depths[1:], start=1):
        above = agreed[tree.parents[node]]
        follows = above == depth - 1 and depth <= len(text) and tree.tokens[node - 1] == text[depth - 1]
        agreed.append(above + follows)
    return agreed


def first_children(tree: StepTree) -> int:
    """The node at the end of the chain that takes the likeliest child of every node."""
    best: dict[int, int] = {}
    for node, parent in enumerate(tree.parents[1:], start=1):
        if parent not in best or tree.ranks[node] < tree.ranks[best[parent]]:
            best[parent] = node
    node = 0
    while node in best:
        node = best[node]
    return node


def check_chains(responses: Sequence[Response]) -> ChainsInside:
    """Every step's accepted drafts against every chain inside its tree, by the text that followed.

    Greedy decoding makes the text the target's own choice, so a chain of the tree, verified alone, accepts as many
    drafts as agree with the text from the step on. No chain may reach further than its tree did, and of a complete step
    the longest reaches exactly as far.

    Raises:
        InvariantViolated: one does not, with prompt and step.
    """
    n_steps = n_chains = n_longer = 0
    first_lengths = []
    for prompt, response in enumerate(responses):
        for number, step in enumerate(response.req_metrics.steps):
            tree = step.tree
            if tree is None:
                continue
            agreed = agreed_drafts(tree, response.token_ids[step.start :])
            _check_step(step, max(agreed), f"prompt {prompt}, step {number}")
            n_steps += 1
            n_chains += len(tree.parents) - len(set(tree.parents[1:]))  # leaves
            if not step.cut:
                first = agreed[first_children(tree)]
                first_lengths.append(first + 1)
                n_longer += step.n_accepted > first
    mean = sum(first_lengths) / len(first_lengths) if first_lengths else None
    return ChainsInside(n_steps, n_chains, n_longer, mean)


def _check_step(step: StepRecord, longest: int, where: str) -> None:
    if longest > step.n_accepted or (longest < step.n_accepted and not step.cut):
        raise InvariantViolated(
            f"{where}: the tree accepted {step.n_accepted} drafts, and the longest chain inside it agrees with "
            f"{longest} tokens of the text",
            "at most as many, and in a complete step exactly as many",
            "report this: acceptance and the text disagree",
        )
