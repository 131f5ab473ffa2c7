"""The bytes a decode step cannot avoid, and what follows from them: floors, and limits of a speed-up.

A step reads every weight but the token table once, and the whole cache; a draft pass reads the head's layer, its output
head and its cache, the first one fc as well. Each byte belongs to the stage that reads it, so the parts sum to all.
Of experts those count that the rows of a pass choose, each distinct one once, as many as a run had or as are expected
of a share of rows that repeat: a verify pass, of more rows, reads more of them than a plain step. Of a layer with a
window its last positions count.
Activations and logits (megabytes) are left out. Derived here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from eagle3core.checkpoint import draft_shapes, target_shapes
from eagle3core.geometry import BlockGeometry, DraftGeometry, ExpertsGeometry, TargetGeometry
from eagle3core.speculative import CacheDtype, WeightFormat
from eagle3core.weights import stored_bytes


@dataclass(frozen=True)
class Floor:
    """Necessary bytes of one step over a batch.

    Attributes:
        stages: bytes by stage: `target.*` of the pass over the target, `draft.*` of all draft passes of a speculative
            step.
        more_experts: bytes of experts in `target.mlp` that a plain step would not read.
    """

    stages: Mapping[str, int]
    more_experts: int = 0

    @property
    def base_bytes(self) -> int:
        """A plain step."""
        return sum(n for stage, n in self.stages.items() if stage.startswith("target.")) - self.more_experts

    @property
    def step_bytes(self) -> int:
        """A whole step."""
        return sum(self.stages.values())

    @property
    def step_over_base(self) -> float:
        """Least ratio of a step to a plain step of the same efficiency."""
        return self.step_bytes / self.base_bytes

    def ms(self, gb_per_s: float) -> float:
        """Least time of a step at a read ceiling, milliseconds."""
        return self.step_bytes / gb_per_s / 1e6

    def stage_us(self, stage: str, gb_per_s: float) -> float:
        """Least time of a stage in a step at a read ceiling, microseconds; 0 for one that reads next to nothing."""
        return self.stages.get(stage, 0) / gb_per_s / 1e3

    def largest_speedup(self, length: float) -> float:
        """What `length` committed tokens a step can bring at most."""
        return length / self.step_over_base


@dataclass(frozen=True)
class Routing:
    """How many distinct experts of a layer the rows of a pass choose.

    Attributes:
        repeated: chance that a row takes the experts of the row before it in its sequence; else any are alike likely.
        measured: distinct experts a layer and pass that a run had, by rows of a sequence in a pass.
    """

    repeated: float = 0.0
    measured: Mapping[int, float] = field(default_factory=dict)

    def n_read(self, experts: ExpertsGeometry, rows: int, batch: int) -> float:
        """Of `rows` rows of each of `batch` sequences: measured, or expected where no run had such passes."""
        known = self.measured.get(rows)
        return experts.n_read(rows, batch=batch, repeated=self.repeated) if known is None else known


UNIFORM = Routing()


def step_floor(
    target: TargetGeometry, draft: DraftGeometry | None, *, k: int, batch: int, cached: float, itemsize: int,
    draft_weights: WeightFormat = "as_stored", target_weights: WeightFormat = "as_stored",
    cache_dtype: CacheDtype = "as_computed", draft_cache_dtype: CacheDtype = "as_computed", routing: Routing = UNIFORM,
) -> Floor:  # fmt: skip
    """The floor of a step with `k` draft passes (0: plain) and `cached` tokens a sequence in the cache.

    `itemsize`: bytes of a value in weights and cache, but for maps in `target_weights`, the draft's own in
    `draft_weights`, and caches; a head that is the token table is no map.
    """
    of_cache, of_drafts = cached_itemsize(cache_dtype, itemsize), cached_itemsize(draft_cache_dtype, itemsize)
    sequences = batch * cached
    unread, unread_by_plain = (_unread_experts(target, n, batch, routing, itemsize, target_weights) for n in (k + 1, 1))
    weights = _by_stage(target_shapes(target), _TARGET_STAGES, itemsize, target_weights)
    weights["mlp"] -= unread
    hidden = target.block.hidden_size * itemsize
    stages = {f"target.{stage}": weights[stage] for stage in ("attn", "mlp", "head")}
    stages["target.attn"] += int(batch * _cached_tokens(target, cached) * token_bytes(target.block, 1, of_cache))
    stages["target.head"] += target.vocab_size * hidden if target.tie_word_embeddings else 0
    if k == 0 or draft is None:
        return Floor(stages, unread_by_plain - unread)
    weights = _by_stage(draft_shapes(draft), _DRAFT_STAGES, itemsize, draft_weights)
    weights["attn"] += int(sequences * token_bytes(draft.block, 1, of_drafts))
    weights["head"] += 0 if draft.has_head else _shared_head_bytes(target, draft, itemsize, target_weights)
    stages["draft.fc"] = weights["fc"]
    stages |= {f"draft.{stage}": k * weights[stage] for stage in ("qkv", "attn", "mlp", "head")}
    return Floor(stages, unread_by_plain - unread)


def _shared_head_bytes(
    target: TargetGeometry, draft: DraftGeometry, itemsize: int, target_weights: WeightFormat
) -> int:
    """What a draft reads of the target's head."""
    shape = (draft.draft_vocab_size, draft.block.hidden_size)
    return stored_bytes(
        "lm_head.weight", shape, itemsize, "as_stored" if target.tie_word_embeddings else target_weights
    )


def _unread_experts(
    target: TargetGeometry, rows: int, batch: int, routing: Routing, itemsize: int, weights: WeightFormat
) -> int:
    """Bytes of the experts that a pass of `rows` rows of each of `batch` sequences has no use for."""
    experts = target.block.experts
    if experts is None:
        return 0
    of_experts = (named for named in target_shapes(target) if ".experts." in named[0])
    n_bytes = sum(stored_bytes(*named, itemsize, weights) for named in of_experts)
    return round(n_bytes * (1 - routing.n_read(experts, rows, batch) / experts.n))


def _cached_tokens(target: TargetGeometry, cached: float) -> float:
    """Tokens that the layers read of a sequence's cache, over all of them."""
    windows = (target.window_of(i) for i in range(target.n_layers))
    return sum(min(cached, window) if window else cached for window in windows)


# What a weight's name contains, and the stage that reads it; the first that fits. The draft's q, k and v are a stage.
_TARGET_STAGES = {
    "embed_tokens": "table", "self_attn": "attn", "input_layernorm": "attn", "mlp": "mlp",
    "post_attention_layernorm": "mlp", "norm": "head", "lm_head": "head",
}  # fmt: skip
_DRAFT_STAGES = {
    "embed_tokens": "table", "fc.": "fc", "o_proj": "attn", "self_attn": "qkv", "input_layernorm": "qkv",
    "hidden_norm": "qkv", "mlp": "mlp", "post_attention_layernorm": "mlp", "norm": "head", "lm_head": "head",
}  # fmt: skip


def _by_stage(
    shapes: Iterable[tuple[str, tuple[int, ...]]], stages: Mapping[str, str], itemsize: int,
    weights: WeightFormat = "as_stored",
) -> dict[str, int]:  # fmt: skip
    """Bytes of weights by the stage that reads them, every stage named; a weight that none reads is a KeyError."""
    found = dict.fromkeys(stages.values(), 0)
    for name, shape in shapes:
        part = next((part for part in stages if part in name), name)
        found[stages[part]] += stored_bytes(name, shape, itemsize, weights)
    return found


def weight_bytes(target: TargetGeometry, itemsize: int, weights: WeightFormat = "as_stored") -> int:
    """All weights of a target, its maps in `weights`."""
    return sum(stored_bytes(name, shape, itemsize, weights) for name, shape in target_shapes(target))


def draft_weight_bytes(draft: DraftGeometry, itemsize: int, weights: WeightFormat = "as_stored") -> int:
    """All weights of a draft, its maps in `weights`; a head shared with the target is read by it all the same."""
    own = sum(stored_bytes(*named, itemsize, weights) for named in draft_shapes(draft))
    return own if draft.has_head else own + draft.draft_vocab_size * draft.block.hidden_size * itemsize


def cached_itemsize(cache: CacheDtype, itemsize: int) -> int:
    """Bytes of a value in a cache of models that compute in values of `itemsize`."""
    return 1 if cache == "fp8" else itemsize


def token_bytes(block: BlockGeometry, n_layers: int, itemsize: int) -> int:
    """Cached keys and values of one token."""
    return 2 * n_layers * block.n_kv_heads * block.head_dim * itemsize
