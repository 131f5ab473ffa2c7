"""What a run's steps accepted, read back: from a log of acceptance, or from a notebook's rows.

A log (`eagle3core.batching.acceptance_log`) has every step of every request; rows have sums over all requests. Both
become one `Account`, so that whatever is said of one is said of the other, as far as it is known. All counts are of
complete steps, as everywhere (`lab.acceptance.counts`). Source: docs/metrics.md has the fields of a line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3core.trees import StepTree
from lab.acceptance.counts import CAUSES, cause_of
from lab.acceptance.paths import Path as TreePath
from lab.acceptance.paths import PathCounts
from lab.errors import ExperimentError
from lab.rows.store import Row
from lab.rows.stored.files import MOST_ROWS_BYTES, decoded, read_bytes
from lab.rows.values import refuse_newer

SCHEMA = 1
ENDED, WRONG = "paths that the tree ended", "nodes none of whose drafted children was right"


class LoggedStep(BaseModel):
    """One line of a log; tokens as ids."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = Field(ge=1)
    request: int
    step: int
    start: int
    depth: int = Field(ge=0)
    drafted: list[int]
    parents: list[int] | None
    tree_ranks: list[int] | None
    target: list[int]
    accepted: int = Field(ge=0)
    accepted_ids: list[int]
    committed: int = Field(ge=0)
    cut: bool
    ranks: list[int] | None
    acceptance: str | None

    @property
    def tree(self) -> StepTree | None:
        """What was verified, where it was a tree whose shape is known."""
        if self.parents is None:
            return None
        return StepTree.of(self.drafted, self.parents, self.accepted_ids, self.tree_ranks)


@dataclass(frozen=True)
class Counts:
    """Complete steps of a request, or of all.

    Attributes:
        name: of the request, or of the rows. n_cut: steps left out because a stop or limit shortened them.
        n_drafted: tokens drafted. histogram: entry a counts steps that accepted a drafts.
    """

    name: str
    n_steps: int
    n_cut: int
    n_drafted: int
    histogram: tuple[int, ...]

    @property
    def n_accepted(self) -> int:
        """Drafts that the target agreed with."""
        return sum(a * n for a, n in enumerate(self.histogram))

    @property
    def length(self) -> float | None:
        """Tokens a step, the bonus included; None without a step."""
        return 1.0 + self.n_accepted / self.n_steps if self.n_steps else None


@dataclass(frozen=True)
class Account:
    """A run's acceptance with one shape of drafts.

    Attributes:
        name: of the log or the rows. requests: each one's counts; empty where only sums are known. all: of all.
        n_nodes: most tokens that a step sent to the target for a sequence, the root included.
        losses: tokens a step that were drafted and not accepted, or not drafted, by cause; empty where not known.
        paths: how often each path was accepted; None where not known.
        knows_ranks: paths that leave the chain at their last node are known, drafted or not.
    """

    name: str
    requests: tuple[Counts, ...]
    all: Counts
    n_nodes: int
    losses: dict[str, float]
    paths: PathCounts | None
    knows_ranks: bool = False

    @property
    def depth(self) -> int:
        """Drafts on the longest path."""
        return len(self.all.histogram) - 1

    def knows(self, path: TreePath) -> bool:
        """Whether the data say how often `path` is accepted; where not, it counts as never."""
        if self.paths is None:
            return False
        is_side = self.knows_ranks and len(path) <= self.depth and not any(path[:-1])
        return is_side or self.paths.offered[path] > 0


def read_log(path: Path) -> list[LoggedStep]:
    """The steps of a log. A last line without its end, which is being written, is left out.

    Raises:
        ExperimentError: it cannot be read, or a line is none of a log's.
        NotComparable: a newer version wrote it.
    """
    allowed, remedy = "an acceptance log: one JSON object a line (docs/metrics.md)", "name another file, or run again"
    try:
        lines = read_bytes(path, MOST_ROWS_BYTES).split(b"\n")[:-1]
    except (OSError, ValueError) as error:
        raise ExperimentError(f"{path.name} cannot be read: {error}", allowed, remedy) from error
    steps = []
    for number, line in enumerate(lines, start=1):
        try:
            content = decoded(line)
            if isinstance(content, dict):
                refuse_newer(f"line {number} of {path.name}", content, SCHEMA)
            steps.append(LoggedStep.model_validate(content))
        except ValidationError as error:
            first = error.errors()[0]
            why = f"{'.'.join(map(str, first['loc'])) or 'the line'}: {first['msg']}"
            raise ExperimentError(f"line {number} of {path.name} is no step: {why}", allowed, remedy) from error
        except ValueError as error:
            raise ExperimentError(f"line {number} of {path.name} is no JSON: {error}", allowed, remedy) from error
    return steps


def account_of_log(name: str, steps: Sequence[LoggedStep]) -> Account:
    """Everything that the steps of a log say.

    Raises:
        ExperimentError: no complete step, or a tree that its accepted tokens do not lie in.
    """
    complete = [step for step in steps if not step.cut]
    if not complete:
        raise ExperimentError(f"{name} holds no complete step", "at least one", "log a run of more tokens")
    depth = max(max(step.depth, step.accepted) for step in complete)
    ids = sorted({step.request for step in steps})
    requests = tuple(_counts(str(id_), [step for step in steps if step.request == id_], depth) for id_ in ids)
    try:
        trees = [step.tree for step in complete]
    except (KeyError, ValueError) as error:
        raise ExperimentError(
            f"{name} holds a tree that its accepted tokens do not lie in", "a log as the engine wrote it", "log it anew"
        ) from error
    is_drafted = [step for step in complete if step.depth]
    has_ranks = bool(is_drafted) and all(step.ranks is not None for step in is_drafted)
    is_known = not any(
        tree is None and len(step.drafted) > step.depth for tree, step in zip(trees, complete, strict=True)
    )
    return Account(
        name, requests, _counts("all", steps, depth), 1 + max(len(step.drafted) for step in complete),
        _losses(complete, trees) if has_ranks or any(trees) else {},
        _paths(complete, trees) if is_known else None, has_ranks,
    )  # fmt: skip


def _counts(name: str, steps: Sequence[LoggedStep], depth: int) -> Counts:
    complete = [step for step in steps if not step.cut]
    histogram = Counter(step.accepted for step in complete)
    n_drafted = sum(len(step.drafted) for step in complete)
    bars = tuple(histogram[a] for a in range(depth + 1))
    return Counts(name, len(complete), len(steps) - len(complete), n_drafted, bars)


def _losses(complete: Sequence[LoggedStep], trees: Sequence[StepTree | None]) -> dict[str, float]:
    """Tokens a step below the step's depth, by what ended the accepted path."""
    lost: Counter[str] = Counter()
    for step, tree in zip(complete, trees, strict=True):
        if tree is not None:
            end = tree.accepted[-1] if tree.accepted else 0
            lost[WRONG if end in tree.parents else ENDED] += max(tree.depths) - step.accepted
        elif step.ranks is not None and step.accepted < min(step.depth, len(step.ranks)):
            lost[cause_of(step.ranks[step.accepted])] += step.depth - step.accepted
    return {cause: lost[cause] / len(complete) for cause in (*CAUSES, ENDED, WRONG) if lost[cause]}


def _paths(complete: Sequence[LoggedStep], trees: Sequence[StepTree | None]) -> PathCounts:
    """Paths of trees as they are; a chain's are its own, and where ranks are kept the node that it lacked."""
    counts = PathCounts()
    for step, tree in zip(complete, trees, strict=True):
        if tree is not None:
            counts.add(tree)
            continue
        counts.n_steps += 1
        chain = [(0,) * i for i in range(1, len(step.drafted) + 1)]
        counts.offered.update(chain[: step.accepted + 1])
        counts.accepted.update(chain[: step.accepted])
        if step.ranks is not None and step.accepted < len(step.ranks) and step.ranks[step.accepted] > 0:
            missed = (*(0,) * step.accepted, step.ranks[step.accepted])
            counts.offered[missed] += 1
            counts.accepted[missed] += 1
    return counts


def account_of_row(row: Row) -> Account | None:
    """What a row of `31_acceptance` or `32_trees` says of all its requests; None for another row, or an empty one."""
    histogram = row.values.get("accepted_histogram")
    is_chain = row.kind == "acceptance"
    if row.kind not in ("acceptance", "tree_acceptance") or row.status != "measured" or not isinstance(histogram, list):
        return None
    bars = tuple(n for n in histogram if isinstance(n, int) and n >= 0)
    n_steps, nodes = sum(bars), row.number("n_nodes")
    if not n_steps or len(bars) != len(histogram) or (not is_chain and nodes is None):
        return None
    n_drafts = len(bars) - 1 if nodes is None else int(nodes) - 1
    lost = {cause: row.number(f"lost to {cause}") for cause in CAUSES}
    paths = None
    if is_chain:
        shares = {(0,) * a: sum(bars[a:]) for a in range(1, len(bars))}
        paths = PathCounts(n_steps, Counter(dict.fromkeys(shares, n_steps)), Counter(shares))
    return Account(
        row.name, (), Counts(row.name, n_steps, int(row.number("num_cut_steps") or 0), n_steps * n_drafts, bars),
        n_drafts + 1, {cause: value for cause, value in lost.items() if value}, paths,
    )  # fmt: skip
