"""The pair under a bench: models for the engine, named tensors for the peers, prompts, and what must come out.

Weights are made or read once for all points; the peers' copies are made from the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from eagle3core import Engine, ForcedAcceptance
from eagle3core.checkpoint import load_draft, load_target
from eagle3core.config import EngineConfig
from eagle3core.geometry import DraftGeometry, TargetGeometry
from eagle3core.loading import packs_for
from eagle3core.speculative import SpeculativeConfig
from eagle3core.weights import PackedDraft, PackedTarget, pack_draft, pack_target
from lab.errors import ExperimentError
from lab.options.values import CacheName
from lab.pairs import shipped_pair
from lab.pairs.planted import PlantedPair
from lab.pairs.prompts import joined_prompts
from lab.probes.bench.floors import UNIFORM, Routing
from lab.probes.bench.peers.fused import FusedDraft, FusedTarget, fuse_draft, fuse_target
from lab.probes.bench.rounds import without_taps
from lab.probes.bench.scenario import AS_COMPUTED, CACHE_SHARE, Scenario

HEADROOM = 64  # tokens of a session beyond prompt and generation: a last step's drafts


@dataclass
class PairSource:
    """A pair in memory.

    Attributes:
        target, draft: as the engine takes them.
        target_weights, draft_weights: by checkpoint name, for the peers.
        draft_to_target: `[Vd]` int64, None when both vocabularies are one.
        planted: the planted pair, whose next tokens are known; None for a trained one.
        card: what the pair is, for the record.
        caches: what keys and values are stored in, by the names of `Scenario.caches`.
        ends: tokens that a planted pair's prompts end in, one a prompt; empty leaves them evenly spaced.
    """

    target: PackedTarget
    draft: PackedDraft
    target_weights: Mapping[str, Tensor]
    draft_weights: Mapping[str, Tensor]
    draft_to_target: Tensor | None
    planted: PlantedPair | None
    card: dict[str, Any]
    caches: Mapping[str, CacheName] = field(default_factory=AS_COMPUTED.copy)
    ends: tuple[int, ...] = ()
    _fused_target: FusedTarget | None = None
    _fused_draft: FusedDraft | None = None

    @property
    def target_geometry(self) -> TargetGeometry:
        """Shapes of the target."""
        return self.target.geometry

    @property
    def draft_geometry(self) -> DraftGeometry:
        """Shapes of the draft."""
        return self.draft.geometry

    @property
    def routing(self) -> Routing:
        """The experts that rows are expected to choose: a draft that is wrong chooses its own."""
        if self.planted is None:
            return UNIFORM
        return Routing(self.planted.tokens.repeated * self.planted.tokens.share)

    def prompts(self, n_prompts: int, context: int, seed: int) -> list[list[int]]:
        """`n_prompts` prompts of `context` tokens; a trained pair's are real text (docs/requirements.md 1.X-10)."""
        if self.planted is None:
            return joined_prompts(shipped_pair().target, n_prompts, context)
        prompts = self.planted.prompts(n_prompts, context, seed=seed)
        for prompt, end in zip(prompts, self.ends, strict=False):
            prompt[-1] = end
        return prompts

    def fused(self) -> tuple[FusedTarget, FusedDraft]:
        """Both models as peers take them, made when first asked for and kept."""
        if self._fused_target is None:
            self._fused_target = fuse_target(self.target_weights, self.target_geometry.n_layers)
        if self._fused_draft is None:
            self._fused_draft = fuse_draft(self.draft_weights, self._fused_target, self.draft_to_target)
        return self._fused_target, self._fused_draft

    def redialled(self, share: float) -> PairSource:
        """The planted pair at another dial: the same target, and copies of it, with a draft of its own."""
        assert self.planted is not None, "a trained pair has no dial"
        was = self.planted
        pair = PlantedPair(
            was.geometry, share=share, repeated=was.tokens.repeated, seed=was.seed, dtype=was.dtype, device=was.device
        )
        mapping = pair.tokens.draft_to_target.to(pair.device)
        pair.draft_weights.share_table(self.target.embedding)
        block, named = EngineConfig().block_size, pair.draft_weights.tensor
        draft = pack_draft(
            pair.geometry.draft, named, pair.tokens.draft_to_target, self.target, block=block,
            weights=self.draft.weights,
        )  # fmt: skip
        return replace(
            self, draft=draft, draft_weights=pair.draft_weights, draft_to_target=mapping, planted=pair,
            card=pair.card(), ends=(), _fused_draft=None,
        )  # fmt: skip

    def n_wrong(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> int | None:
        """Outputs that are not the planted ones; None where no output is known beforehand."""
        if self.planted is None:
            return None
        follow = self.planted.tokens.follow
        return sum(list(out) != follow(prompt[-1], len(out)) for prompt, out in zip(prompts, outputs, strict=True))

    def engine(
        self,
        k: int,
        *,
        batch: int,
        session_len: int,
        cache_share: float = CACHE_SHARE,
        rule: ForcedAcceptance | None = None,
    ) -> Engine:
        """An engine that drafts `k` tokens a step, accepted by `rule`; a plain one captures nothing, and must not pay
        for it."""
        limit = self.target_geometry.max_position_embeddings
        if session_len > limit:
            raise ExperimentError(
                f"a session of {session_len} tokens", f"at most {limit}, the target's positions", "shorten the context"
            )
        spec = None
        if k:
            spec = SpeculativeConfig(
                model=str(self.card["pair"]), num_speculative_tokens=k, acceptance=rule,
                draft_weights=self.draft.weights, draft_cache_dtype=self.caches["draft_cache_dtype"],
            )  # fmt: skip
        config = EngineConfig(
            session_len=session_len,
            max_batch_size=batch,
            device=self.target.device.type,
            cache_max_entry_count=cache_share,
            speculative_config=spec,
            cache_dtype=self.caches["cache_dtype"],
        )
        if k:
            return Engine(self.target, self.draft, config)
        return Engine(without_taps(self.target), None, config)


def open_pair(scenario: Scenario) -> PairSource:
    """The scenario's pair, in memory on its device."""
    dtype: torch.dtype = getattr(torch, scenario.dtype)
    if scenario.pair == "planted":
        pair = PlantedPair(
            scenario.geometry, share=scenario.share, repeated=scenario.repeated, seed=scenario.seed, dtype=dtype,
            device=scenario.device,
        )  # fmt: skip
        target, draft = pair.models(scenario.draft_weights, scenario.target_weights)
        mapping = pair.tokens.draft_to_target.to(pair.device)
        return PairSource(
            target, draft, pair.target_weights, pair.draft_weights, mapping, pair, pair.card(), scenario.caches
        )
    shipped = shipped_pair()
    checkpoint = load_target(shipped.target, dtype=dtype, device=scenario.device)
    head = load_draft(shipped.draft, checkpoint.geometry, dtype=dtype, device=scenario.device)
    card = {"pair": "shipped", "geometry": "shipped", "dtype": scenario.dtype}
    named = (checkpoint.weights, head.weights, head.draft_to_target)
    target = pack_target(
        checkpoint.geometry, checkpoint.weights.__getitem__, dtype=dtype, device=torch.device(scenario.device),
        block=EngineConfig().block_size, taps=head.geometry.taps,
        packs=packs_for(torch.device(scenario.device), dtype, checkpoint.geometry, head.geometry),
        weights=scenario.target_weights,
    )  # fmt: skip
    draft = pack_draft(
        head.geometry, head.weights.__getitem__, head.draft_to_target, target, block=EngineConfig().block_size,
        weights=scenario.draft_weights,
    )  # fmt: skip
    return PairSource(target, draft, *named, None, card, scenario.caches)
