"""The products of a pass over so many rows, as an engine launches them, and the same ones by torch.

Up to `STEP_ROWS` rows are a step of as many sequences, more are a pass over one prompt. What packs rows for a product
counts with it; attention, norms and the head are left out, so each product reads what an earlier pass has left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from eagle3core.config import GenerationConfig
from eagle3core.kernels import Launch
from eagle3core.step import DeviceRunner, Product, Program, launches_of, products_of, step_program
from lab.errors import ExperimentError
from lab.probes.proofs.plans import planted_prompts
from lab.probes.proofs.subject import Setting, Subject

STEP_ROWS = 64  # of a step at most: an engine's largest batch
PROMPT = 64  # tokens before a step
WARM_STEPS = 2  # after which a step's rows hold what they usually do
_ROOM = 64  # tokens of a session beyond its prompt
_PASS, _HEAD, _PRODUCT = "target.", "target.head", "gemm_"


def setting_of(rows: int) -> Setting:
    """The engine whose pass has so many rows."""
    if rows <= STEP_ROWS:
        return Setting(0, rows, PROMPT + _ROOM)
    return Setting(0, 1, rows + _ROOM, chunk=rows, last_states=True)  # whole layers, the last one too


def layers_of(runner: DeviceRunner, rows: int) -> Program:
    """The stages of the target's layers in the pass over so many rows.

    Raises:
        ExperimentError: no pass of this engine has so many.
    """
    if rows <= STEP_ROWS:
        program = step_program(runner.emit, runner.target, runner.draft, runner.state, rows)
    else:
        found = [one for shape, one in runner.chunks.items() if shape.rows == rows]
        if not found:
            sizes = ", ".join(str(shape.rows) for shape in runner.chunks)
            raise ExperimentError(f"a pass of {rows} rows", f"1 to {STEP_ROWS}, or {sizes}", "name one of these")
        program = found[0]
    return tuple(stage for stage in program if stage.name.startswith(_PASS) and stage.name != _HEAD)


def launches_in(program: Program) -> list[Launch]:
    """Products and what packs rows for them, in order."""
    return [one for one in launches_of(program) if one.variant.name.startswith(_PRODUCT)]


def read_once(subject: Subject, rows: int) -> DeviceRunner:
    """The runner of an engine that has made the pass, so that its rows hold what a pass leaves."""
    setting = setting_of(rows)
    engine = subject.engine(setting)
    assert subject.tokens is not None, "the pair is planted"
    length = PROMPT if rows <= STEP_ROWS else rows
    for prompt in planted_prompts(subject.tokens, setting.batch, length):
        engine.add_request(prompt, GenerationConfig(_ROOM // 2, ignore_eos=True))
    for _ in range(WARM_STEPS + setting.batch):
        engine.step()
    return engine.runner


def by_torch(products: Sequence[Product], device: torch.device) -> Callable[[], None]:
    """`F.linear` for every product, in order, each with weights and rows of its own."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device, dtype=torch.bfloat16)
        return values.mul_(columns**-0.5)

    made = [(normal(one.m, one.k), normal(one.key.weight_rows, one.k)) for one in products]

    def run() -> None:
        for x, w in made:
            F.linear(x, w)

    return run


def products_in(program: Program) -> list[Product]:
    """The products of the layers, in order."""
    return list(products_of(program))
