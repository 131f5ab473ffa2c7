"""Where settings are timed: on a GPU by graphs whose launches rotate over more than its cache, or on the CPU twin.

Times of the twin say nothing of a GPU. They let the whole path from sweep to entry run anywhere, under a name of their
own that no GPU's rows are ever compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle3core.kernels import Case, Launch, Tensors, Variant, launch, proof, tuned
from eagle3core.kernels.gemm import (
    Tiling,
    epilogue_of,
    gemm,
    n_columns,
    n_weight_rows,
    packed_inputs,
    scales_shape,
    workspace,
    workspace_bytes,
)
from lab.probes.kernels import bench
from lab.probes.sweeps.regimes import CARDS
from lab.rows import clock, gpus
from lab.rows.clock import Timing
from lab.rows.graph_clock import TIMER, Captured, capture, time_captured, time_graphs

Call = Callable[[], Any]
Clocks = dict[str, float | str | None]
_MOST_COPIES = 48


class Machine(Protocol):
    """Something that times settings.

    Attributes:
        gpu, timer: named in every row; rows of others are not compared with these.
        arch: compile target. device: of the operands. rounds: of a decision between two settings.
    """

    gpu: str
    timer: str
    arch: str
    device: torch.device
    rounds: int

    def clocks(self) -> Clocks: ...
    def copies(self, n_bytes: int) -> int: ...
    def call(self, launches: Sequence[Launch]) -> Call: ...
    def screen(self, alternatives: Sequence[Sequence[Call]]) -> list[Timing]: ...
    def decide(self, alternatives: Sequence[Sequence[Call]], rounds: int) -> list[list[float]]: ...


class GpuMachine:
    """This machine's GPU."""

    rounds = 15

    def __init__(self) -> None:
        self.arch, self.device, self.timer = launch.device_arch(), torch.device("cuda"), TIMER
        self.gpu = str(torch.cuda.get_device_name())

    def clocks(self) -> Clocks:
        """Of the device, now."""
        return gpus.clocks()

    def copies(self, n_bytes: int) -> int:
        """Sets of operands whose rotation no cache holds."""
        return min(_MOST_COPIES, max(2, -(-bench.ROTATED_BYTES // n_bytes)))

    def call(self, launches: Sequence[Launch]) -> Call:
        """What a graph captures."""
        return launch.bind(launches)

    def screen(self, alternatives: Sequence[Sequence[Call]]) -> list[Timing]:
        """Times of one call of each alternative, a replay of each in turn."""
        return time_graphs(alternatives)

    def decide(self, alternatives: Sequence[Sequence[Call]], rounds: int) -> list[list[float]]:
        """us a call by round and alternative, the order turned around every other round."""
        graphs = [capture(calls) for calls in alternatives]
        time_captured(graphs)  # to its clocks
        return [_in_turn(graphs, backwards=number % 2 == 1) for number in range(rounds)]


def _in_turn(graphs: Sequence[Captured], *, backwards: bool) -> list[float]:
    order = list(range(len(graphs)))
    times = {index: graphs[index].settled_us() for index in (reversed(order) if backwards else order)}
    return [times[index] for index in order]


class TwinMachine:
    """The emulator on this CPU."""

    gpu, timer, rounds = "CPU twin", f"emulator {clock.ON_CPU}", 3

    def __init__(self, arch: str = "sm_90a") -> None:
        from eagle3core.kernels import emulator

        self.arch, self.device = arch, torch.device("cpu")
        self._execute = emulator.execute

    def clocks(self) -> Clocks:
        """Nobody asks a CPU."""
        return {"unknown": "not asked of a CPU"}

    def copies(self, n_bytes: int) -> int:
        """One: the emulator is far slower than any cache."""
        return 1

    def call(self, launches: Sequence[Launch]) -> Call:
        """Runs the kernels lane by lane."""
        return lambda: self._execute(launches)

    def screen(self, alternatives: Sequence[Sequence[Call]]) -> list[Timing]:
        """Times of one call of each alternative, in turn."""
        columns = zip(*self.decide(alternatives, 1), strict=True)
        return [Timing(times, self.timer, warmup=0) for times in columns]

    def decide(self, alternatives: Sequence[Sequence[Call]], rounds: int) -> list[list[float]]:
        """us a call by round and alternative."""
        return [[self._us(calls[0]) for calls in alternatives] for _ in range(rounds)]

    def _us(self, call: Call) -> float:
        return clock.measure(call, warmup=0, repeats=1).median_us


# ---- operands


def operands(op: str, case: Case, seed: int, device: torch.device) -> Tensors:
    """Fresh inputs of a case; of a GEMM with W packed already."""
    inputs = CARDS[op].example(case, proof.generator(seed, device), device)
    return packed_inputs(case, inputs) if op == "gemm" else inputs


def launches_of(
    op: str, arch: str, case: Case, inputs: Tensors, outputs: Tensors, setting: tuned.Setting,
    scratch: tuple[Tensor, Tensor] | None = None,
) -> list[Launch]:  # fmt: skip
    """The kernels of a case under a setting; `scratch` of GEMMs, which all of a machine's may share."""
    if op == "attention":
        return list(CARDS[op].launches(arch, case, inputs, outputs, **setting))
    named = ("x", "w", "y")
    others = {name: tensor for name, tensor in {**inputs, **outputs}.items() if name not in named}
    return gemm(
        arch, epilogue_of(case), x=inputs["x"], w=inputs["w"], y=outputs["y"], k=case["k"],
        packed=bool(case.get("packed")), weight_rows=n_weight_rows(case), tiling=Tiling(**setting), scratch=scratch,
        q_heads=case.get("q_heads", 0), kv_heads=case.get("kv_heads", 0), operands=others,
    )  # fmt: skip


def variants_of(op: str, arch: str, case: Case, setting: tuned.Setting) -> list[Variant]:
    """The kernels that `launches_of` would run, found without operands."""
    if op == "attention":
        found = CARDS[op].variants_of
        assert found is not None, "the card says which variants a case needs"
        return list(found(arch, case, **setting))
    meta = torch.device("meta")
    dtype = torch.bfloat16 if case["dtype"] == "bf16" else torch.float16
    units = -(-case["k"] // 32) * 32

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=meta)

    inputs = {"x": empty(case["m"], case["k"]), "w": empty(n_weight_rows(case), units if case["packed"] else case["k"])}
    if case.get("fp8"):
        scales = torch.empty(scales_shape(case), device=meta)
        if case["fp8"] == "blocks":
            scales = scales.view(n_weight_rows(case) // 16, -1, 2)
        inputs |= {"w": inputs["w"].to(torch.float8_e4m3fn), "scales": scales}
    outputs = {"y": empty(case["m"], n_columns(case))}
    scratch = workspace(meta, workspace_bytes(case["m"], case["k"]))
    made = launches_of(op, arch, case, inputs, outputs, setting, scratch)
    return [one.variant for one in made]


def same_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether outputs are equal bit for bit, places that nobody wrote included."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return all(
        torch.equal(ours[name].view(whole[ours[name].element_size()]), other.view(whole[other.element_size()]))
        for name, other in theirs.items()
    )
