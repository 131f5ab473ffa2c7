"""Options of training a pair."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lab.options.fields import Options, option

SizeName = Literal["shipped", "nano", "tiny"]


class TrainOptions(Options):
    """Train a (target, EAGLE-3 draft) pair.

    Attributes:
        save_every: steps between saved states.
        bar: draw a progress bar; None: only on a terminal.
        stop_after: (stage, step) to stop at, as Ctrl-C would.

    A run with --minutes does not repeat bit for bit: its schedules shrink to fit.
    """

    size: SizeName = option("shipped", "of the pair, and how long it trains")
    out: Path = option("pair", "folder of the result", metavar="DIR")
    corpus: Path | None = option(
        None, "text file, folder or written corpus; default: Python's library", metavar="FILE|DIR"
    )
    write_corpus: Path | None = option(None, "write the corpus to a file and stop", metavar="FILE")
    device: str = option("cpu", "cpu, cuda, cuda:1, ...")
    seed: int = option(0, "of weights, windows and dropout", ge=0)
    target_steps: Annotated[int, Field(ge=1)] | None = option(
        None, "instead of the size's own", metavar="N", allowed="a whole number of at least 1"
    )
    draft_steps: Annotated[int, Field(ge=1)] | None = option(
        None, "instead of the size's own", metavar="N", allowed="a whole number of at least 1"
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = option(
        None, "of the target while it trains", metavar="P", allowed="from 0 to below 1; 0.1 to 0.3 suit a small corpus"
    )
    minutes: Annotated[float, Field(ge=0.05, allow_inf_nan=False)] | None = option(
        None, "limit for the whole run", metavar="M", allowed="a number of at least 0.05"
    )
    resume: bool = option(True, "go on with the run in --out (the default), or start it anew")
    save_every: int = 200
    bar: bool | None = None
    stop_after: tuple[str, int] | None = None
