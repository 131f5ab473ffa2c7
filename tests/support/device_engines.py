"""Engines on the kernels' path over nano pairs, run on the CPU: by the emulator, or by what each launch means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from agreeing_pairs import write_agreeing_pair
from tiny_engines import Pair

from eagle3core import Engine, EngineConfig, SpeculativeConfig
from eagle3core.acceptance import AcceptanceRule
from eagle3core.checkpoint import load_draft, load_target
from eagle3core.config import TargetFormat
from eagle3core.speculative import CacheDtype, WeightFormat
from eagle3core.step.replay import EagerReplayer, Replayer
from eagle3core.step.run import DeviceRunner
from eagle3core.step.sizes import DeviceSizes
from eagle3core.step.tree import FlatTree, GrownTree, chain_tree
from eagle3core.trace import Trace
from eagle3core.weights import PackedDraft, PackedTarget, pack_checkpoints

NANO: dict[str, Any] = {
    "n_layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 64, "ffn": 64, "vocab": 256, "draft_vocab": 64,
    "taps": (0, 1, 2), "convention": "input", "eos": [], "dtype": torch.bfloat16,
}  # fmt: skip
CPU = torch.device("cpu")
BY_MEANING = EagerReplayer()  # every call computed in plain torch
ORDER = (2, 2)  # splits and streams of attention: few, for the emulator's sake


def write_nano_pair(directory: Path, **changes: Any) -> Pair:
    """Two layers of head size 64 over 256 tokens; the draft is right about half the time."""
    return write_agreeing_pair(directory, **{**NANO, **changes})


def packed_pair(
    pair: Pair, *, drafts: bool = True, method: str = "eagle3", draft_weights: WeightFormat = "as_stored",
    target_weights: TargetFormat = "as_stored",
) -> tuple[PackedTarget, PackedDraft | None]:  # fmt: skip
    """Both models packed in bf16."""
    target = load_target(pair[0], dtype=torch.bfloat16, keeps_fp8=target_weights != "dequantised")
    draft = load_draft(pair[1], target.geometry, dtype=torch.bfloat16, method=method) if drafts else None
    weights: WeightFormat = "fp8" if target_weights == "fp8" else "as_stored"
    return pack_checkpoints(target, draft, device=CPU, block=64, weights=weights, draft_weights=draft_weights)


def with_windows(target: PackedTarget, windows: tuple[int, ...]) -> PackedTarget:
    """The target with gpt-oss's attention: a window in some layers, sinks in all; no published family has those without
    experts."""
    block = replace(target.geometry.block, has_sinks=True)
    random, layers = torch.Generator().manual_seed(1), []
    for layer in target.layers:
        sinks = 2 * torch.randn(block.n_heads, generator=random)
        layers.append(replace(layer, sinks=sinks.to(target.device)))
    return replace(target, geometry=replace(target.geometry, block=block, windows=windows), layers=tuple(layers))


def device_runner(
    pair: Pair,
    k: int | None,
    replayer: Replayer,
    *,
    n_slots: int = 2,
    session_len: int = 128,
    tree: FlatTree | GrownTree | None = None,
    drafts: bool | None = None,
    order: tuple[int, int] | None = ORDER,
    chunk: int = 64,
    n_behind: int | None = None,
    acceptance: AcceptanceRule | None = None,
    method: str = "eagle3",
    draft_weights: WeightFormat = "as_stored",
    target_weights: TargetFormat = "as_stored",
    windows: tuple[int, ...] = (),
    **sized: Any,
) -> DeviceRunner:
    """A runner of `k` drafts a step, of a tree that the draft grows, or of another whose tokens come from outside.

    `windows`: of the target's layers, which then have sinks too. `sized`: further fields of `DeviceSizes`.
    """
    drafts = k is not None or isinstance(tree, GrownTree) if drafts is None else drafts
    stored: dict[str, Any] = {"draft_weights": draft_weights, "target_weights": target_weights}
    target, draft = packed_pair(pair, drafts=drafts, method=method, **stored)
    target = with_windows(target, windows) if windows else target
    shape = tree or chain_tree(k or 0)
    beams = shape.beam_rows if isinstance(shape, GrownTree) else 0
    room = session_len + max(shape.n_nodes, 2 * (k or 0), beams)
    sizes = DeviceSizes(n_slots, session_len, room, shape, chunk=chunk, span=8, acceptance=acceptance, **sized)
    return DeviceRunner(target, draft, sizes, arch="sm_90a", replayer=replayer, order=order, n_behind=n_behind)


def device_engine(
    pair: Pair,
    k: int | None,
    replayer: Replayer,
    *,
    trace: Trace | None = None,
    n_slots: int = 2,
    session_len: int = 128,
    tokenizer: Any = None,
    chunk: int = 64,
    n_behind: int | None = None,
    acceptance: AcceptanceRule | None = None,
    cache_dtype: CacheDtype = "as_computed",
    target_weights: TargetFormat = "as_stored",
    windows: tuple[int, ...] = (),
    **changes: Any,
) -> Engine:
    """An engine whose runner is the device's, with prefill passes of `chunk` rows.

    `cache_dtype`: of both caches. `windows`: of `device_runner`.
    """
    sizes: dict[str, Any] = {"n_slots": n_slots, "session_len": session_len, "chunk": chunk, "windows": windows}
    sizes |= {"cache_dtype": cache_dtype, "draft_cache_dtype": cache_dtype, "target_weights": target_weights}
    runner = device_runner(pair, k, replayer, **sizes, n_behind=n_behind, acceptance=acceptance)
    how: dict[str, Any] = {
        "num_speculative_tokens": k, "acceptance": acceptance, "draft_cache_dtype": cache_dtype
    }  # fmt: skip
    spec = None if k is None else SpeculativeConfig(model=str(pair[1]), **how)
    config = EngineConfig(session_len=session_len, max_batch_size=n_slots, dtype="bfloat16", device="cpu",
                          prefill_chunk=64, speculative_config=spec, cache_dtype=cache_dtype, **changes)  # fmt: skip
    return Engine(runner.target, runner.draft, config, trace=trace, runner=runner, tokenizer=tokenizer)


def without_blocks(runner: DeviceRunner, slot: int, at: int) -> None:
    """Let whatever is read into `slot` lose its cache blocks from number `at` on."""
    assign = runner.tables.assign

    def assigned(to: int, *given: Any) -> None:
        assign(to, *given)
        if to == slot:
            runner.state.tables[slot, at:] = -1

    runner.tables.assign = assigned  # type: ignore[method-assign]


def engine_by_meaning(pair: Pair, k: int | None, **changes: Any) -> Engine:
    """An engine for sessions of 256 tokens, every launch computed by its reference."""
    return device_engine(pair, k, BY_MEANING, **{"session_len": 256, **changes})
