"""How drafts are made: the settings of the draft, of its chain or tree, and the limits they have to keep.

A part of `config`, read before any model. What a tree is lies in `trees`; docs/requirements.md R-01, R-07, R-08, R-15.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import Any, Literal, get_args

from eagle3core.acceptance import AcceptanceRule, check_acceptance
from eagle3core.checks import (
    check_feedback,
    check_lengths,
    check_taps,
    check_window,
    is_count,
    is_given,
    require_choice,
    require_count,
    require_flag,
)
from eagle3core.errors import ConfigError, shown
from eagle3core.lookup import LOOKUPS
from eagle3core.trees import MAX_DEPTH, MAX_TOP_K, StaticTree, most_dynamic_nodes, read_choices
from eagle3core.trees.choices import Choices
from eagle3core.trees.tensorrt_llm import settings_of

HEADS = ("eagle3", "eagle")  # trained heads, which draft trees too
METHODS = (*HEADS, DRAFT_TARGET := "draft_target", *LOOKUPS)
LEGACY_METHODS = ("deepseek_mtp",)
OF_A_HEAD = ("choices", "use_dynamic_tree", "capture_layers", "capture_convention", "norm_output")  # settings
MAX_SPECULATIVE_TOKENS = MAX_DEPTH
DYNAMIC_NODES = 60  # as the official code's default, where the levels score as many
TreeKind = Literal["chain", "static", "dynamic"]
WeightFormat = Literal["as_stored", "fp8"]
CacheDtype = Literal["as_computed", "fp8"]


class _LeftOut(int):
    """A number that stands for a setting left out: known from the same number given by being this very object."""


DEFAULT_DEPTH = _LeftOut(3)


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are made (docs/requirements.md R-01, R-07).

    Attributes:
        method: "eagle3" or "eagle" (EAGLE-1 and 2), a trained head; "draft_target", a small model of the same
            vocabulary; or a look-up in the request's own text (`lookup`): "ngram", by the newest tokens, or "suffix",
            by all that stood there before.
        model: directory of the draft checkpoint, or of the small model; left out for a look-up.
        num_speculative_tokens: depth of the draft, 1..8: the longest path in drafts. Left out it is 3, with choices
            their depth; given beside choices it has to be their depth.
        max_path_len: longest root-to-leaf path, root included; default max(5, num_speculative_tokens + 1), of trees
            num_speculative_tokens + 1.
        max_decoding_tokens: room kept in the cache for tokens in flight, per sequence and root included; default
            max(2 * num_speculative_tokens, max_path_len), with choices at least their nodes. A chain sends
            num_speculative_tokens + 1, a fixed tree its nodes. A dynamic tree has exactly so many nodes; default 60, or
            what its levels score where that is less.
        max_non_leaves_per_layer: nodes of one tree level that may have children.
        capture_layers: target layers whose residual stream an "eagle3" head reads; None takes the checkpoint's own, or
            the default (2, n // 2, n - 3) in "input" numbering.
        capture_convention: whether `capture_layers` number layer inputs or layer outputs; never guessed.
        norm_output: what a head's key of that name means where its file leaves that open (docs/checkpoints.md).
        eagle_debug, eagle_metrics_debug: log every draft and every acceptance; the counters of every step.
        choices: a fixed tree: "mc_sim_7b_63", a .yaml, .yml or .json file, or a list of paths (docs/engine.md).
        use_dynamic_tree: a tree grown anew in every step from what the draft holds likely; not with choices.
        dynamic_tree_max_top_k: candidates of each node of a dynamic tree, and nodes of a level that go on, 1..16.
        acceptance: a rule of `eagle3core.acceptance`; None accepts the drafts that are the target's own choice.
        draft_window: positions back that a head drafts with, its own included; None: all, or as its config says.
        draft_weights: "as_stored", or "fp8": the draft's own maps quantised at load (docs/engine.md).
        draft_cache_dtype: of the draft's keys and values, as `EngineConfig.cache_dtype` of the target's.
        adaptive: each step's depth, or of a tree whether it is drafted, is chosen anew (docs/engine.md); the tree or
            num_speculative_tokens is then the most.
    """

    method: str = "eagle3"
    model: str | None = None
    num_speculative_tokens: int = DEFAULT_DEPTH
    max_path_len: int | None = None
    max_decoding_tokens: int | None = None
    max_non_leaves_per_layer: int = 10
    capture_layers: tuple[int, ...] | None = None
    capture_convention: Literal["input", "output"] | None = None
    norm_output: Literal["feedback", "head"] | None = None
    eagle_debug: bool = False
    eagle_metrics_debug: bool = False
    choices: Choices | None = None
    use_dynamic_tree: bool = False
    dynamic_tree_max_top_k: int = 10
    acceptance: AcceptanceRule | None = None
    adaptive: bool = False
    draft_window: int | None = None
    draft_weights: WeightFormat = "as_stored"
    draft_cache_dtype: CacheDtype = "as_computed"

    def __post_init__(self) -> None:
        if isinstance(self.capture_layers, Sequence):  # a list, as JSON and TOML give it, is welcome
            object.__setattr__(self, "capture_layers", tuple(self.capture_layers))
        if isinstance(self.choices, list | tuple):
            object.__setattr__(self, "choices", tuple(tuple(p) if isinstance(p, list) else p for p in self.choices))
        _check_tree_settings(self)
        for name, value in _derived(self).items():
            object.__setattr__(self, name, value)
        validate_speculative_config(self)

    @classmethod
    def from_tensorrt_llm(cls, fields: Mapping[str, Any], model: str | None = None) -> SpeculativeConfig:
        """The settings that TensorRT-LLM's names mean (docs/engine.md); `model` is the draft checkpoint.

        Raises:
            ConfigError: an unknown name, fields that contradict each other, or what is not built.
        """
        return cls(model=model, **settings_of(fields))

    @property
    def path_len(self) -> int:
        """Longest path with the root, resolved."""
        return int(self.max_path_len or 0)

    @property
    def decoding_tokens(self) -> int:
        """Room for tokens in flight per sequence, resolved."""
        return int(self.max_decoding_tokens or 0)

    @cached_property
    def static_tree(self) -> StaticTree | None:
        """The tree of `choices`, read once; None without them, and where their file is not there."""
        return None if self.choices is None else read_choices(self.choices)

    @property
    def tree_kind(self) -> TreeKind:
        """What a step drafts; choices whose file is not there are a chain."""
        if self.use_dynamic_tree:
            return "dynamic"
        return "chain" if self.static_tree is None else "static"

    @property
    def tree_label(self) -> str:
        """The tree in a few words."""
        return f"a {self.tree_kind} tree of {self.n_nodes} nodes"

    @property
    def n_nodes(self) -> int:
        """Nodes that a step sends to the target for a sequence, the root included."""
        if self.use_dynamic_tree:
            return self.decoding_tokens
        return self.num_speculative_tokens + 1 if self.static_tree is None else self.static_tree.n_nodes

    @property
    def is_lookup(self) -> bool:
        """Whether drafts are looked up on the host, and no draft model is read."""
        return self.method in LOOKUPS

    @property
    def tokens_in_flight(self) -> int:
        """Cache rows of a sequence beyond the committed ones: of the nodes, and of the draft's passes over beams."""
        return max(self.decoding_tokens, (self.depth - 1) * self.top_k)

    @property
    def depth(self) -> int:
        """Longest path in drafts, which is the number of levels that the draft computes."""
        return self.num_speculative_tokens

    @property
    def top_k(self) -> int:
        """Candidates of a node, and places of a beam."""
        if self.use_dynamic_tree:
            return self.dynamic_tree_max_top_k
        return 1 if self.static_tree is None else self.static_tree.top_k


def _check_tree_settings(spec: SpeculativeConfig) -> None:
    """What has to hold before a tree is read and limits are derived from it."""
    for name in ("use_dynamic_tree", "adaptive"):
        require_flag(name, getattr(spec, name))
    require_count("dynamic_tree_max_top_k", spec.dynamic_tree_max_top_k, MAX_TOP_K)
    if spec.use_dynamic_tree and spec.choices is not None:
        raise ConfigError(
            f"choices are {shown(spec.choices)} with use_dynamic_tree", "one of the two", "leave the other out"
        )


def _derived(spec: SpeculativeConfig) -> dict[str, int]:
    """Values of the depth and the limits that were left out; a bad depth is left to `validate_speculative_config`."""
    tree, depth = spec.static_tree, spec.num_speculative_tokens
    path, nodes = spec.max_path_len, spec.max_decoding_tokens
    if depth is DEFAULT_DEPTH:
        depth = int(depth) if tree is None else tree.depth
    if not is_count(depth):
        return {}
    values = {"num_speculative_tokens": depth}
    if path is None:
        path = values["max_path_len"] = max(5, depth + 1) if spec.tree_kind == "chain" else depth + 1
    if nodes is None and is_count(path):
        nodes = max(2 * depth, int(path), 0 if tree is None else tree.n_nodes)
        if spec.use_dynamic_tree:
            nodes = min(DYNAMIC_NODES, most_dynamic_nodes(spec.top_k, depth))
        values["max_decoding_tokens"] = nodes
    return values


def validate_speculative_config(spec: SpeculativeConfig) -> None:
    """Check the draft settings alone (docs/requirements.md R-02, R-08, R-34 to R-36).

    Raises:
        ConfigError: unknown or legacy method, a depth outside 1..8, non-positive or contradictory limits, a tree beyond
            them, tap ids without their convention.
    """
    _check_method(spec)
    require_count("num_speculative_tokens", spec.num_speculative_tokens, MAX_SPECULATIVE_TOKENS)
    for name in ("max_path_len", "max_decoding_tokens", "max_non_leaves_per_layer"):
        require_count(name, getattr(spec, name))
    check_lengths(spec.num_speculative_tokens, spec.path_len, spec.decoding_tokens)
    if spec.static_tree is not None:
        _check_static_tree(spec, spec.static_tree)
    if spec.use_dynamic_tree:
        _check_dynamic_tree(spec)
    check_window(spec.draft_window, spec.method in HEADS, spec.depth)
    check_taps(spec.capture_layers, spec.capture_convention, spec.method)
    check_feedback(spec.norm_output, spec.method)
    require_choice("draft_weights", spec.draft_weights, get_args(WeightFormat))
    require_choice("draft_cache_dtype", spec.draft_cache_dtype, get_args(CacheDtype))
    its = (spec.is_lookup, spec.method, spec.tree_kind, spec.depth)
    check_acceptance(spec.acceptance, *its, is_adaptive=spec.adaptive)


def _check_method(spec: SpeculativeConfig) -> None:
    if spec.method in LEGACY_METHODS:
        raise ConfigError(
            f"method is {spec.method!r}, a legacy method that this engine does not build",
            f"one of {METHODS}",
            "use an EAGLE-3 draft checkpoint and method='eagle3', or one of the others",
        )
    if spec.method not in METHODS:
        raise ConfigError(f"method is {spec.method!r}", f"one of {METHODS}", "set method='eagle3'")
    if spec.method not in HEADS:
        _check_chain_alone(spec)
    if not spec.is_lookup and not (isinstance(spec.model, str | PathLike) and spec.model):
        raise ConfigError(
            f"model is {shown(spec.model)} with method {spec.method!r}",
            "a draft checkpoint directory", "set SpeculativeConfig(model=DIR)",
        )  # fmt: skip


def _check_chain_alone(spec: SpeculativeConfig) -> None:
    names = ("model", *OF_A_HEAD) if spec.is_lookup else OF_A_HEAD
    given = [f"{name} {shown(getattr(spec, name))}" for name in names if is_given(getattr(spec, name))]
    of_a_draft = {"draft_weights": "as_stored", "draft_cache_dtype": "as_computed"} if spec.is_lookup else {}
    given += [f"{name} {shown(value)}" for name, usual in of_a_draft.items() if (value := getattr(spec, name)) != usual]
    if given:
        raise ConfigError(
            f"method is {spec.method!r} with {' and '.join(given)}",
            "a chain of num_speculative_tokens" + (", and no draft model" if spec.is_lookup else ""),
            "leave that out, or set method='eagle3'",
        )


def _check_static_tree(spec: SpeculativeConfig, tree: StaticTree) -> None:
    k = spec.num_speculative_tokens
    if tree.depth != k:
        raise ConfigError(
            f"num_speculative_tokens is {k} with choices of depth {tree.depth}", "the depth of the choices",
            "leave num_speculative_tokens out, or give choices of that depth",
        )  # fmt: skip
    widest = max(tree.non_leaves_by_depth)
    if widest > spec.max_non_leaves_per_layer:
        raise ConfigError(
            f"max_non_leaves_per_layer is {spec.max_non_leaves_per_layer} with choices whose levels have "
            f"{list(tree.non_leaves_by_depth)} nodes with children",
            f"at least {widest} for these choices", f"set max_non_leaves_per_layer={widest}, or give fewer children",
        )  # fmt: skip
    if tree.n_nodes > spec.decoding_tokens:
        raise ConfigError(
            f"max_decoding_tokens is {spec.decoding_tokens} with choices of {tree.n_nodes} nodes, root included",
            f"at least {tree.n_nodes} for these choices", f"set max_decoding_tokens={tree.n_nodes}, or leave it out",
        )  # fmt: skip


def _check_dynamic_tree(spec: SpeculativeConfig) -> None:
    k, depth = spec.dynamic_tree_max_top_k, spec.num_speculative_tokens
    most = most_dynamic_nodes(k, depth)
    if spec.decoding_tokens > most:
        raise ConfigError(
            f"max_decoding_tokens is {spec.decoding_tokens} with {depth} levels of dynamic_tree_max_top_k {k}",
            f"at most {most}: the root and all that the levels score",
            f"set max_decoding_tokens={most}, or raise dynamic_tree_max_top_k or num_speculative_tokens",
        )
    if depth > 1 and k > spec.max_non_leaves_per_layer:
        raise ConfigError(
            f"max_non_leaves_per_layer is {spec.max_non_leaves_per_layer} with dynamic_tree_max_top_k {k}",
            f"at least {k}: so many nodes of a level get children",
            f"set max_non_leaves_per_layer={k}, or lower dynamic_tree_max_top_k",
        )
