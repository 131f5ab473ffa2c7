"""Whether models that were read fit each other and the settings: asked before anything is allocated for them."""

from __future__ import annotations

from eagle3core.config import EngineConfig
from eagle3core.errors import ConfigError
from eagle3core.weights import Drafter, PackedDraft, PackedTarget


def check_fit(target: PackedTarget, draft: Drafter | None, config: EngineConfig) -> None:
    """Refuse models that do not fit each other or the configuration.

    Raises:
        ConfigError: a session beyond the target's positions, a draft that reads other layers than the target captures
            or has too few tokens or too short a window for its tree, a small model of another vocabulary or fewer
            positions, or weights packed for another block size.
    """
    if isinstance(draft, PackedTarget):
        _check_small_fit(target, draft, config)
    limit = target.geometry.max_position_embeddings
    if config.session_len > limit:
        raise ConfigError(
            f"session_len is {config.session_len}", f"at most {limit}, the target's positions", f"set it to {limit}"
        )
    if config.target_weights != "as_stored" and (target.weights == "fp8") != (config.target_weights == "fp8"):
        raise ConfigError(
            f"target_weights is {config.target_weights!r} with a target whose maps are {target.weights!r}",
            "the format that the target was packed in",
            "leave target_weights out, or pack the target in that format",
        )
    if isinstance(draft, PackedDraft) and target.taps != draft.geometry.taps:
        raise ConfigError(
            f"the target captures the inputs of layers {target.taps}, the draft reads {draft.geometry.taps}",
            "the same layers",
            f"read the target with taps={draft.geometry.taps}",
        )
    spec = config.speculative_config
    if isinstance(draft, PackedDraft) and spec is not None and spec.top_k > draft.geometry.draft_vocab_size:
        raise ConfigError(
            f"the tree takes {spec.top_k} candidates a node, the draft has {draft.geometry.draft_vocab_size} tokens",
            "as many candidates as the draft has tokens, or fewer",
            "lower dynamic_tree_max_top_k, or the ranks of the choices",
        )
    if isinstance(draft, PackedDraft) and spec is not None and 0 < draft.geometry.window <= spec.depth:
        raise ConfigError(
            f"the draft's layer sees {draft.geometry.window} positions back, the tree has {spec.depth} levels",
            "a window that holds a path and the token before it",
            "lower num_speculative_tokens, or use another head",
        )
    layers = [(f"layer {i} of the target", layer) for i, layer in enumerate(target.layers)]
    layers += [("the draft", draft.layer)] if isinstance(draft, PackedDraft) else []
    layers += [("the draft", layer) for layer in draft.layers] if isinstance(draft, PackedTarget) else []
    for whose, layer in layers if target.is_packed else ():
        block = layer.qkv.epilogue.block or config.block_size  # a map that only stores writes no cache
        if block != config.block_size:  # its kernels would write keys and values to other blocks than attention reads
            raise ConfigError(
                f"{whose} is packed for cache blocks of {block} tokens with block_size {config.block_size}",
                "one block size for weights and cache",
                f"set block_size={block}, or pack the weights with block={config.block_size}",
            )


def _check_small_fit(target: PackedTarget, small: PackedTarget, config: EngineConfig) -> None:
    own, its = target.geometry, small.geometry
    if its.vocab_size != own.vocab_size:
        raise ConfigError(
            f"the model that drafts has {its.vocab_size} tokens, the target {own.vocab_size}",
            "one vocabulary, id by id",
            "draft with a model of the target's own family, or by method='eagle3'",
        )
    if config.session_len > its.max_position_embeddings:
        raise ConfigError(
            f"session_len is {config.session_len}",
            f"at most {its.max_position_embeddings}, the positions of the model that drafts",
            f"set it to {its.max_position_embeddings}",
        )
