"""From a configuration and models to what runs them: sizes of the state, the device's way to compute, a runner."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from eagle3core.backend import Backend
from eagle3core.config import EngineConfig
from eagle3core.errors import ConfigError, KernelLimit
from eagle3core.geometry import DrafterGeometry, TargetGeometry
from eagle3core.kernels.card import Variant
from eagle3core.kernels.launch import device_arch
from eagle3core.speculative import DRAFT_TARGET, SpeculativeConfig
from eagle3core.step.kernel_limits import why_plain_torch
from eagle3core.step.program import variants_of
from eagle3core.step.replay import EagerReplayer, GraphReplayer
from eagle3core.step.run import DeviceRunner
from eagle3core.step.sizes import SPAN, STEPS_KEPT, DeviceSizes
from eagle3core.step.tree import FlatTree, GrownTree, chain_tree
from eagle3core.trace import Trace
from eagle3core.trees import beam_scores
from eagle3core.weights import Drafter, PackedDraft, PackedEagle, PackedTarget

log = logging.getLogger("eagle3core")

Models = tuple[PackedTarget, Drafter | None]


@dataclass(frozen=True)
class SpeculationState:
    """Whether the engine speculates, and why or why not."""

    enabled: bool
    reason: str


def steps_draft(config: EngineConfig, draft: object | None) -> bool:
    """Whether steps draft: with a draft model if the settings ask for one, without where they look drafts up."""
    spec = config.speculative_config
    return spec is not None and (spec.is_lookup or draft is not None)


def device_sizes(config: EngineConfig, *, drafts: bool, n_blocks: int | None = None) -> DeviceSizes:
    """What the state is made for; prompts share passes of whole spans, others none.

    Args:
        n_blocks: of the cache, as planned; None: every slot's longest session.
    """
    spec = config.speculative_config if drafts else None
    return DeviceSizes(
        n_slots=config.max_batch_size,
        session_len=config.session_len,
        max_tokens=config.session_len + (spec.tokens_in_flight if spec else 1),
        tree=tree_of(spec) if spec else chain_tree(0),
        chunk=config.prefill_chunk,
        span=SPAN if config.prefill_chunk % SPAN == 0 else config.prefill_chunk,
        block=config.block_size,
        keeps_ranks=config.keeps_ranks and drafts,
        last_states=config.collect_last_states,
        pool=n_blocks,
        acceptance=spec.acceptance if spec else None,
        n_kept=STEPS_KEPT if spec is not None and config.varies_depth else 0,
        draft_window=(spec.draft_window or 0) if spec else 0,
        cache_dtype=config.cache_dtype,
        draft_cache_dtype=spec.draft_cache_dtype if spec else "as_computed",
    )


def tree_of(spec: SpeculativeConfig) -> FlatTree | GrownTree:
    """The tree that a step verifies under these draft settings."""
    if spec.tree_kind == "chain":
        return chain_tree(spec.num_speculative_tokens)
    scores = beam_scores(spec.static_tree, spec.top_k) if spec.static_tree is not None else None
    return GrownTree(spec.top_k, spec.depth, spec.n_nodes, scores)


def new_runner(
    target: PackedTarget, draft: Drafter | None, config: EngineConfig, n_blocks: int | None = None,
    trace: Trace | None = None, *, only_tuned: bool = False,
) -> DeviceRunner:  # fmt: skip
    """The runner of models on their device, with `n_blocks` as in `device_sizes`: captured graphs of kernels for packed
    ones, plain torch for others; what that takes are spans of the trace. `only_tuned`:
    `DeviceRunner.keep_tuned_passes`."""
    sizes = device_sizes(config, drafts=steps_draft(config, draft), n_blocks=n_blocks)
    spec = config.speculative_config
    n_behind = 0 if spec is not None and spec.is_lookup else None  # what is looked up begins with the newest tokens
    if not target.is_packed:
        return DeviceRunner(target, draft, sizes, arch=None, replayer=EagerReplayer(), n_behind=n_behind)
    arch, replayer = device_arch(target.device), GraphReplayer(target.device)
    runner = DeviceRunner(target, draft, sizes, arch=arch, replayer=replayer, n_behind=n_behind)
    if only_tuned:
        runner.keep_tuned_passes()
    runner.prepare(trace)
    return runner


def launched_kernels(target: PackedTarget, draft: Drafter | None, config: EngineConfig, arch: str) -> list[Variant]:
    """The kernels that an engine over packed models launches; they may lie on the meta device."""
    sizes = device_sizes(config, drafts=steps_draft(config, draft))
    runner = DeviceRunner(target, draft, sizes, arch=arch, replayer=EagerReplayer(lambda calls: None))
    return variants_of(runner.all_programs)


def choose_path(
    backend: Backend, target: TargetGeometry, draft: DrafterGeometry | None, config: EngineConfig, dtype: torch.dtype
) -> Backend:
    """The backend with what computes on it: the kernels wherever they can, else plain torch, and why."""
    if backend.device.type != "cuda":
        return replace(backend, path="torch", path_reason="the kernels run on CUDA devices")
    try:
        arch = device_arch(backend.device)
    except KernelLimit as limit:
        return replace(backend, path="torch", path_reason=f"{limit.what}; the kernels take {limit.allowed}")
    reason = why_plain_torch(target, draft, config, dtype, arch)
    if reason is None:
        return replace(backend, path="kernels", path_reason=f"kernels for {arch}")
    return replace(backend, path="torch", path_reason=reason)


def backend_of(target: PackedTarget, runner: DeviceRunner | None = None) -> Backend:
    """The backend of a target that is on its device: what `new_runner`, or the runner given, runs it by.

    Raises:
        BackendUnavailable: it is packed for kernels, and torch sees no CUDA device.
        KernelLimit: it is packed, and the kernels have no target for its GPU.
    """
    device, reason = target.device, "the device the target was given on"
    if not target.is_packed:
        return Backend(device, reason, "torch", "the weights are not packed for the kernels")
    if runner is not None and not (runner.has_kernels and device.type == "cuda"):
        return Backend(device, reason, "torch", "the runner that was given launches no kernels on a GPU")
    return Backend(device, reason, "kernels", f"kernels for {device_arch(device)}")


def packs_for(
    device: torch.device, dtype: torch.dtype, target: TargetGeometry, draft: DrafterGeometry | None = None
) -> bool:
    """Whether weights on a device are packed for kernels there: on a GPU, of models that the kernels can run."""
    return choose_path(Backend(device, "where the weights are"), target, draft, EngineConfig(), dtype).path == "kernels"


def speculation_from(config: EngineConfig, draft: Drafter | None) -> SpeculationState:
    """What an engine over models that are given says of its drafts.

    Raises:
        ConfigError: a configuration that asks for a draft that was not given, or for another format of its weights.
    """
    spec = config.speculative_config
    if spec is None:
        return SpeculationState(False, "no speculative_config was given")
    if draft is None and not spec.is_lookup:
        raise ConfigError(
            "speculative_config was given without a draft model",
            "both, or neither",
            "use Engine.from_pretrained, or pass the draft",
        )
    kind = {DRAFT_TARGET: PackedTarget, "eagle": PackedEagle}.get(spec.method, PackedDraft)
    if draft is not None and type(draft) is not kind:
        raise ConfigError(
            f"method is {spec.method!r} with a {type(draft).__name__}",
            f"a PackedDraft for 'eagle3', a PackedEagle for 'eagle', a PackedTarget for {DRAFT_TARGET!r}",
            "set the method that the model is for",
        )
    if draft is not None and draft.weights != spec.draft_weights:
        raise ConfigError(
            f"draft_weights is {spec.draft_weights!r} with a draft whose maps are {draft.weights!r}",
            "the format that the draft was packed in",
            f"set draft_weights={draft.weights!r}, or pack the draft with weights={spec.draft_weights!r}",
        )
    what = f"{spec.depth} drafted tokens" if spec.tree_kind == "chain" else spec.tree_label
    what = f"at most {what} a step, as pays" if spec.adaptive else f"{what} a step"
    rule = f", acceptance {spec.acceptance.label}" if spec.acceptance is not None else ""
    stored = f", draft maps in {draft.weights}" if draft is not None and draft.weights != "as_stored" else ""
    return SpeculationState(True, f"{spec.method} with {what}{rule}{stored}")
