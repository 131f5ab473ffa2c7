"""Which draft tree is worth its nodes: the real engine, once a shape, over the same prompts.

First the shapes by name; then, from the paths that the dynamic tree's steps accepted, the data's own best trees of some
sizes, which are run as well: what was expected of them stands beside what they gave. Counting is in `tree_counts` and
`paths`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from eagle3core import Engine
from eagle3core.config import GenerationConfig
from eagle3core.errors import ConfigError
from eagle3core.request import Response, without_errors
from eagle3core.speculative import SpeculativeConfig
from lab.acceptance.paths import BestTree, PathCounts, best_tree
from lab.acceptance.shapes import BUDGETS, PLAIN, SHAPES, Shape, fixed_shape, refusal_of, shape_named
from lab.acceptance.tree_counts import ShapeAcceptance, count_shape
from lab.errors import ExperimentError
from lab.pairs.prompts import Prompt
from lab.parity.recording import PairUnderTest

MORE_TOKENS = 64  # of a session, beyond prompt and answer: a session has to hold a step's tokens


@dataclass(frozen=True)
class LeftOut:
    """A shape that was not measured, and why."""

    name: str
    reason: str


@dataclass
class TreeReport:
    """Acceptance of every shape, over the same prompts.

    Attributes:
        measured, left_out: in the order asked for; plain decoding first.
        counted: name of the dynamic tree whose steps the best trees were counted from; empty without one.
        counts, best: its paths, and the largest best tree that was formed.
        files: of the best trees, by their nodes, where they were written.
    """

    dtype: str
    measured: list[ShapeAcceptance] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    counted: str = ""
    counts: PathCounts | None = None
    best: BestTree | None = None
    files: dict[int, Path] = field(default_factory=dict)

    @property
    def trees(self) -> list[ShapeAcceptance]:
        """Those that draft a tree."""
        return [shape for shape in self.measured if shape.chains is not None]

    @property
    def best_measured(self) -> list[ShapeAcceptance]:
        """The data's own best trees."""
        return [shape for shape in self.measured if shape.expected is not None]

    @property
    def n_different(self) -> int:
        """Generated tokens of all shapes that are not plain decoding's."""
        return sum(shape.n_different for shape in self.measured)

    @property
    def first_difference(self) -> str:
        """Where the first of them is; empty without one."""
        return next((f"{s.name}: {s.difference}" for s in self.measured if s.difference is not None), "")


def measure_trees(
    target: str | Path,
    draft: str | Path,
    prompts: Sequence[Prompt],
    shapes: Sequence[str] = SHAPES,
    budgets: Sequence[int] = BUDGETS,
    *,
    max_new_tokens: int = 128,
    dtype: str = "float32",
    device: str = "auto",
    batch: int = 8,
    ignore_eos: bool = False,
    choices_folder: Path | None = None,
    on_shape: Callable[[str], None] | None = None,
    norm_output: str = "",
) -> TreeReport:
    """Generate greedily with every shape, and with the best trees that follow.

    Args:
        target, draft: checkpoint directories.
        prompts: what to continue.
        shapes: names (`shapes.shape_named`); plain decoding is always run, and first.
        budgets: nodes of the best trees, root included; counted from the last dynamic tree among `shapes`.
        max_new_tokens: tokens a prompt, fewer where an end token comes first.
        dtype, device: of the engine.
        batch: requests decoded together.
        ignore_eos: go on past end tokens.
        choices_folder: where the best trees are written as `best-N.json`, and read from by the engine.
        on_shape: called with each name before it is measured.
        norm_output: as of `PairUnderTest`.

    Raises:
        ExperimentError: no prompt, fewer than two tokens, a budget below two nodes, or a name that is no shape.
        InvariantViolated: a chain inside a tree would have accepted more than the tree.
    """
    if not prompts or max_new_tokens < 2 or min(budgets, default=2) < 2:
        raise ExperimentError(
            f"{len(prompts)} prompts, max_new_tokens {max_new_tokens}, budgets {list(budgets)}",
            "at least one prompt, two tokens (the first comes from prefill), and budgets of two nodes",
            "correct the arguments",
        )
    named = [shape_named(name) for name in dict.fromkeys((PLAIN, *shapes))]
    pair = PairUnderTest(Path(target), Path(draft), dtype, device, norm_output=norm_output)
    generation = GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
    work = _Work(pair, prompts, generation, batch, on_shape)
    for shape in named:
        work.measure(shape)
    _measure_best(work, sorted(set(budgets)), choices_folder)
    return work.report


class _Work:
    """One pair whose weights are read once, and the report that its runs fill."""

    def __init__(
        self,
        pair: PairUnderTest,
        prompts: Sequence[Prompt],
        generation: GenerationConfig,
        batch: int,
        on_shape: Callable[[str], None] | None,
    ) -> None:
        self.prompts, self.generation = [list(prompt.ids) for prompt in prompts], generation
        self.on_shape = on_shape
        n_tokens = max(map(len, self.prompts)) + generation.max_new_tokens + MORE_TOKENS
        width = min(batch, len(prompts))
        self.first = pair.engine(1, n_tokens=n_tokens, max_batch_size=width, collect_draft_ranks=True)
        self.plain: list[Response] = []
        self.report = TreeReport(pair.dtype)

    def measure(self, shape: Shape, expected: float | None = None) -> None:
        """Run a shape, or say why this pair cannot."""
        try:
            engine = self._engine(shape)
        except ConfigError as error:
            self.report.left_out.append(LeftOut(shape.name, refusal_of(error)))
            return
        if self.on_shape is not None:
            self.on_shape(shape.name)
        responses = without_errors(engine.generate(self.prompts, self.generation))
        self.plain = self.plain or responses
        spec = engine.config.speculative_config
        n_nodes, depth = (spec.n_nodes, spec.depth) if spec else (1, 0)
        self.report.measured.append(count_shape(shape, n_nodes, depth, responses, self.plain, expected=expected))

    def _engine(self, shape: Shape) -> Engine:
        spec = None
        if shape.kind != PLAIN:
            own = self.first.config.speculative_config
            assert own is not None, "the first engine was made with a draft"
            spec = SpeculativeConfig(model=own.model, norm_output=own.norm_output, **shape.settings)
        config = replace(self.first.config, speculative_config=spec, collect_draft_ranks=spec is not None)
        return Engine(copy.copy(self.first.target), self.first.draft if spec else None, config)


def _measure_best(work: _Work, budgets: Sequence[int], folder: Path | None) -> None:
    """Form the best trees from the last dynamic tree's paths, and run them."""
    report = work.report
    counted = next((s for s in reversed(report.measured) if s.shape.size is not None and s.paths is not None), None)
    if counted is None or counted.paths is None or counted.shape.size is None:
        why = "no dynamic tree was measured, whose accepted paths would say which tree is best"
        report.left_out += [LeftOut(f"best-{n}", why) for n in budgets]
        return
    report.counted, report.counts = counted.name, counted.paths
    size = counted.shape.size
    for n_nodes in budgets:
        try:
            tree = best_tree(counted.paths, n_nodes, max_depth=size.levels, most_ranks=size.top_k)
        except ExperimentError as error:
            report.left_out.append(LeftOut(f"best-{n_nodes}", f"{error.what}; allowed: {error.allowed}"))
            continue
        report.best = tree  # budgets ascend, and a smaller tree is the beginning of a larger one
        choices: str | list[list[int]] = tree.choices(n_nodes)
        if folder is not None:
            report.files[n_nodes] = write_choices(folder / f"best-{n_nodes}.json", tree.choices(n_nodes))
            choices = str(report.files[n_nodes])
        work.measure(fixed_shape(f"best-{n_nodes}", choices), tree.expected_length(n_nodes))


def write_choices(path: Path, choices: Sequence[Sequence[int]]) -> Path:
    """A file of choices as `SpeculativeConfig(choices=FILE)` reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": "paths", "choices": [list(node) for node in choices]}
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")
    return path
