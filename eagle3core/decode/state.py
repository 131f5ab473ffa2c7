"""Everything a decode step reads and writes, as one value.

Rows are slots; requests enter and leave them. Nothing about a running sequence lives anywhere else, so a step is a
function of this state (docs/requirements.md R-47, R-81).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3core.config import EngineConfig
from eagle3core.decode.kvcache import PagedCache
from eagle3core.model.draft import DraftModel
from eagle3core.model.target import TargetModel
from eagle3core.step.tree import FlatTree, chain_tree


@dataclass
class DecodeState:
    """State of S slots.

    Attributes:
        tree: shape of the draft tree every sequence is verified with.
        target_cache, draft_cache: paged keys and values; the draft's is None without speculation.
        active: `[S]` bool slot holds an unfinished request.
        roots: `[S]` int64 last sampled token, not yet in the target's cache.
        lengths: `[S]` int64 tokens in the target's cache.
        draft_lengths: `[S]` int64 entries in the draft's cache made from true target taps.
        pending_taps: `[S, P, n_taps * E]` taps of committed tokens the draft has not read yet.
        pending_tokens: `[S, P]` int64 the tokens that follow them.
        pending_counts: `[S]` int64 how many of the P are filled.
    """

    tree: FlatTree
    target_cache: PagedCache
    draft_cache: PagedCache | None
    active: Tensor
    roots: Tensor
    lengths: Tensor
    draft_lengths: Tensor
    pending_taps: Tensor
    pending_tokens: Tensor
    pending_counts: Tensor

    @property
    def n_slots(self) -> int:
        """Slots."""
        return len(self.active)


def new_state(target: TargetModel, draft: DraftModel | None, config: EngineConfig) -> DecodeState:
    """An empty state sized once from the configuration (docs/requirements.md R-25, R-64)."""
    spec = config.speculative_config if draft is not None else None
    slots, device = config.max_batch_size, target.device
    tree = chain_tree(spec.num_speculative_tokens if spec else 0)
    max_tokens = config.session_len + (spec.decoding_tokens if spec else 1)

    def cache(geometry_of: TargetModel | DraftModel, n_layers: int) -> PagedCache:
        geometry = geometry_of.geometry.block
        return PagedCache(
            geometry,
            n_layers=n_layers,
            n_slots=slots,
            max_tokens=max_tokens,
            block_size=config.block_size,
            dtype=target.dtype,
            device=device,
        )

    def integers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    width = tree.max_depth + 1
    tap_width = len(target.taps) * target.geometry.block.hidden_size if draft else 0
    return DecodeState(
        tree=tree,
        target_cache=cache(target, target.geometry.n_layers),
        draft_cache=cache(draft, 1) if draft else None,
        active=torch.zeros(slots, dtype=torch.bool, device=device),
        roots=integers(slots),
        lengths=integers(slots),
        draft_lengths=integers(slots),
        pending_taps=torch.zeros(slots, width, tap_width, dtype=target.dtype, device=device),
        pending_tokens=integers(slots, width),
        pending_counts=integers(slots),
    )
