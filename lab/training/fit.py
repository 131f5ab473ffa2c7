"""The loop both stages share: AdamW, warm-up and cosine, validation, the best weights kept, resumable at any step.

Step i draws its windows and its dropout from a seed made of (seed, i), so nothing random has to be stored: a run that
was interrupted and resumed takes the same steps as one that was not, bit for bit on a CPU. With a time limit the
schedule follows the clock as well, and only runs without one repeat exactly.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from lab.errors import RunFailed
from lab.training.progress import Reporter
from lab.training.sizes import StageSize

StepLoss = Callable[[torch.Generator], Tensor]
Evaluate = Callable[[], dict[str, float]]

_WARM_UP_SHARE = 0.04
_READ_LOSS_EVERY = 10  # reading a loss waits for the device


@dataclass(frozen=True)
class Plan:
    """How a stage trains: its name and size, its seed, how often it is validated and saved, and a time limit.

    Attributes:
        seconds: at most this long, the schedule shrunk to fit; None for no limit.
        tokens_per_step: for the speed shown.
    """

    stage: str
    size: StageSize
    seed: int
    evaluate_every: int
    save_every: int
    seconds: float | None = None
    tokens_per_step: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0


@dataclass
class Course:
    """Where a stage stands: what its state file keeps beside weights and optimiser.

    Attributes:
        step: optimiser steps taken.
        seconds: spent in them, over all resumed parts.
        best: the lowest validation loss so far, with its step and the other values of that validation.
        curve: one record per reading: stage, step, loss, and validation values where there were any.
    """

    step: int = 0
    seconds: float = 0.0
    best: dict[str, float] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)


class Interruption:
    """Turns Ctrl-C and termination into a request to stop after the step at hand, so that a state can be saved."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


class Fit:
    """One stage of training.

    Args:
        model: trained in place, on its device; holds the best weights when `run` returns.
        step_loss: the loss of one step, its windows drawn from the given generator.
        evaluate: validation values; "loss" among them decides which weights are best.
        plan: how.
        state_file: where the state is kept between steps; read when it exists.
        reporter: told about progress.
        stop_after: end as if interrupted after this many steps (tests of resuming).
    """

    def __init__(
        self,
        model: nn.Module,
        step_loss: StepLoss,
        evaluate: Evaluate,
        plan: Plan,
        state_file: Path,
        reporter: Reporter,
        stop_after: int | None = None,
    ) -> None:
        self.model, self.step_loss, self.evaluate, self.plan = model, step_loss, evaluate, plan
        self.state_file, self.reporter, self.stop_after = state_file, reporter, stop_after
        self.device = next(model.parameters()).device
        self.optimizer = _adamw(model, plan)
        self.course = Course()
        self.best_weights = _copied(model)
        self._started = time.monotonic()

    def run(self) -> Course:
        """Train to the end of the plan.

        Raises:
            RunFailed: interrupted (the state is saved), or the loss is no longer a number.
        """
        if self.state_file.exists():
            self._load()
        self.reporter.start(self.plan.stage)
        self._started = time.monotonic() - self.course.seconds
        devices = [self.device] if self.device.type == "cuda" else []
        with Interruption() as interruption, torch.random.fork_rng(devices):
            while self._share() < 1.0:
                self._take_step()
                if interruption.requested or self.course.step == self.stop_after:
                    self._save()
                    raise _interrupted(self.plan.stage, self.course.step)
        self.reporter.finish()
        self.model.load_state_dict(self.best_weights)
        return self.course

    def _share(self) -> float:
        """How much of the stage is done: by steps, or by the clock where that is further."""
        by_clock = self.course.seconds / self.plan.seconds if self.plan.seconds else 0.0
        return max(self.course.step / self.plan.size.steps, by_clock)

    def _take_step(self) -> None:
        plan, course = self.plan, self.course
        seed = plan.seed * 1_000_003 + course.step
        torch.manual_seed(seed)  # dropout
        rate = _learning_rate(plan.size, course.step, self._share())
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        loss = self.step_loss(torch.Generator().manual_seed(seed))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), plan.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        course.step += 1
        course.seconds = time.monotonic() - self._started
        last = self._share() >= 1.0
        if last or course.step % _READ_LOSS_EVERY == 0:
            self._read(loss, rate)
        if last or course.step % plan.evaluate_every == 0:
            self._validate()
        if course.step % plan.save_every == 0:
            self._save()

    def _read(self, loss: Tensor, rate: float) -> None:
        value = loss.item()
        if not math.isfinite(value):
            raise RunFailed(
                f"training {self.plan.stage}: the loss is {value} at step {self.course.step}",
                "a finite loss",
                "start again with another --seed, in a new --out",
            )
        self.course.curve.append(
            {"stage": self.plan.stage, "step": self.course.step, "loss": round(value, 5), "learning_rate": rate}
        )
        self.course.seconds = time.monotonic() - self._started
        speed = self.course.step * self.plan.tokens_per_step / max(self.course.seconds, 1e-9)
        note = f"step {self.course.step}/{self.plan.size.steps}  loss {value:.3f}  {speed:,.0f} tokens/s"
        if self.course.best:
            note += f"  best validation {self.course.best['loss']:.3f}"
        self.reporter.advance(min(self._share(), 1.0), note)

    def _validate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            values = self.evaluate()
        named = {f"validation_{key}": round(value, 5) for key, value in values.items()}
        self.course.curve.append({"stage": self.plan.stage, "step": self.course.step, **named})
        if not self.course.best or values["loss"] < self.course.best["loss"]:
            self.course.best = {**values, "step": self.course.step}
            self.best_weights = _copied(self.model)

    def _save(self) -> None:
        self.course.seconds = time.monotonic() - self._started
        state = {
            "course": asdict(self.course),
            "weights": self.model.state_dict(),
            "best_weights": self.best_weights,
            "optimizer": self.optimizer.state_dict(),
        }
        self.state_file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.state_file.with_name(self.state_file.name + ".partial")
        torch.save(state, partial)
        os.replace(partial, self.state_file)

    def _load(self) -> None:
        state = torch.load(self.state_file, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.best_weights = state["best_weights"]
        self.course = Course(**state["course"])
        self.reporter.say(f"training {self.plan.stage}: resumed at step {self.course.step}")


def _adamw(model: nn.Module, plan: Plan) -> torch.optim.AdamW:
    """Decay on matrices only: norms and vectors have no reason to shrink."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": plan.size.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.size.peak_lr, betas=plan.betas, fused=True)


def _learning_rate(size: StageSize, step: int, share: float) -> float:
    """Linear warm-up by steps, then a cosine to zero by the share that is done."""
    warm_up = max(1, round(_WARM_UP_SHARE * size.steps))
    return size.peak_lr * min((step + 1) / warm_up, 0.5 * (1.0 + math.cos(math.pi * min(share, 1.0))))


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _interrupted(stage: str, step: int) -> RunFailed:
    return RunFailed(
        f"training {stage} was interrupted after step {step}",
        "a run that reaches its last step",
        "run the same command again: it goes on from there",
    )
