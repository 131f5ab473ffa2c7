"""What an op card and a kernel launch are: plain values that need neither CUDA nor Numba.

A card says what an op computes (`reference`), how a GPU computes it (`launches`: a pure function from tensors to a list
of `Launch` values), what it must cost, and how to make fresh inputs. The registry's tests, compile checks, benchmarks
and plots are derived from these fields. A `Launch` is executed by `emulator.execute` (CPU, lane by lane) or by
`launch.bind` (GPU, prebound); both read the same values, so what the tests run is what the GPU runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import signature
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from eagle3core.errors import InvariantViolated, KernelLimit

ARCHES = ("sm_80", "sm_90a", "sm_100", "sm_120")
# Shared memory a block may ask for, bytes. Source: CUDA C++ Programming Guide, table of technical specifications.
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024, "sm_100": 227 * 1024, "sm_120": 99 * 1024}
# Shared memory of one multiprocessor, bytes; each resident block also takes 1 KB.
SHARED_BYTES_SM = {"sm_80": 164 * 1024, "sm_90a": 228 * 1024, "sm_100": 228 * 1024, "sm_120": 100 * 1024}
DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
E4M3 = torch.float8_e4m3fn  # of weights, or of a cache: a byte a value, and a scale that lies elsewhere
# Compile targets by the major number of a compute capability: those the kernels were written and checked for.
ARCH_BY_MAJOR = {8: "sm_80", 9: "sm_90a", 10: "sm_100", 12: "sm_120"}
PLAIN_TORCH = "run in plain torch: device='cpu', or weights that are not packed"  # the remedy where kernels end

Role = Literal["const", "in", "out", "inout", "counter", "i32", "i64", "f32"]
Value = Tensor | int | float | None


def arch_of(capability: tuple[int, int]) -> str:
    """The compile target that serves a device of this compute capability.

    Raises:
        KernelLimit: a capability without one: below 8.0 the asynchronous copies and bf16 tensor cores these kernels use
            do not exist, and machine code of one major number does not run on another.
    """
    major, minor = capability
    if major not in ARCH_BY_MAJOR:
        known = ", ".join(f"{each}.x" for each in ARCH_BY_MAJOR)
        raise KernelLimit(f"compute capability is {major}.{minor}", f"one of {known}", PLAIN_TORCH)
    return ARCH_BY_MAJOR[major]


def overlaps(arch: str) -> bool:
    """Whether kernels for `arch` may use programmatic dependent launch."""
    return arch != "sm_80"


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter.

    Attributes:
        name: its name in the kernel.
        role: `const` the address of data that no kernel of a step writes (it may be read before the kernel before has
            finished); `in`, `out`, `inout` addresses of data read, written, both; `counter` of words that blocks count
            at, all of them before they let the next kernel start, so that launches which overlap count one after the
            other; `i32`, `i64`, `f32` plain numbers.
    """

    name: str
    role: Role

    @property
    def is_address(self) -> bool:
        return self.role in ("const", "in", "out", "inout", "counter")

    @property
    def kind(self) -> str:
        """The machine type: i32, i64 or f32."""
        return "i64" if self.is_address else self.role


def parameters(text: str) -> tuple[Parameter, ...]:
    """Parameters from "x:in w:const y:out rows:i32"."""
    made = []
    for item in text.split():
        name, _, role = item.partition(":")
        if role not in get_args(Role):
            raise InvariantViolated(f"parameter {item!r}", f"name:role with role in {get_args(Role)}", "fix the card")
        made.append(Parameter(name, role))  # type: ignore[arg-type]
    return tuple(made)


@dataclass(frozen=True)
class Variant:
    """One compile-time configuration of a kernel.

    Attributes:
        name: unique in the package, fit for a file name.
        make: `make(isa, **constants)` gives the kernel as a plain Python function; `isa` is `ptx` or `emulator`.
        constants: what the factory specialises on.
        parameters: the kernel's parameters in order.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        blocks_per_sm: resident blocks the compiler must leave registers for.
        max_registers: most registers a thread may need.
        instructions: SASS instructions that must appear, with their least count, e.g. {"HMMA": 2}.
        dependent: the kernel waits for the kernel before by itself, so it may be launched to overlap with it.
        rounds_itself: several kernels promise the same bits, so the source says (`fused`, `product`) where a product
            that is added to something is rounded, and the compiler must not have merged any by its own choice.
        cluster: blocks that run side by side and reach each other's shared memory; they divide the grid.
    """

    name: str
    make: Callable[..., Callable[..., None]]
    constants: Mapping[str, Any]
    parameters: tuple[Parameter, ...]
    threads: int
    shared_bytes: int = 0
    blocks_per_sm: int = 1
    max_registers: int = 255
    instructions: Mapping[str, int] = field(default_factory=dict)
    dependent: bool = False
    rounds_itself: bool = False
    cluster: tuple[int, int, int] = (1, 1, 1)

    def launch(self, grid: tuple[int, ...], **values: Value) -> Launch:
        """A launch of this variant, `grid` blocks, with every parameter by name."""
        names = [p.name for p in self.parameters]
        if set(values) != set(names):
            odd = sorted(set(values) ^ set(names))
            raise InvariantViolated(f"{self.name} was launched with {odd} missing or unknown", f"{names}", "fix the op")
        x, y, z = (*grid, 1, 1)[:3]
        return Launch(self, (x, y, z), tuple(values[name] for name in names))


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid and its operands: everything but the stream.

    Attributes:
        values: one per parameter: a contiguous tensor (its address is passed), None (address 0), or a number.
        overlap: launch before the previous kernel has finished. Set it to False for the first kernel after one that
            writes data which is `const` here.
    """

    variant: Variant
    grid: tuple[int, int, int]
    values: tuple[Value, ...]
    overlap: bool = True

    @property
    def operands(self) -> dict[str, Any]:
        """The values by parameter name."""
        return dict(zip((p.name for p in self.variant.parameters), self.values, strict=True))


@dataclass(frozen=True)
class Call:
    """One use of an op in a program: what it computes, and the kernels that compute it.

    Attributes:
        op: name of the op.
        operands: tensors and numbers by the names of the op's parameters.
        meaning: computes the outputs in plain torch, in place, on any device and in any dtype.
        launches: computes the same on a GPU; empty where no kernels run.
    """

    op: str
    operands: Mapping[str, Any]
    meaning: Callable[[], None]
    launches: tuple[Launch, ...] = ()


_signature_of = cache(signature)  # a program has hundreds of calls of a few ops


class Op(NamedTuple):
    """An op as programs use it: one signature, two implementations.

    Attributes:
        name: of the op.
        launcher: `launcher(arch, *operands)` gives the kernels, in order; checks what they are made for.
        meaning: `meaning(*operands)` computes the same outputs in plain torch, in place.
    """

    name: str
    launcher: Callable[..., Sequence[Launch]]
    meaning: Callable[..., None]

    def call(self, arch: str | None, *operands: Any, **named: Any) -> Call:
        """The op over its operands; without an `arch` by its meaning alone, so no limit of a kernel applies.

        Raises:
            KernelLimit: the kernels for `arch` are not made for these operands.
        """
        bound = _signature_of(self.meaning).bind(*operands, **named).arguments
        bound.update(bound.pop("operands", {}))
        launches = () if arch is None else tuple(self.launcher(arch, *operands, **named))
        return Call(self.name, bound, partial(self.meaning, *operands, **named), launches)


@dataclass(frozen=True)
class Cost:
    """What an op must move and compute at least.

    Attributes:
        bytes: global memory bytes that have to be read or written once.
        flops: multiplications and additions.
        dependent_passes: kernels, or grid-wide hand-overs, of which each must wait for the one before.
    """

    bytes: int
    flops: int = 0
    dependent_passes: int = 1

    def floor_us(self, gb_per_s: float) -> float:
        """Time in us that the bytes take at `gb_per_s`."""
        return self.bytes / gb_per_s / 1e3


Tensors = dict[str, Tensor]
Case = Mapping[str, Any]


@dataclass(frozen=True)
class Card:
    """One GPU op.

    A case is a mapping of shape names and options. Inputs and outputs are tensors by name.

    Attributes:
        name: of the op; also its module's.
        equation: what it computes, one line.
        source: paper and section, or requirement handle.
        example: `example(case, generator, device)` fresh random inputs, floating ones in the case's dtype.
        outputs: `outputs(case, inputs)` output tensors, poisoned (`poison`).
        reference: `reference(case, inputs)` the same outputs in plain torch, at whatever precision the inputs have.
        launches: `launches(arch, case, inputs, outputs, **setting)` the kernels, in order; a setting holds
            order-neutral parameters only.
        cost: of a case.
        order: parameters that set the order of a reduction, with the one value the engine uses for each.
        neutral: order-neutral parameters and what they may be.
        cases: tiny odd cases for the emulator; each is one fast test.
        slow_cases: more of them for the slow ring.
        settings: order-neutral settings under which all bits must stay the same.
        shapes: cases worth measuring on a GPU.
        variants: `variants(arch)` what to compile in the fast ring and ahead of time.
        slow_variants: the remaining variants that `launches` can choose.
        hand_counts: cases with their cost counted by hand.
        exact: outputs that must equal the reference bit for bit.
        invariants: `invariants(case, inputs, outputs)` further promises that the outputs break, in words.
        alone: `alone(case, inputs, row)` the case and inputs of that row by itself; None if rows do not exist.
        row_of: `row_of(case, inputs, outputs, row)` what of the outputs belongs to that row.
        n_rows: `n_rows(case)`.
        variants_of: `variants_of(arch, case, **setting)` the variants that `launches` uses for a case, found without
            tensors, so that a machine with no GPU can compile what the benchmark of `shapes` will need.
        sweep: `sweep(arch, case)` order-neutral settings worth timing against each other.
    """

    name: str
    equation: str
    source: str
    example: Callable[[Case, torch.Generator, torch.device], Tensors]
    outputs: Callable[[Case, Tensors], Tensors]
    reference: Callable[[Case, Tensors], Tensors]
    launches: Callable[..., Sequence[Launch]]
    cost: Callable[[Case], Cost]
    variants: Callable[[str], Sequence[Variant]]
    cases: tuple[Case, ...]
    shapes: tuple[Case, ...]
    hand_counts: tuple[tuple[Case, Cost], ...]
    order: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, str] = field(default_factory=dict)
    slow_cases: tuple[Case, ...] = ()
    settings: tuple[Mapping[str, Any], ...] = ({},)
    slow_variants: Callable[[str], Sequence[Variant]] = lambda arch: ()
    exact: frozenset[str] = frozenset()
    invariants: Callable[[Case, Tensors, Tensors], list[str]] = lambda case, inputs, outputs: []
    alone: Callable[[Case, Tensors, int], tuple[Case, Tensors]] | None = None
    row_of: Callable[[Case, Tensors, Tensors, int], Tensors] | None = None
    n_rows: Callable[[Case], int] = lambda case: 1
    variants_of: Callable[..., Sequence[Variant]] | None = None
    sweep: Callable[[str, Case], Sequence[Mapping[str, Any]]] = lambda arch, case: ()


def poison(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that shows where it was not written: NaN, or an improbable integer."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)
    return torch.full(shape, -0x5A5A5A5B if dtype == torch.int32 else -0x5A, dtype=dtype, device=device)


def case_id(case: Case) -> str:
    """A case on one line, for test names and rows."""
    return " ".join(f"{key}={value}" for key, value in case.items())
