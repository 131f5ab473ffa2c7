"""Recorded stages on disk: ours for another system to check against, or another system's for us.

One safetensors file; names, shapes and the tap convention are described in docs/taps.md, and the file's own metadata
says which tokens it was made with, so that two files of different runs are never compared.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lab.errors import ExperimentError, NotComparable
from lab.parity import inputs
from lab.parity.recording import DTYPES, PairUnderTest, record

SCHEMA = "1"


def write_taps(
    target_dir: str | Path,
    draft_dir: str | Path,
    out: str | Path,
    *,
    prompts: Sequence[Sequence[int]],
    dtype: str = "float32",
    device: str = "auto",
    k: int = 3,
    steps: int = 3,
    capture_layers: tuple[int, ...] | None = None,
    capture_convention: str | None = None,
) -> Path:
    """The file `out` with every stage of the engine on `prompts`.

    Args:
        target_dir, draft_dir: checkpoint directories.
        out: a path ending in ".safetensors".
        prompts: token ids, at least two a prompt.
        dtype, device: of the engine.
        k: drafts a step.
        steps: speculative steps kept.
        capture_layers, capture_convention: explicit tap ids.

    Raises:
        ExperimentError: an unusable prompt or dtype, or another ending.
    """
    path = Path(out)
    if path.suffix != ".safetensors":
        raise ExperimentError(f"out is {path.name!r}", "a name ending in .safetensors", "rename the output")
    pair = PairUnderTest(Path(target_dir), Path(draft_dir), dtype, device, capture_layers, capture_convention)
    recordings = record(pair, prompts, k=k, steps=steps)
    tensors = {
        f"prompt{i}/{name}": tensor.contiguous()
        for i, recording in enumerate(recordings)
        for name, tensor in recording.tensors.items()
    }
    metadata = {
        "schema": SCHEMA,
        "system": "eagle3lab",
        "dtype": dtype,
        "k": str(k),
        "steps": str(steps),
        "prompts": json.dumps([list(prompt) for prompt in prompts]),
        "capture": json.dumps({"layers": capture_layers, "convention": capture_convention}),
        "shapes": json.dumps({name: list(tensor.shape) for name, tensor in tensors.items()}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata=metadata)
    return path


def read_taps(path: str | Path, prompts: Sequence[Sequence[int]], *, k: int, steps: int) -> list[dict[str, Tensor]]:
    """Recorded tensors by "<pass>/<stage>", a dictionary a prompt.

    Raises:
        ExperimentError: the file is missing, cut short, or lacks the metadata of docs/taps.md.
        NotComparable: it was made with other prompts, another depth, fewer steps, or by a newer version.
    """
    file = Path(path)
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise ExperimentError(
            f"{file.name} cannot be read: {error}",
            "a safetensors file as `eagle3lab taps` writes it",
            "record it again",
        ) from error
    missing = [key for key in ("schema", "prompts", "k", "steps") if key not in metadata]
    if missing:
        raise ExperimentError(
            f"{file.name} has no metadata {', '.join(missing)}", "the keys of docs/taps.md", "add them when recording"
        )
    if metadata["schema"] != SCHEMA:
        raise NotComparable(
            f"{file.name} has schema {metadata['schema']!r}", f"schema {SCHEMA!r}", "record it with this version"
        )
    if json.loads(metadata["prompts"]) != [list(prompt) for prompt in prompts]:
        raise NotComparable(
            f"{file.name} was recorded with other prompts", "the same token ids", "give the prompts it was made with"
        )
    if int(metadata["k"]) != k or int(metadata["steps"]) < steps:
        raise NotComparable(
            f"{file.name} holds {metadata['steps']} steps of {metadata['k']} drafts",
            f"at least {steps} steps of {k} drafts",
            "choose k and steps as recorded",
        )
    prefixes = [f"prompt{i}/" for i in range(len(prompts))]
    return [
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for prefix in prefixes
    ]


def main(arguments: Sequence[str]) -> int:
    """`eagle3lab taps`: record a pair and write the file; the exit code."""
    given = _parser().parse_args(list(arguments))
    target, draft = inputs.chosen_pair(given.target, given.draft)
    n_prompts, most = given.n_prompts, given.max_prompt_tokens
    prompts = inputs.stage_prompt_ids(target, given.prompts, n_prompts=n_prompts, max_tokens=most)
    path = write_taps(
        target,
        draft,
        given.out,
        prompts=prompts.ids,
        dtype=given.dtype,
        device=given.device,
        k=given.spec_k,
        steps=given.steps,
        capture_layers=tuple(given.capture_layers) if given.capture_layers else None,
        capture_convention=given.capture_convention,
    )
    print(f"{path.name}: {prompts.source}, {given.steps} steps of spec-{given.spec_k} in {given.dtype}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eagle3lab taps", description="Write every stage of the engine to a file.")
    parser.add_argument("--target", default="", help="directory of the target; default: the shipped pair")
    parser.add_argument("--draft", default="", help="directory of the draft; default: the shipped pair")
    parser.add_argument("--out", required=True, help="the file to write, NAME.safetensors")
    parser.add_argument("--prompts", default="", help="prompt file (JSON lines); default: the shipped pair's")
    parser.add_argument("--n-prompts", type=int, default=5, help="how many of them (default 5)")
    parser.add_argument("--max-prompt-tokens", type=int, default=1024, help="longer prompts are cut (default 1024)")
    parser.add_argument("--spec-k", type=int, default=3, help="drafts a step (default 3)")
    parser.add_argument("--steps", type=int, default=3, help="speculative steps kept (default 3)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="default float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--capture-layers", type=int, nargs="+", help="explicit tap ids")
    parser.add_argument("--capture-convention", choices=("input", "output"), help="what those ids number")
    return parser
