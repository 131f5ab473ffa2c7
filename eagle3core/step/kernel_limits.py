"""Whether the GPU's kernels can run a model, and if not, why, in words.

Asked once, when the backend is chosen; where the answer is no, the same program runs by what its calls mean
(docs/requirements.md R-62, R-77).
"""

from __future__ import annotations

import torch

from eagle3core.config import EngineConfig
from eagle3core.errors import KernelLimit
from eagle3core.geometry import BlockGeometry, DrafterGeometry, DraftGeometry, TargetGeometry
from eagle3core.kernels.attention.launcher import check_limits
from eagle3core.kernels.card import ARCHES, DTYPES, PLAIN_TORCH
from eagle3core.kernels.choice.argmax import MOST_PARTIALS
from eagle3core.kernels.experts.maps.form import form_for, x_tiles_for
from eagle3core.kernels.experts.maps.launcher import walk_variant
from eagle3core.kernels.experts.maps.order import UNIT
from eagle3core.kernels.experts.routing.choose import choose_variant
from eagle3core.kernels.experts.routing.lone import Choice
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.isa.by_row import row_threads
from eagle3core.kernels.layer.take_rows import MOST_SOURCES
from eagle3core.kernels.slots.active_slots import MOST_SLOTS
from eagle3core.kernels.tree.grow_tree import grow_tree_variant
from eagle3core.kernels.tree.growth import mask_words, pool_size
from eagle3core.kernels.tree.select_tree import select_tree_variant
from eagle3core.speculative import SpeculativeConfig
from eagle3core.step.sizes import SPAN

MOST_TOKENS = 16 * MOST_PARTIALS  # of a vocabulary: a head's epilogue gives the best of every 16


def why_plain_torch(
    target: TargetGeometry, draft: DrafterGeometry | None, config: EngineConfig, dtype: torch.dtype,
    arch: str = "sm_90a",
) -> str | None:  # fmt: skip
    """What the kernels are not made for, or None if they can run the configuration. `arch`: where they would run."""
    if dtype not in DTYPES:
        return f"the kernels compute in bf16 or fp16, the model in {str(dtype).removeprefix('torch.')}"
    if config.prefill_chunk % SPAN:
        return f"prefill_chunk is {config.prefill_chunk}, the kernels read prompts in multiples of {SPAN}"
    if config.max_batch_size > MOST_SLOTS:
        return f"max_batch_size is {config.max_batch_size}, the kernels handle {MOST_SLOTS}"
    blocks, vocabularies = [target.block], [target.vocab_size]
    if isinstance(draft, TargetGeometry):
        blocks.append(draft.block)
    elif draft is not None:
        vocabularies.append(draft.draft_vocab_size)
        if len(draft.taps) > MOST_SOURCES:
            return f"the draft reads {len(draft.taps)} taps, the kernels gather {MOST_SOURCES}"
        blocks.append(draft.block)
    if max(vocabularies) > MOST_TOKENS:
        return f"a vocabulary has {max(vocabularies)} tokens, the kernels choose among {MOST_TOKENS}"
    try:
        if isinstance(draft, DraftGeometry) and config.speculative_config is not None:
            _check_tree(config.speculative_config, draft.draft_vocab_size)
            _check_variant(draft)
        for block in blocks:
            _check_experts(block, config, dtype, arch)
            _check_block(block, config, dtype)
    except KernelLimit as limit:
        return f"{limit.what}; the kernels take {limit.allowed}"
    return None


def _check_variant(draft: DraftGeometry) -> None:
    """What the kernels of a head's further norms and of its feed-forward are made for."""
    Epilogue("swiglu", activation=draft.variant.activation).check()
    if draft.variant.fusion_norm == "all":
        row_threads(len(draft.taps) * draft.target_hidden_size)


def _check_tree(spec: SpeculativeConfig, vocabulary: int) -> None:
    """What the kernels that grow a tree are made for, asked of their variants."""
    if spec.tree_kind == "chain":
        return
    pool = pool_size(spec.top_k, spec.depth)
    words = mask_words(spec.top_k, spec.depth)
    grow_tree_variant(ARCHES[0], "bf16", spec.top_k, vocabulary, words, maps=True)
    select_tree_variant(ARCHES[0], pool, spec.n_nodes, spec.depth + 1)


def _check_block(block: BlockGeometry, config: EngineConfig, dtype: torch.dtype) -> None:
    spec = config.speculative_config
    tokens = spec.n_nodes if spec else 1
    check_limits(dtype, block.head_dim, block.n_heads, block.n_kv_heads, tokens, config.block_size)
    row_threads(block.hidden_size)
    for name in ("hidden_size", "intermediate_size"):
        size = getattr(block, name)
        if size % 16:
            raise KernelLimit(f"{name} is {size}", "multiples of 16", PLAIN_TORCH)


def _check_experts(block: BlockGeometry, config: EngineConfig, dtype: torch.dtype, arch: str) -> None:
    """What the kernels of a layer's experts are made for."""
    experts, spec = block.experts, config.speculative_config
    if experts is None:
        return
    if experts.is_mxfp4 and dtype != torch.bfloat16:
        raise KernelLimit(f"experts in MXFP4 and rows in {dtype}", "bf16", PLAIN_TORCH)
    for name, size in (("hidden_size", block.hidden_size), ("an expert's width", experts.intermediate_size)):
        if size % UNIT:
            raise KernelLimit(f"{name} is {size}", f"multiples of {UNIT} where there are experts", PLAIN_TORCH)
    rows = max(config.prefill_chunk, config.max_batch_size * (spec.n_nodes if spec else 1))
    x_tiles = x_tiles_for(rows, experts.n_chosen, experts.n)
    choose_variant(arch, experts.n, experts.n_chosen, experts.is_normalised, 8 * x_tiles, rows)
    form = "mxfp4" if experts.is_mxfp4 else "plain"
    choice = Choice(experts.n, experts.n_chosen, experts.is_normalised)
    cut = form_for(form, block.hidden_size, x_tiles)
    walk_variant(arch, DTYPES[dtype], form, block.hidden_size, experts.gate, True, cut, choice)
