"""One planted cause for each lamp of `eagle3lab doctor draft`, in the form in which the whole examination is asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from broken_engines import ENGINE_FAULTS, H200_SPEED
from broken_heads import HEAD_CAUSES, Cause
from broken_weights import (
    dead_head,
    noisy_head,
    random_head,
    rare_vocabulary,
    reads_normed_output,
    rotated_target,
)
from eagle_pairs import write_eagle_pair
from random_pairs import rewrite_config

from lab.doctor.draft.case import Case
from lab.doctor.draft.lamps import LAMPS
from lab.pairs import shipped_pair
from lab.pairs.prompts import joined_prompts, prompts_for, prompts_from_ids
from lab.parity.faults import of_reach

N_PROMPTS, NEW_TOKENS, MOST_TOKENS = 16, 64, 200
SHIPPED = shipped_pair()
MARK = "<|9e3779b1 3c6ef362 daa66d13 78dde6e4 1715609f|>"  # nothing that the target or its head was trained on
ODD_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n" + MARK + "{% endfor %}"


@dataclass(frozen=True)
class Planted:
    """A case with one cause in it, and the same without the cause; None where nothing that is at hand mends it."""

    case: Case
    mended: Case | None = None


Plant = Callable[[Path], Planted]


def shipped_case(
    draft: Path = SHIPPED.draft, target: Path = SHIPPED.target, fault: str = "", n_prompts: int = N_PROMPTS
) -> Case:
    """Prompts of the shipped pair with a head and a target of its vocabulary."""
    prompts, _ = prompts_for(SHIPPED.target, limit=n_prompts, max_tokens=MOST_TOKENS)
    return Case(target, draft, tuple(prompts), max_new_tokens=NEW_TOKENS, device="cpu", fault=fault)


def _of_head(cause: Cause) -> Plant:
    def plant(folder: Path) -> Planted:
        broken = cause.make(folder)
        if broken.most_positions:
            of_reach.MOST_POSITIONS = broken.most_positions
        case, mended = shipped_case(broken.draft, fault=broken.fault), shipped_case()
        if not broken.prompt_tokens:
            return Planted(case, mended)
        ids = joined_prompts(broken.target, broken.n_prompts, broken.prompt_tokens)
        return Planted(replace(case, prompts=tuple(prompts_from_ids(ids))))

    return plant


def _last_tap(folder: Path) -> Planted:
    target, draft = reads_normed_output(shipped_case().text, SHIPPED.target, SHIPPED.draft, folder, 8.0)
    return Planted(shipped_case(draft, target), shipped_case(target=target))


def _method(folder: Path) -> Planted:
    target, draft = write_eagle_pair(folder)
    prompts, _ = prompts_for(target, limit=N_PROMPTS, max_tokens=MOST_TOKENS)
    right = Case(target, draft, tuple(prompts), max_new_tokens=NEW_TOKENS, device="cpu", method="eagle")
    rewrite_config(draft, architectures=["LlamaForCausalLMEagle3"])
    return Planted(replace(right, method="auto"), right)


def _coverage(folder: Path) -> Planted:
    answers = torch.tensor([token for answer in shipped_case().text.answers for token in answer])
    frequent = answers.bincount().argsort(descending=True)[:64]
    return Planted(shipped_case(rare_vocabulary(SHIPPED.draft, folder / "draft", frequent)), shipped_case())


def _metric(_: Path) -> Planted:
    case = shipped_case()
    counted = case.by_engine
    assert counted is not None
    return Planted(replace(case, claimed=round(counted.row_values()["mean_acceptance_rate"], 2)))


def _chat_template(folder: Path) -> Planted:
    """Prompts through a template that writes what the head has never read."""
    target, asked = folder / "target", folder / "prompts.jsonl"
    shutil.copytree(SHIPPED.target, target)
    rewrite = target / "tokenizer_config.json"
    rewrite.write_text(json.dumps(json.loads(rewrite.read_text()) | {"chat_template": ODD_TEMPLATE}))
    plain = shipped_case(n_prompts=24)  # two renderings are two texts: their lengths part by chance, too
    chats = [{"messages": [{"role": "user", "content": prompt.text}]} for prompt in plain.prompts]
    asked.write_text("\n".join(map(json.dumps, chats)))
    prompts, _ = prompts_for(target, str(asked), limit=len(chats), max_tokens=MOST_TOKENS)
    return Planted(replace(plain, target=target, prompts=tuple(prompts)), plain)


def slow_rows(folder: Path, factor: float = 4.0, from_batch: int = 4) -> Path:
    """The measured rows of an H200, with steps of drafts so many times as slow from a batch on."""
    rows = [json.loads(line) for line in H200_SPEED.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        is_slow = row["kind"] == "bench" and row["parameters"].get("batch", 0) >= from_batch
        if is_slow and row["parameters"].get("spec_k"):
            for name in [n for n in row["values"] if n.startswith("step_over_base")]:
                value = row["values"][name]
                row["values"][name] = [factor * v for v in value] if isinstance(value, list) else factor * value
    path = folder / "speed.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def with_window(case: Case, window: int, into: Path) -> Case:
    """The case with a head whose config asks for a window."""
    shutil.copytree(case.draft, into)
    rewrite_config(into, layer_types=["sliding_attention"], sliding_window=window)
    return replace(case, draft=into)


def _first_of_heads() -> dict[str, Plant]:
    """The first cause of each lamp of wiring and reach."""
    found: dict[str, Plant] = {}
    for cause in HEAD_CAUSES:
        found.setdefault(cause.name, _of_head(cause))
    return found


def _of_fault(fault: str) -> Plant:
    return lambda _: Planted(shipped_case(fault=fault), shipped_case())


PLANTS: dict[str, Plant] = {
    **_first_of_heads(),
    **{lamp: _of_fault(faults[0]) for lamp, faults in ENGINE_FAULTS.items()},
    "last_tap": _last_tap,
    "random_tensors": lambda folder: Planted(shipped_case(random_head(SHIPPED.draft, folder / "draft", "normal"))),
    "method": _method,
    "target_changed": lambda folder: Planted(
        shipped_case(target=rotated_target(SHIPPED.target, folder / "target", seed=7)), shipped_case()
    ),
    "training": lambda folder: Planted(shipped_case(noisy_head(SHIPPED.draft, folder / "draft", 0.8), n_prompts=24)),
    "coverage": _coverage,
    "dead_head": lambda folder: Planted(shipped_case(dead_head(SHIPPED.draft, folder / "draft", "constant"))),
    "chat_template": _chat_template,
    "metric": _metric,
    "slower": lambda folder: Planted(replace(shipped_case(), speed_rows=slow_rows(folder))),
}
assert PLANTS.keys() == {lamp.name for lamp in LAMPS}, "one plant a lamp"
