"""A planted pair as the engine takes it: checkpoints, models, prompts."""

from __future__ import annotations

from typing import Any

import torch

from eagle3core.checkpoint import TargetCheckpoint
from eagle3core.config import EngineConfig
from eagle3core.loading import packs_for
from eagle3core.speculative import SpeculativeConfig, WeightFormat
from eagle3core.weights import PackedDraft, PackedTarget, pack_draft, pack_target
from lab.errors import ExperimentError
from lab.pairs.planted.geometries import PlantedGeometry
from lab.pairs.planted.published import find_geometry
from lab.pairs.planted.tokens import plan_tokens
from lab.pairs.planted.weights import PlantedWeights


class PlantedPair:
    """One planted (target, draft) pair, described by its geometry, its dial and its seed.

    Args:
        geometry: shapes, or the name of known ones.
        share: the dial: probability that a drafted token is accepted, given that those before it were.
        repeated: the dial of routing, where the target has experts: probability that a token takes its predecessor's.
        seed: of everything random in it.
        dtype, device: of the weights.

    Raises:
        ExperimentError: an unknown geometry, or a share outside 0..1, or a dial of routing without experts.
    """

    def __init__(
        self,
        geometry: PlantedGeometry | str,
        *,
        share: float,
        repeated: float = 0.0,
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        self.geometry = find_geometry(geometry) if isinstance(geometry, str) else geometry
        self.seed, self.dtype, self.device = seed, dtype, torch.device(device)
        self.dial = share
        target = self.geometry.target
        if repeated and target.block.experts is None:
            raise ExperimentError(
                f"{repeated:g} of tokens repeat their experts in {self.geometry.name}, which has none",
                "0, or a geometry with experts", "leave the share out, or name another geometry",
            )  # fmt: skip
        self.tokens = plan_tokens(target.vocab_size, self.geometry.draft.draft_vocab_size, share, seed, repeated)
        made: dict[str, Any] = {"seed": seed, "dtype": dtype, "device": self.device}
        self.target_weights = PlantedWeights(self.geometry, self.tokens, **made, side="target")
        self.draft_weights = PlantedWeights(self.geometry, self.tokens, **made, side="draft")

    def target_checkpoint(self) -> TargetCheckpoint:
        """The whole target, as a loader gives it."""
        weights = dict(self.target_weights)
        self.draft_weights.share_table(weights["model.embed_tokens.weight"])
        return TargetCheckpoint(self.geometry.target, weights, self.dtype)

    def models(
        self, draft_weights: WeightFormat = "as_stored", target_weights: WeightFormat = "as_stored"
    ) -> tuple[PackedTarget, PackedDraft]:
        """Both models as an engine takes them on the pair's device, made tensor by tensor; the target has the taps.

        `draft_weights`, `target_weights`: the format of their maps.
        """
        geometry, block = self.geometry, EngineConfig().block_size
        packs = packs_for(self.device, self.dtype, geometry.target, geometry.draft)
        target = pack_target(
            geometry.target, self.target_weights.tensor, dtype=self.dtype, device=self.device, block=block,
            taps=geometry.draft.taps, packs=packs, weights=target_weights,
        )  # fmt: skip
        self.draft_weights.share_table(target.embedding)
        named, mapping = self.draft_weights.tensor, self.tokens.draft_to_target
        return target, pack_draft(geometry.draft, named, mapping, target, block=block, weights=draft_weights)

    def config(self, k: int, **settings: Any) -> EngineConfig:
        """Settings of an engine over this pair that drafts `k` tokens a step; 0 drafts none."""
        spec = SpeculativeConfig(model="planted", num_speculative_tokens=k) if k else None
        return EngineConfig(**{"device": self.device.type, **settings}, speculative_config=spec)

    def prompts(self, n_prompts: int, length: int, *, seed: int = 0) -> list[list[int]]:
        """Prompts of `length` random tokens; the last ones lie evenly spaced on the cycle, so that outputs differ."""
        random = torch.Generator().manual_seed(seed)
        shape = (n_prompts, length)
        prompts: list[list[int]] = torch.randint(self.geometry.target.vocab_size, shape, generator=random).tolist()
        ids = self.tokens.draft_to_target
        n_ids = len(ids)
        cycle = self.tokens.follow(int(ids[int(torch.randint(n_ids, (1,), generator=random))]), n_ids)
        for i, prompt in enumerate(prompts):
            prompt[-1] = cycle[i * n_ids // n_prompts]
        return prompts

    def card(self) -> dict[str, Any]:
        """What the pair is, as records name it."""
        return {
            "pair": "planted",
            "geometry": self.geometry.name,
            "seed": self.seed,
            "dial": self.dial,
            "share": self.tokens.share,
            "dtype": str(self.dtype).removeprefix("torch."),
            "made_on": self.device.type,
            **({} if self.geometry.target.block.experts is None else {"repeated_experts": self.tokens.repeated}),
        }
