"""Pictures of draft trees, each with the table it was drawn from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from lab.acceptance.paths import BestTree, Cell, Path, PathCounts
from lab.acceptance.tree_counts import ShapeAcceptance
from lab.acceptance.tree_words import nodes_of, sentences
from lab.acceptance.trees import TreeReport
from lab.figures import FAINT, INK, MARKERS, MOST_STEPS, Drawing, colour_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEW = 30  # offers below which a share says little: its 95% interval is wider than 0.3
SMALL = 7.5  # points, where a label stands in every cell
MOST_SHADE = 0.5  # of a cell's colour, so that its label stays readable on light and dark pages
STEPS = (2, 4, 6, 8, 12, 16, 24, 32, 48)  # budgets that a reader may choose, beside those that were measured
MEASURED, EXPECTED = colour_of("ours"), colour_of("expected")


def cells(counts: PathCounts, counted: str, few: int = FEW) -> Drawing:
    """Share of offered nodes that were accepted, by depth and rank among siblings; hatched where few were offered.

    Args:
        counted: the shape whose steps these are.
    """
    from matplotlib import pyplot as plt
    from matplotlib.patches import Rectangle

    found = counts.cells()
    depths, ranks = max(cell.depth for cell in found), max(cell.rank for cell in found) + 1
    fig, axes = plt.subplots(figsize=(7.2, 1.3 + 0.44 * depths))
    for cell in found:
        is_few = cell.offered < few
        axes.add_patch(
            Rectangle(
                (cell.rank + 0.53, cell.depth - 0.47), 0.94, 0.94, facecolor=MEASURED, alpha=MOST_SHADE * cell.rate,
                linewidth=0,
            )
        )  # fmt: skip
        if is_few:  # drawn apart: the shade's transparency would take the hatch with it
            axes.add_patch(
                Rectangle(
                    (cell.rank + 0.53, cell.depth - 0.47), 0.94, 0.94, facecolor="none", edgecolor=FAINT, hatch="///",
                    linewidth=0, alpha=0.35,
                )
            )  # fmt: skip
        axes.text(cell.rank + 1, cell.depth, _cell_label(cell), ha="center", va="center", fontsize=SMALL)
    axes.set(xlim=(0.5, ranks + 0.5), ylim=(depths + 0.5, 0.5), xticks=range(1, ranks + 1), yticks=range(1, depths + 1))
    axes.set(xlabel="rank among siblings, 1 the likeliest", ylabel="depth")
    axes.set_title("Accepted of those offered")
    axes.grid(visible=False)
    rows = [
        {
            "depth": cell.depth, "rank": cell.rank + 1, "offered": cell.offered, "accepted": cell.accepted,
            "share": cell.rate, "few": cell.offered < few,
        }
        for cell in found
    ]  # fmt: skip
    alt = (
        f"Share of offered nodes that were accepted, by depth and rank: {max(cell.rate for cell in found):.0%} at "
        "most, "
        f"over {counts.n_steps} steps of {counted}."
    )
    caption = f"Of each depth and rank, how many offered nodes the target accepted. Hatched: fewer than {few} offers."
    return Drawing(fig, pd.DataFrame(rows), alt, caption)


def _cell_label(cell: Cell) -> str:
    return f"{cell.rate:.0%}\n{cell.accepted}/{cell.offered}"


def shapes_table(report: TreeReport) -> pd.DataFrame:
    """One row a shape."""
    return pd.DataFrame(
        [
            {
                "shape": shape.name,
                "nodes": shape.n_nodes,
                "acceptance_length": shape.length.mean,
                "low": shape.length.low,
                "high": shape.length.high,
                "expected": shape.expected,
                "accepted_per_draft": shape.per_draft,
                "first_chain_length": shape.chains.first_chain_length if shape.chains else None,
                "steps": shape.n_steps,
                "tokens_unlike_plain": shape.n_different,
                **{f"depth {depth}": share for depth, share in enumerate(shape.by_depth, start=1)},
            }
            for shape in report.measured
        ]
    )


def lengths(report: TreeReport) -> Drawing:
    """Acceptance length of every shape with its interval, its nodes, and what was expected of the best trees."""
    from matplotlib import pyplot as plt

    measured = [shape for shape in report.measured if shape.length.mean is not None]
    fig, axes = plt.subplots(figsize=(7.2, 1.2 + 0.36 * len(measured)))
    is_first, seen = True, set[str]()
    for y, shape in enumerate(measured):
        mean = shape.length.mean or 0.0
        colour = EXPECTED if shape.expected is not None else MEASURED
        kind = "a best tree of these steps" if shape.expected is not None else "a shape that was asked for"
        label = None if kind in seen else kind
        seen.add(kind)
        axes.barh([y], [mean], height=0.62, color=colour, alpha=0.55, label=label)
        _whisker(axes, shape, y)
        if shape.expected is not None:
            label = "expected of a best tree" if is_first else None
            axes.plot([shape.expected], [y], marker=MARKERS[3], color=INK, linestyle="none", label=label)
            is_first = False
        end = max(shape.length.high or mean, shape.expected or 0.0)
        axes.annotate(f"{mean:.2f}", (end, y), xytext=(6, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(measured)), [_with_nodes(shape) for shape in measured])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(max(s.length.high or 1.0, s.expected or 0.0) for s in measured))
    axes.set_xlabel("tokens a verify step, bonus included; lines are 95% intervals")
    axes.set_title("Acceptance length of every shape")
    axes.grid(visible=False, axis="y")
    fig.legend(fontsize=8.5, loc="outside lower right", ncols=2)
    caption = (
        "Tokens committed by a complete verify step, bonus included; lines are 95% bootstrap intervals over prompts. "
        "Diamonds are what the dynamic tree's steps promised of a best tree."
    )
    alt = f"Acceptance length of every shape. {sentences(report)[1]}"
    return Drawing(fig, shapes_table(report), alt, caption)


def _with_nodes(shape: ShapeAcceptance) -> str:
    return f"{shape.name} ({nodes_of(shape)})"


def _whisker(axes: Axes, shape: ShapeAcceptance, y: float) -> None:
    low, high = shape.length.low, shape.length.high
    if low is not None and high is not None and high > low:
        axes.hlines(y, low, high, linewidth=1.6, color=INK)


def budgets(report: TreeReport) -> Drawing:
    """Expected acceptance length by nodes, and every measured shape as a point at its own nodes."""
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots()
    best = report.best
    table = []
    if best is not None:
        sizes = range(1, len(best.paths) + 2)
        expected = [best.expected_length(n) for n in sizes]
        axes.plot(sizes, expected, marker="", color=EXPECTED, label=f"expected, from the steps of {report.counted}")
        table += [
            {"nodes": n, "what": "expected", "acceptance_length": x} for n, x in zip(sizes, expected, strict=True)
        ]
    own = {shape.name for shape in report.best_measured}
    for label, marker, colour, chosen in (
        ("best trees, measured", MARKERS[1], EXPECTED, [s for s in report.measured if s.name in own]),
        ("other shapes, measured", MARKERS[0], MEASURED, [s for s in report.measured if s.name not in own]),
    ):
        drawn = [shape for shape in chosen if shape.length.mean is not None]
        xs, ys = [s.n_nodes for s in drawn], [s.length.mean or 0.0 for s in drawn]
        axes.plot(xs, ys, linestyle="none", marker=marker, color=colour, label=label)
        for shape in drawn:
            mean, low, high = shape.length.mean or 0.0, shape.length.low, shape.length.high
            axes.vlines(shape.n_nodes, low or mean, high or mean, color=colour, linewidth=1.2)
            if shape.name not in own:
                axes.annotate(
                    shape.name, (shape.n_nodes, mean), xytext=(5, -11), textcoords="offset points", fontsize=SMALL
                )
            table.append({"nodes": shape.n_nodes, "what": shape.name, "acceptance_length": mean})
    axes.set(xlabel="nodes sent to the target, root included", ylabel="tokens a verify step", ylim=(0.9, None))
    axes.margins(x=0.1)
    axes.set_title("What a budget of nodes buys")
    axes.legend(fontsize=8.5, loc="lower right")
    alt = "Expected acceptance length by nodes, with every measured shape as a point at its own nodes."
    caption = (
        "The line adds up the shares of the best paths; points above or below it were measured, with 95% intervals."
    )
    return Drawing(fig, pd.DataFrame(table), alt, caption)


def budget_steps(report: TreeReport) -> dict[int, str]:
    """Budgets between which a reader of the best tree chooses, and what each is expected to give."""
    best = report.best
    if best is None:
        return {}
    most = len(best.paths) + 1
    sizes = {n for n in (*STEPS, *(shape.n_nodes for shape in report.best_measured), most) if n <= most}
    return {n: f"{n} nodes: {best.expected_length(n):.2f}" for n in sorted(sizes)[-MOST_STEPS:]}


def drawn_tree(best: BestTree, budgets: Mapping[int, str]) -> Drawing:
    """The largest best tree, a column a depth; nodes of each of the `budgets` lie in a group of their own.

    A node stands in the row of its likeliest child, so that the chain of first children is a straight line. The group
    of a budget is named `step-1-`, `step-2-`, ... in the drawing: what a reader's choice of budget shows and hides.

    Args:
        budgets: the words of each number of nodes that may be chosen, ascending.
    """
    from matplotlib import pyplot as plt

    sizes = list(budgets)
    shares = dict(zip(best.paths, best.shares, strict=True))
    rows = rows_of(best.paths)
    group_of = {
        path: next((i for i, n in enumerate(sizes, start=1) if at <= n), len(sizes))
        for at, path in enumerate(best.paths, start=2)
    }
    depth = max(map(len, best.paths))
    height = max(rows.values()) + 1
    fig, axes = plt.subplots(figsize=(7.2, 1.0 + 0.24 * height))
    axes.plot([0], [rows[()]], marker="o", color=INK, markersize=6)
    axes.annotate("root", (0, rows[()]), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=SMALL)
    for path in best.paths:
        _draw_node(axes, path, rows, shares[path], f"step-{group_of[path]}-node-{'-'.join(map(str, path))}")
    axes.set(xlim=(-0.35, depth + 0.75), ylim=(height - 0.4, -1.0), xticks=range(1, depth + 1), yticks=[])
    axes.set_xlabel("depth")
    axes.set_title("The best tree: rank among siblings, share of steps that accepted the node")
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    table = [
        {
            "node": i,
            "path": ".".join(str(rank + 1) for rank in path),
            "depth": len(path),
            "share_accepted": shares[path],
        }
        for i, path in enumerate(best.paths, start=2)
    ]
    caption = "A dot's size is the share of steps that accepted the node. Choose a budget to see the tree it pays for."
    words = tuple(budgets.values())
    return Drawing(
        fig, pd.DataFrame(table), f"The best tree of {len(table) + 1} nodes. {' '.join(words)}.", caption, words
    )


def rows_of(paths: Sequence[Path]) -> dict[Path, int]:
    """The row of every node, the root's among them: a leaf has its own, another node that of its likeliest child."""
    children: dict[Path, list[Path]] = {(): []}
    for path in sorted(paths, key=lambda path: (len(path), path)):
        children[path] = []
        children[path[:-1]].append(path)
    rows: dict[Path, int] = {}
    n_rows = 0

    def place(path: Path) -> None:  # at most 8 deep
        nonlocal n_rows
        rows[path] = n_rows
        for child in children[path]:
            place(child)
        n_rows += not children[path]

    place(())
    return rows


def _draw_node(axes: Axes, path: Path, rows: dict[Path, int], share: float, group: str) -> None:
    x, y, above = len(path), rows[path], rows[path[:-1]]
    # Down first, then right: elbows of siblings share their upright.
    [edge] = axes.plot(
        [x - 0.72, x - 0.72, x],
        [above, y, y] if y != above else [y, y, y],
        color=FAINT,
        marker="",
        linestyle="-",
        linewidth=0.9,
    )
    start = axes.plot([x - 1, x - 0.72], [above, above], color=FAINT, marker="", linestyle="-", linewidth=0.9)[0]
    [dot] = axes.plot([x], [y], marker="o", color=MEASURED, markersize=3 + 7 * share**0.5)
    text = axes.annotate(
        f"{path[-1] + 1}: {share:.0%}", (x, y), xytext=(4, 2), textcoords="offset points", va="bottom", fontsize=SMALL
    )
    for part, artist in zip(("edge", "start", "dot", "text"), (edge, start, dot, text), strict=True):
        artist.set_gid(f"{group}-{part}")
