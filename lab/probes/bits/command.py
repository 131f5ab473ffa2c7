"""`eagle3lab inspect bits`: two runs of the same prompts, sentences, and a strip of stages by position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from eagle3core import Engine, EngineConfig, SpeculativeConfig
from lab.acceptance.shapes import PLAIN, shape_named
from lab.errors import EXIT_GATE_FAILED, EXIT_PASSED
from lab.options.bits import InspectBitsOptions
from lab.pairs.prompts import prompts_for
from lab.parity.inputs import chosen_pair
from lab.probes.bits.compare import ABSENT, DIFFERS, Strip, sentences, strips_of, worst
from lab.probes.bits.hashes import Hashes, read_hashes, record_hashes, write_hashes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAVED = ".safetensors"
MARKS = {0: ".", DIFFERS: "x", ABSENT: " "}
WIDEST = 100  # columns of the strip in a terminal


def run(options: InspectBitsOptions) -> int:
    """Prints what differs; 0 if no bit does, else 1."""
    sides = (
        (options.one, options.one_batch, options.one_chunk),
        (options.other, options.other_batch, options.other_chunk),
    )
    runs = [_hashes(options, *side) for side in sides]
    if options.save is not None:
        write_hashes(options.save, runs[1])
    strips = strips_of(*runs)
    names = [name if name.endswith(SAVED) else f"{name} x {batch}" for name, batch, _ in sides]
    print("\n".join([*sentences(strips, *names), "", *drawn(worst(strips))]))
    if options.figure is not None:
        from lab.figures import use_style  # matplotlib is slow to import

        use_style()
        options.figure.parent.mkdir(parents=True, exist_ok=True)
        strip_figure(worst(strips), *names).savefig(options.figure)
    return EXIT_GATE_FAILED if any(strip.n_different for strip in strips) else EXIT_PASSED


def _hashes(options: InspectBitsOptions, name: str, batch: int, chunk: int) -> list[Hashes]:
    """One side: read from its file, or run."""
    if name.endswith(SAVED):
        return read_hashes(Path(name))
    target, draft = chosen_pair(options.target, options.draft)
    found, _ = prompts_for(
        target, options.prompts, limit=options.n_prompts, max_tokens=options.max_prompt_tokens,
        chat_template=options.chat_template,
    )  # fmt: skip
    prompts = [list(prompt.ids) for prompt in found]
    engine = engine_of(target, draft, name, options, batch=batch, chunk=chunk, longest=max(map(len, prompts)))
    return record_hashes(engine, prompts, options.max_new_tokens)


def engine_of(
    target: Path, draft: Path, name: str, options: InspectBitsOptions, *, batch: int, chunk: int, longest: int
) -> Engine:
    """An engine that drafts the shape of that name.

    Raises:
        ExperimentError: no such shape. ConfigError, CheckpointError: the pair cannot be run so.
    """
    shape = shape_named(name)
    spec = None if shape.kind == PLAIN else SpeculativeConfig(model=str(draft), **shape.settings)
    room = spec.tokens_in_flight if spec else 1
    config = EngineConfig(
        dtype=options.dtype, device=options.device, session_len=longest + options.max_new_tokens + room,
        max_batch_size=batch, prefill_chunk=chunk, speculative_config=spec,
    )  # fmt: skip
    return Engine.from_pretrained(target, config)


def drawn(strip: Strip) -> list[str]:
    """The strip as text: a line a stage, a column a position or several, of which the worst is shown."""
    per_column = -(-strip.cells.shape[1] // WIDEST)
    width = max(map(len, strip.stages))
    lines = [
        f"{stage:>{width}}  {''.join(_mark(row[i : i + per_column]) for i in range(0, len(row), per_column))}"
        for stage, row in zip(strip.stages, strip.cells.tolist(), strict=True)
    ]
    each = "a position" if per_column == 1 else f"{per_column} positions"
    return [*lines, f"{'':>{width}}  a column is {each}; . equal, x differs, blank: not computed in both runs"]


def _mark(cells: Sequence[int]) -> str:
    return MARKS[DIFFERS] if DIFFERS in cells else MARKS[0] if 0 in cells else MARKS[ABSENT]


def strip_figure(strip: Strip, one: str, other: str) -> Figure:
    """Stages by position: equal rows light, different ones dark, rows that one run lacks left out."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    from lab.figures import FAINT, colour_of

    figure, axes = plt.subplots(figsize=(7.2, 1.2 + 0.18 * len(strip.stages)))
    colours = ListedColormap(["#00000018", colour_of("bad"), "#00000000"])
    axes.imshow(strip.cells.numpy(), aspect="auto", interpolation="none", cmap=colours, vmin=0, vmax=2)
    axes.set_yticks(range(len(strip.stages)), strip.stages, fontsize=7)
    axes.set_xlabel("position")
    axes.axvline(strip.n_prompt - 0.5, color=FAINT, linestyle="--")
    axes.grid(visible=False)
    n = strip.n_different
    axes.set_title(f"{one} beside {other}: " + (f"{n} rows differ" if n else "no bit differs"))
    return cast("Figure", figure)
