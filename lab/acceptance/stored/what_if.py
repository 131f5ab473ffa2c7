"""What other drafts would have given on the steps of a run: an acceptance length, and a speed-up where costs are given.

Each node adds the share of steps in which the target went its way, as `paths.BestTree.expected_length` has it. It is an
estimate: other drafts would have begun their steps at other tokens, where acceptance may differ.
Source: derived here; expected length by nodes after Sequoia, arXiv 2402.12374, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3core.trees import MAX_TOP_K, read_choices
from lab.acceptance.paths import Path, PathCounts, best_tree
from lab.acceptance.shapes import shape_named
from lab.acceptance.stored.logged import Account
from lab.errors import ExperimentError

Costs = Sequence[tuple[int, float]]
ALLOWED = "chain-1 to chain-8, mc_sim_7b_63, a file of choices, or best-NODES"


@dataclass(frozen=True)
class Guess:
    """One shape on the steps of a run.

    Attributes:
        length: expected tokens a step, bonus included. n_unknown: of its nodes, those that the data say nothing of and
            that count as never accepted, so that the length is then the least.
        cost: of a step, over that of a plain one; None where no costs were given.
    """

    name: str
    n_nodes: int
    length: float
    n_unknown: int
    cost: float | None

    @property
    def speed_up(self) -> float | None:
        """Tokens a second over plain decoding's."""
        return None if self.cost is None else self.length / self.cost


def guesses(account: Account, names: Sequence[str], costs: Costs) -> list[Guess]:
    """The run itself, then every shape by name.

    Raises:
        ExperimentError: a name that is no chain and no fixed tree, data that do not know which paths were accepted, or
            nodes that no cost is given for.
        ConfigError: a file of choices that cannot be used.
    """
    counts, length = account.paths, account.all.length
    if counts is None or length is None:
        raise ExperimentError(
            f"{account.name} does not say which nodes were accepted", "rows of chains, or an acceptance log",
            "keep a log: eagle3lab run 31_acceptance -p keep_log=true",
        )  # fmt: skip
    found = [Guess("this run", account.n_nodes, length, 0, relative_cost(costs, account.n_nodes))]
    for name in names:
        paths = paths_named(name, counts, account.depth)
        expected = 1.0 + sum(counts.share(path) for path in paths)
        n_unknown = sum(not account.knows(path) for path in paths)
        n_nodes = len(paths) + 1
        found.append(Guess(name, n_nodes, expected, n_unknown, relative_cost(costs, n_nodes)))
    return found


def paths_named(name: str, counts: PathCounts, depth: int) -> list[Path]:
    """The nodes of a shape, the root left out."""
    kind, _, rest = name.partition("-")
    if kind == "best" and rest.isdigit() and 2 <= int(rest) <= 256:
        return list(best_tree(counts, int(rest), max_depth=depth, most_ranks=MAX_TOP_K).paths)
    shape = None if kind in ("plain", "dynamic", "best") else shape_named(name)
    if shape is None:
        raise ExperimentError(
            f"--what-if {name!r}", ALLOWED, "name one of these; what a dynamic tree would draft is not in the data"
        )
    if shape.kind == "chain":
        return [(0,) * level for level in range(1, int(rest) + 1)]
    tree = read_choices(name)
    assert tree is not None, "a shape of choices has been read"
    return list(tree.paths)


def relative_cost(costs: Costs, n_nodes: int) -> float | None:
    """Cost of a step of `n_nodes` over that of one node, between two given points on the line that joins them.

    Raises:
        ExperimentError: more nodes than any cost is given for.
    """
    if not costs:
        return None
    for (before, low), (after, high) in zip(costs, [*costs[1:], costs[-1]], strict=True):
        if before <= n_nodes <= after:
            share = (n_nodes - before) / (after - before) if after > before else 0.0
            return (low + share * (high - low)) / costs[0][1]
    raise ExperimentError(
        f"--costs end at {costs[-1][0]} nodes, and a step of {n_nodes} is asked about",
        "a cost for as many nodes, or more", f"add {n_nodes}:COST, which `eagle3lab speed` measures",
    )  # fmt: skip
