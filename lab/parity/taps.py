"""Recorded stages on disk: ours for another system to check against, or another system's for us.

One safetensors file; names, shapes and the tap convention are described in docs/engine.md, and the file's own metadata
says which tokens it was made with, so that two files of different runs are never compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lab.errors import EXIT_PASSED, ExperimentError, NotComparable
from lab.options.exchange import TapsOptions
from lab.parity import inputs
from lab.parity.derived import as_programs_have_it, without_q
from lab.parity.recording import PairUnderTest, record

# In files of schema 1, which a plain model can write, draft.attn is attention's output; since 2 it is the residual
# stream after it, as programs have it, and there is no draft.mlp.
PLAIN_SCHEMA, SCHEMA = "1", "2"


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
    recordings = record(pair, prompts, k=k, steps=steps, last_states=True)
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
        ExperimentError: the file is missing, cut short, or lacks the metadata of docs/engine.md.
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
            f"{file.name} has no metadata {', '.join(missing)}", "the keys of docs/engine.md", "add them when recording"
        )
    if metadata["schema"] not in (PLAIN_SCHEMA, SCHEMA):
        allowed = f"schema {PLAIN_SCHEMA!r} or {SCHEMA!r}"
        raise NotComparable(f"{file.name} has schema {metadata['schema']!r}", allowed, "record it with this version")
    try:
        own_prompts, own_k, own_steps = json.loads(metadata["prompts"]), int(metadata["k"]), int(metadata["steps"])
    except ValueError as error:
        raise ExperimentError(
            f"{file.name} has metadata that cannot be read: {error}",
            "prompts as JSON lists of token ids, k and steps as whole numbers",
            "record it again",
        ) from error
    if own_prompts != [list(prompt) for prompt in prompts]:
        raise NotComparable(
            f"{file.name} was recorded with other prompts", "the same token ids", "give the prompts it was made with"
        )
    if own_k != k or own_steps < steps:
        raise NotComparable(
            f"{file.name} holds {own_steps} steps of {own_k} drafts",
            f"at least {steps} steps of {k} drafts",
            "choose k and steps as recorded",
        )
    prefixes = [f"prompt{i}/" for i in range(len(prompts))]
    recorded = [
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for prefix in prefixes
    ]
    as_now = without_q if metadata["schema"] == SCHEMA else as_programs_have_it
    return [as_now(one) for one in recorded]


def run(options: TapsOptions) -> int:
    """`eagle3lab taps`: record a pair and write the file; the exit code."""
    target, draft = inputs.chosen_pair(options.target, options.draft)
    limits = {"n_prompts": options.n_prompts, "max_tokens": options.max_prompt_tokens}
    prompts = inputs.stage_prompt_ids(target, options.prompts, **limits, chat_template=options.chat_template)
    path = write_taps(
        target,
        draft,
        options.out,
        prompts=prompts.ids,
        dtype=options.dtype,
        device=options.device,
        k=options.spec_k,
        steps=options.steps,
        capture_layers=options.capture_layers or None,
        capture_convention=options.capture_convention,
    )
    print(f"{path.name}: {prompts.source}, {options.steps} steps of spec-{options.spec_k} in {options.dtype}")
    return EXIT_PASSED
