"""What to train, as given by a caller or on the command line, checked before anything starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lab.errors import ExperimentError
from lab.training.sizes import PairSize, StageSize, find_size


@dataclass(frozen=True)
class TrainOptions:
    """What to train.

    Attributes:
        size: one of `lab.training.sizes.SIZES`.
        out: folder of the result.
        corpus: a text file, a folder of text files or a written corpus; None is the Python standard library.
        device: "cpu", "cuda", "cuda:1", ...
        seed: of weights, windows and dropout.
        target_steps, draft_steps, dropout: instead of the size's own.
        minutes: a limit for the whole run; schedules shrink to fit. Runs with a limit do not repeat bit for bit.
        resume: go on where an interrupted run of the same options stopped; False starts it anew.
        save_every: steps between saved states.
        bar: draw a progress bar; None: only on a terminal.
        stop_after: (stage, step) to stop at, as Ctrl-C would.
    """

    size: str = "shipped"
    out: Path = Path("pair")
    corpus: Path | None = None
    device: str = "cpu"
    seed: int = 0
    target_steps: int | None = None
    draft_steps: int | None = None
    dropout: float | None = None
    minutes: float | None = None
    resume: bool = True
    save_every: int = 200
    bar: bool | None = None
    stop_after: tuple[str, int] | None = None


def check_options(options: TrainOptions) -> None:
    """Refuse values that no run can use.

    Raises:
        ExperimentError: names the option, its value and what is allowed.
    """
    for name, value, least in (
        ("--target-steps", options.target_steps, 1),
        ("--draft-steps", options.draft_steps, 1),
        ("--minutes", options.minutes, 0.05),
        ("--seed", options.seed, 0),
    ):
        if value is not None and value < least:
            raise ExperimentError(f"{name} is {value}", f"at least {least}", f"raise {name}, or leave it out")
    if options.dropout is not None and not 0.0 <= options.dropout < 1.0:
        raise ExperimentError(f"--dropout is {options.dropout}", "from 0 to below 1", "0.1 to 0.3 suit a small corpus")
    try:
        torch.empty(1, device=options.device)
    except (RuntimeError, AssertionError) as reason:  # a CPU build of torch asserts
        raise ExperimentError(
            f"--device {options.device!r} cannot be used: {str(reason).splitlines()[0]}",
            "cpu, or cuda on a machine whose torch sees a GPU",
            "leave --device out, or install a CUDA build of torch",
        ) from reason


def resolved_size(options: TrainOptions) -> PairSize:
    """The size that was named, with the options' own steps and dropout.

    Raises:
        ExperimentError: no size has that name.
    """
    described = asdict(find_size(options.size))
    if options.dropout is not None:
        described["dropout"] = options.dropout
    for stage, steps in (("target", options.target_steps), ("draft", options.draft_steps)):
        described[stage] = StageSize(**{**described[stage], **({} if steps is None else {"steps": steps})})
    return PairSize(**described)
