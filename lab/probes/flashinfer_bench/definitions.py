"""A card as a definition: what it computes at sizes of which one varies, its inputs, its outputs, runnable references.

Everything is derived from the card. Tensors' shapes come from its example, made without data where that is possible.
Which axes vary is found by making the example again with one row more. Source: the models of the package
flashinfer-bench 0.1 (definition, workload, solution), Apache-2.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from eagle3core.kernels import Card, Case, Tensors, proof
from lab.errors import ExperimentError

AUTHOR = "eagle3lab"
_CPU = torch.device("cpu")
# The one size of a card's case that varies between the workloads of a definition; else rows, or else batch.
_VARIES = {"gemm": "m", "attention": "tokens"}
_FIXED = ("block_table", "open_chunk", "open_step")  # whose sizes hang together: every case is a definition
# What FlashInfer-Bench calls an op of the same kind, to group by.
_OP_TYPES = {"attention": "gqa_paged", "rms_norm": "rmsnorm", "sample": "sampling"}
# Sizes that integer inputs do not hang on, made small before data are made.
_SMALL = {
    "attention": {"dim": 64, "heads": 1, "kv_heads": 1},
    "gemm": {"k": 16, "norm": False},
    "compact_kv": {"layers": 1},
    "draft_input": {"width": 64},
    "embedding": {"width": 64},
    "feature_input": {"width": 64},
}
DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "bool")  # of the schema, and ours

_TEXT = '''"""{title}: {equation}

{what} Needs the package eagle3core. Source of the equation: {source}.
"""

import torch
{imports}

CASE = {case}{setting}


def run({inputs}):
    case = dict(CASE{varying})
    inputs = dict({named})
{body}
    return {outputs}
'''


Place = tuple[str, str, int]  # "inputs" or "outputs", a tensor's name, an axis


@dataclass(frozen=True)
class Shapes:
    """Shape and dtype of every input and output of a case.

    Attributes:
        is_by_values: values of the inputs say how large the outputs are.
    """

    inputs: Mapping[str, tuple[tuple[int, ...], str]]
    outputs: Mapping[str, tuple[tuple[int, ...], str]]
    is_by_values: bool = False


@dataclass(frozen=True)
class Workload:
    """One case of a card.

    Attributes:
        case: with every size, as the card takes it.
    """

    card: Card
    case: Case

    @cached_property
    def shapes(self) -> Shapes:
        """Of its tensors."""
        return shapes_of(self.card, self.case)

    @property
    def varying(self) -> str | None:
        """The size that varies between the workloads of one definition."""
        return self._varied[0]

    @property
    def rows_at(self) -> Sequence[Place]:
        """The axes that the varying size is the length of, of inputs first."""
        return self._varied[1]

    @cached_property
    def _varied(self) -> tuple[str | None, list[Place]]:
        """Found by one row more. An output that grows in another way could not be sized, so then nothing varies."""
        names = (_VARIES.get(self.card.name), "rows", "batch")
        name = next((each for each in names if each in self.case), None)
        if name is None or self.card.name in _FIXED or self.shapes.is_by_values:
            return None, []
        size, before = self.case[name], self.shapes
        after = shapes_of(self.card, {**self.case, name: size + 1})
        pairs = {
            (which, tensor, axis): (length, getattr(after, which)[tensor][0][axis])
            for which in ("inputs", "outputs")
            for tensor, (shape, _) in getattr(before, which).items()
            for axis, length in enumerate(shape)
        }
        found = [place for place, pair in pairs.items() if pair == (size, size + 1)]
        unsized = any(place[0] == "outputs" and a != b and place not in found for place, (a, b) in pairs.items())
        return (None, []) if unsized or not any(which == "inputs" for which, *_ in found) else (name, found)

    @property
    def constants(self) -> dict[str, Any]:
        """What is the same in all workloads of one definition, by name."""
        return {name: value for name, value in sorted(self.case.items()) if name != self.varying}

    @cached_property
    def definition(self) -> str:
        """Name of its definition, such as `gemm_bf16_k4096_store_n4096_packed`."""
        words = (_word(name, value) for name, value in self.constants.items())
        return "_".join([self.card.name, *filter(None, words)])

    def structure(self) -> Tensors:
        """Inputs that are no floating numbers, such as tables and masks: random ones would mean nothing."""
        if all("float" in dtype for _, dtype in self.shapes.inputs.values()):
            return {}
        small = {name: value for name, value in _SMALL.get(self.card.name, {}).items() if name in self.case}
        made = self.card.example({**self.case, **small}, proof.generator(0, _CPU), _CPU)
        return {name: tensor for name, tensor in made.items() if not tensor.is_floating_point()}


def shapes_of(card: Card, case: Case) -> Shapes:
    """Of a case's tensors, without data where no value is looked at. Outputs are the reference's.

    Raises:
        ExperimentError: the card cannot make the case.
        KeyError: the case lacks a size.
    """
    is_by_values = False
    for device in (torch.device("meta"), _CPU):
        with suppress(RuntimeError):  # of values that a tensor without data has not; with data all is there
            inputs = card.example(case, _generator(device), device)
            for outputs_of in (card.reference, card.outputs):
                with suppress(RuntimeError):
                    return Shapes(_described(inputs), _described(outputs_of(case, inputs)), is_by_values)
            is_by_values = True
    raise ExperimentError(f"card {card.name} cannot make {case}", "sizes of its own cases", "leave that row out")


def _generator(device: torch.device) -> Any:
    return proof.generator(0, device) if device == _CPU else None  # tensors without data need no random numbers


def _described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(each.shape), str(each.dtype).partition(".")[2]) for name, each in tensors.items()}


def _word(name: str, value: Any) -> str:
    """A constant of a case as a part of a name."""
    if value is False:
        return ""
    text = re.sub(r"\W+", "x", str(value).removeprefix("torch.")).strip("x")
    return name if value is True else text if isinstance(value, str) or "torch" in str(value) else f"{name}{text}"


@dataclass(frozen=True)
class Definition:
    """What the workloads of one name compute.

    Attributes:
        workloads: at least one, all of one card and of the same constants.
    """

    workloads: Sequence[Workload]

    @property
    def first(self) -> Workload:
        """The workload whose shapes name the axes."""
        return self.workloads[0]

    @property
    def op_type(self) -> str:
        """The group it is listed in."""
        return _OP_TYPES.get(self.first.card.name, self.first.card.name)

    @cached_property
    def axes(self) -> dict[str, int | None]:
        """Every axis and its length, None if it varies."""
        found: dict[str, int | None] = {}
        for which in ("inputs", "outputs"):
            for name, (shape, _) in getattr(self.first.shapes, which).items():
                for axis, length in enumerate(shape):
                    varies = any(getattr(each.shapes, which)[name][0][axis] != length for each in self.workloads)
                    named = self._axis(which, name, axis)
                    found[named] = None if varies or named == self.first.varying else length
        return found

    def _axis(self, which: str, name: str, axis: int) -> str:
        """An axis is named for the size that varies with it, or for its tensor."""
        varying = self.first.varying
        return varying if varying and (which, name, axis) in self.first.rows_at else f"{name}_{axis}"

    def to_json(self) -> dict[str, Any]:
        """As the schema has it."""
        card = self.first.card
        return {
            "name": self.first.definition,
            "op_type": self.op_type,
            "description": f"{card.equation}. Source: {card.source}.",
            "tags": [AUTHOR, f"card:{card.name}"],
            "axes": {
                name: {"type": "var"} if length is None else {"type": "const", "value": length}
                for name, length in self.axes.items()
            },
            "inputs": self._tensors("inputs"),
            "outputs": self._tensors("outputs"),
            "reference": self._source(
                "Reference in plain torch, on any device.",
                "from eagle3core.kernels import registry",
                f'    outputs = registry()["{card.name}"].reference(case, inputs)',
            ),
        }

    def _tensors(self, which: str) -> dict[str, Any]:
        tensors = getattr(self.first.shapes, which)
        return {
            self.output_name(name) if which == "outputs" else name: {
                "shape": [self._axis(which, name, axis) for axis in range(len(shape))], "dtype": dtype,
            }
            for name, (shape, dtype) in tensors.items()
        }  # fmt: skip

    def output_name(self, name: str) -> str:
        """An output that an input is named for has another name in the schema."""
        return f"{name}_after" if name in self.first.shapes.inputs else name

    def workload(self, which: Workload) -> dict[str, int]:
        """Lengths of the axes that vary."""
        lengths = {
            self._axis("inputs", name, axis): length
            for name, (shape, _) in which.shapes.inputs.items()
            for axis, length in enumerate(shape)
        }
        return {name: lengths[name] for name, length in self.axes.items() if length is None and name in lengths}

    def solution(self, name: str, setting: Mapping[str, Any]) -> dict[str, Any]:
        """Our kernels with a setting, the card's own choice where it is empty."""
        card = self.first.card
        source = self._source(
            "The kernels of eagle3core, compiled when first called, on the GPU that holds the inputs.",
            "from eagle3core.kernels import launch, registry",
            f'    card = registry()["{card.name}"]\n'
            "    outputs = card.outputs(case, inputs)\n"
            "    launch.execute(card.launches(launch.device_arch(), case, inputs, outputs, **SETTING))",
            f"\nSETTING = {dict(setting)!r}",
        )
        return {
            "name": name, "definition": self.first.definition, "author": AUTHOR,
            "description": ", ".join(f"{key} = {value}" for key, value in setting.items()) or "the engine's own choice",
            "spec": {
                "language": "python", "target_hardware": ["cuda"], "entry_point": "main.py::run",
                "dependencies": ["eagle3core"], "destination_passing_style": False,
            },
            "sources": [{"path": "main.py", "content": source}],
        }  # fmt: skip

    def _source(self, what: str, imports: str, body: str, setting: str = "") -> str:
        card, inputs, rows = self.first.card, list(self.first.shapes.inputs), self.first.rows_at
        varying = f", {self.first.varying}={rows[0][1]}.shape[{rows[0][2]}]" if rows else ""
        outputs = ", ".join(f'outputs["{name}"]' for name in self.first.shapes.outputs)
        return _TEXT.format(
            title=card.name, equation=card.equation, what=what, source=card.source, imports=imports, setting=setting,
            case=self.first.constants, inputs=", ".join(inputs), varying=varying, outputs=outputs, body=body,
            named=", ".join(f"{name}={name}" for name in inputs),
        )  # fmt: skip
