"""A failed stage as a folder of its own: `repro.py`, which runs it again, and the tensors it is compared with.

Of a prompt only the first stage that failed is written: what comes before it agreed, so a repaired engine comes by the
same tokens to the same place, and what was expected there still holds. Later stages have a history that went wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lab.parity.judge import StageCell
from lab.parity.recording import PairUnderTest

MOST_STAGES = 3
MOST_BYTES = 4 << 20  # of a tensor; of a larger one the rows with the largest errors are kept

SCRIPT = '''"""{headline}

The engine runs the prompts again, and this stage is compared with what was expected of it: tensors.safetensors holds
the prompts, rows that are compared, what was expected and what the engine gave then, and the stage before.
Ends with 1 while they differ, with 0 once they agree. `--fault ""` leaves out a bug that was planted.
"""

import argparse
import sys
from pathlib import Path

from safetensors.torch import load_file

from lab.parity.recording import PairUnderTest, record

PROMPT, STAGE, N_ROWS = {prompt}, {stage!r}, {n_rows}
ALLOWED, ALLOWED_RELATIVE = {allowed!r}, {relative!r}  # largest error; l2 error over the l2 norm, where that failed
PAIR = {pair}
HOW = {how}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default={target!r})
    parser.add_argument("--draft", default={draft!r})
    parser.add_argument("--fault", default={fault!r})
    typed = parser.parse_args()
    stored = load_file(Path(__file__).parent / "tensors.safetensors")
    pair = PairUnderTest(Path(typed.target), Path(typed.draft), fault=typed.fault, **PAIR)
    prompts = [stored[f"prompt{{i}}"].tolist() for i in range({n_prompts})]
    now, expected = record(pair, prompts, **HOW)[PROMPT].tensors[STAGE], stored["expected"].double()
    if len(now) != N_ROWS or now.shape[1:] != expected.shape[1:]:
        print(f"{{STAGE}}: shape {{tuple(now.shape)}} where {{(N_ROWS, *expected.shape[1:])}} is expected")
        return 1
    error = now[stored["rows"]].double() - expected
    largest, relative = float(error.abs().max()), float(error.norm() / expected.norm())
    print(f"{{STAGE}}: largest error {{largest:.6g}}, was {was:.6g}, allowed {{ALLOWED:.6g}}")
    if ALLOWED_RELATIVE is not None:
        print(f"{{STAGE}}: relative error {{relative:.6g}}, allowed {{ALLOWED_RELATIVE:.6g}}")
    agrees = largest <= ALLOWED and (ALLOWED_RELATIVE is None or relative <= ALLOWED_RELATIVE)
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
'''


@dataclass(frozen=True)
class RunAgain:
    """All that a recording was made of.

    Attributes:
        pair: what ran. prompts: token ids. how: other arguments of `lab.parity.recording.record`.
    """

    pair: PairUnderTest
    prompts: Sequence[Sequence[int]]
    how: Mapping[str, Any]


@dataclass(frozen=True)
class Evidence:
    """A failed cell with its tensors.

    Attributes:
        cell: of them the pass and stage name the recorded tensor. got, expected: rows first.
        before: what the stage before gave, by its name; empty for the first.
        relative: allowed l2 error over the l2 norm of `expected`, where that is what failed.
    """

    cell: StageCell
    got: Tensor
    expected: Tensor
    before: Mapping[str, Tensor]
    relative: float | None = None

    @property
    def name(self) -> str:
        """Of the recorded tensor."""
        return "/".join(part for part in (self.cell.pass_name, self.cell.stage) if part)


def evidence_of(
    cells: Sequence[StageCell], ours: Sequence[Mapping[str, Tensor]], expected: Sequence[Mapping[str, Tensor]]
) -> tuple[Evidence, ...]:
    """The first failed cell of every prompt, of different stages, at most `MOST_STAGES`.

    A stage that one side lacks has nothing to be compared with and is left out.
    """
    found: dict[str, Evidence] = {}
    for prompt in range(len(ours)):
        own = [cell for cell in cells if cell.prompt == prompt]
        cell = next((cell for cell in own if cell.status != "pass"), None)
        if cell is None or cell.status == "missing" or cell.stage in found:
            continue
        name = f"{cell.pass_name}/{cell.stage}".removeprefix("/")
        got, wanted = ours[prompt][name], expected[prompt][name]
        place = own.index(cell)
        earlier = f"{own[place - 1].pass_name}/{own[place - 1].stage}".removeprefix("/") if place else ""
        before = {earlier: ours[prompt][earlier]} if earlier in ours[prompt] else {}
        if len(found) < MOST_STAGES:
            found[cell.stage] = Evidence(cell, got, wanted, before)
    return tuple(found.values())


def write_repros(evidence: Sequence[Evidence], again: RunAgain, folder: Path) -> list[Path]:
    """A folder a failed stage under `folder`; gives the scripts."""
    return [_write(one, again, folder / one.name.replace("/", "-")) for one in evidence]


def _write(one: Evidence, again: RunAgain, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    is_alike = one.got.shape == one.expected.shape
    rows = _rows(one.got, one.expected) if is_alike else torch.arange(len(one.expected))
    tensors = {f"prompt{i}": torch.tensor(list(prompt)) for i, prompt in enumerate(again.prompts)}
    tensors |= {
        "rows": rows,
        "expected": one.expected[rows].clone(),
        "got": (one.got[rows] if is_alike else one.got).clone(),
    }
    for name, tensor in one.before.items():
        n = max(1, MOST_BYTES // max(1, tensor[0].numel() * tensor.element_size()))
        tensors[f"before {name}"] = tensor[:n].clone()
    save_file(tensors, folder / "tensors.safetensors")
    pair = again.pair
    kept = {"dtype": pair.dtype, "device": pair.torch_device.type}
    kept |= {name: getattr(pair, name) for name in ("capture_layers", "capture_convention") if getattr(pair, name)}
    kept |= {} if pair.target_weights == "as_stored" else {"target_weights": pair.target_weights}
    text = SCRIPT.format(
        headline=f"{one.name} of prompt {one.cell.prompt}: {one.cell.reason}.",
        prompt=one.cell.prompt,
        stage=one.name,
        n_rows=len(one.expected),
        was=float("inf") if one.cell.max_abs is None else one.cell.max_abs,
        allowed=one.cell.tolerance or 0.0,
        relative=one.relative,
        how=dict(again.how),
        target=str(pair.target),
        draft=str(pair.draft),
        fault=pair.fault,
        pair=kept,
        n_prompts=len(again.prompts),
    )
    (folder / "repro.py").write_text(text, encoding="utf-8")
    return folder / "repro.py"


def _rows(got: Tensor, expected: Tensor) -> Tensor:
    """Rows to keep, ascending: all, or of a large tensor those with the largest errors."""
    error = (got.double() - expected.double()).abs().reshape(len(got), -1).amax(dim=1)
    bytes_a_row = expected[0].numel() * max(expected.element_size(), got.element_size())
    n = min(len(got), max(1, MOST_BYTES // max(1, bytes_a_row)))
    return error.nan_to_num(torch.inf).topk(n).indices.sort().values
