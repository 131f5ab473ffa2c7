"""Settings of the engine, validated before any model is read.

First stop of a batch: `pipeline` and `Engine` take these values and change their mode by nothing else
(docs/requirements.md R-03). How drafts are made is in `speculative`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Literal, get_args

from eagle3core.checks import is_count, require_choice, require_count, require_flag, require_ids
from eagle3core.errors import ConfigError, shown
from eagle3core.sampling import Sampling, check_sampling, sampling_of
from eagle3core.speculative import HEADS, CacheDtype, SpeculativeConfig

MOST_LOGPROBS = 20  # likeliest tokens of a place that may be asked for, as OpenAI has it
DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")
Mode = Literal["off", "single-token", "multi-token"]
TargetFormat = Literal["as_stored", "fp8", "dequantised"]


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs (docs/requirements.md R-05).

    Attributes:
        tp: tensor-parallel ranks; only 1 is built.
        session_len: longest prompt plus generation, tokens; at least 4 * max_new_tokens is a good rule.
        max_batch_size: slots, i.e. requests decoded together.
        block_size: tokens of one KV-cache block.
        prefill_chunk: rows of one pass over prompts, a multiple of `block_size`; of 64, for short ones to share it.
        prefill_share: share of the work that reading prompts may take while requests run, in (0, 1]; at 0.5 a pass is
            followed by about as long of steps, at 1.0 prompts are read to their end before the next step.
        cache_max_entry_count: share of the free device memory that both KV caches may take.
        cache_blocks: blocks of the caches, which all requests share; None: as many as `max_batch_size` sessions of
            `session_len` take, or as the share of memory holds. Where blocks run out the youngest request waits again.
        prefix_cache: keep full blocks whose request has ended for as long as nobody needs the room, and read no token
            again whose block lies there. Changes no answer. Off by default: a measurement that asks the same prompt
            again would find it read.
        dtype: compute dtype; "auto" takes the checkpoint's.
        cache_dtype: of the target's keys and values: "as_computed", or "fp8" (e4m3, by the checkpoint's scales), which
            takes a byte a value and changes answers a little (docs/engine.md).
        target_weights: format of the target's maps (docs/engine.md): "as_stored", where a checkpoint in FP8 keeps its
            bytes and scales; "fp8" quantises those that are not, the head among them; "dequantised" turns those that
            are into the dtype.
        device: "auto", "cpu" or "cuda".
        speculative_config: None runs plain greedy decoding.
        on_draft_failure: "raise", or "baseline" to decode without the draft and say why in `Engine.speculation`.
        enable_metrics: keep per-request counters (`Response.req_metrics`).
        collect_draft_ranks: also keep, per verified position, the draft's rank of the target's token.
        collect_last_states: also make the last layer's output for every token of a prompt, which decoding has no use
            for; for whoever records stages.
        acceptance_log: file to which every step appends a JSON line for each request (docs/metrics.md); None: none.
        max_tokens_per_step: tokens that a step sends to the target over all sequences, each one's root and what fills a
            program up among them; None: no limit. Chains become shorter as more requests run, and a tree, which is
            drafted whole or not at all, is left out where it does not fit (docs/engine.md).
    """

    tp: int = 1
    session_len: int = 2048
    max_batch_size: int = 8
    block_size: int = 64
    prefill_chunk: int = 512
    prefill_share: float = 0.5
    cache_max_entry_count: float = 0.75
    cache_blocks: int | None = None
    prefix_cache: bool = False
    dtype: str = "auto"
    cache_dtype: CacheDtype = "as_computed"
    target_weights: TargetFormat = "as_stored"
    device: str = "auto"
    speculative_config: SpeculativeConfig | None = None
    on_draft_failure: Literal["raise", "baseline"] = "raise"
    enable_metrics: bool = True
    collect_draft_ranks: bool = False
    collect_last_states: bool = False
    acceptance_log: str | PathLike[str] | None = None
    max_tokens_per_step: int | None = None

    def __post_init__(self) -> None:
        validate_engine_config(self)

    @property
    def mode(self) -> Mode:
        """Decoding mode; a function of the configuration alone (docs/requirements.md R-03)."""
        if self.speculative_config is None:
            return "off"
        return "single-token" if self.speculative_config.n_nodes == 2 else "multi-token"

    @property
    def keeps_ranks(self) -> bool:
        """Whether a step keeps what its drafts leave out: ranks where asked for, and the shape of a logged tree."""
        spec = self.speculative_config
        is_tree = spec is not None and spec.tree_kind != "chain" and spec.acceptance is None
        return self.collect_draft_ranks or (self.acceptance_log is not None and is_tree and not self.varies_depth)

    @property
    def varies_depth(self) -> bool:
        """Whether steps differ in their drafts: chosen anew, or as many as the most tokens of a step leave room for."""
        spec, most = self.speculative_config, self.max_tokens_per_step
        return spec is not None and (spec.adaptive or (most is not None and most < self.max_batch_size * spec.n_nodes))


@dataclass(frozen=True)
class GenerationConfig:
    """When a request ends, and how its tokens are chosen (docs/requirements.md R-60, R-75).

    Attributes:
        max_new_tokens: tokens to generate at most.
        ignore_eos: go on past the model's end-of-sequence tokens.
        stop_token_ids: further token ids that end the request (the token is kept in `token_ids`).
        stop_words: strings that end the request; the text is cut before them.
        temperature: 0 is greedy; above 0 tokens are drawn from the target's distribution, drafts or not, and the
            settings below say from what part of it (`sampling.Sampling`).
        top_k, top_p, min_p, posterior_threshold: tokens that are left out; by default none.
        seed: of the draws; None takes one by chance, which the response then names.
        max_draft_tokens: most drafts of a step that this request uses, at most as many as the engine makes; None: all.
            It changes speed, not tokens (of some rules of acceptance tokens too: docs/engine.md).
        logprobs: True keeps every token's log-probability under the target, before temperature; a number also those of
            so many likeliest tokens of its place (`Response.logprobs`).
    """

    max_new_tokens: int = 128
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_words: tuple[str, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    posterior_threshold: float = 0.0
    seed: int | None = None
    logprobs: bool | int = False
    max_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop_token_ids", "stop_words"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise ConfigError(f"{name} is {shown(value)}", "a sequence", f"write {name}=({shown(value)},)")
            object.__setattr__(self, name, tuple(value))
        require_ids("stop_token_ids", self.stop_token_ids, "token ids")
        require_count("max_new_tokens", self.max_new_tokens)
        require_flag("ignore_eos", self.ignore_eos)
        if not isinstance(self.logprobs, bool) and not (is_count(self.logprobs) and self.logprobs <= MOST_LOGPROBS):
            allowed = f"True, False or an integer from 1 to {MOST_LOGPROBS}"
            raise ConfigError(f"logprobs is {shown(self.logprobs)}", allowed, "set logprobs to one of them")
        most = self.max_draft_tokens
        if isinstance(most, bool) or not (most is None or (isinstance(most, int) and most >= 0)):
            allowed = "None or an integer of at least 0"
            raise ConfigError(f"max_draft_tokens is {shown(most)}", allowed, "leave it out, or set it to 0 or more")
        check_sampling(*self._draws)
        for word in self.stop_words:
            if not isinstance(word, str) or not word:
                raise ConfigError(f"stop_words holds {shown(word)}", "non-empty strings", "correct or remove it")

    @property
    def _draws(self) -> tuple[float, int, float, float, float, int | None]:
        return self.temperature, self.top_k, self.top_p, self.min_p, self.posterior_threshold, self.seed

    @property
    def n_top(self) -> int | None:
        """Likeliest tokens that are kept beside each token's log-probability; None where none of it is asked for."""
        return None if self.logprobs is False else 0 if self.logprobs is True else self.logprobs

    def sampling(self) -> Sampling | None:
        """How a request draws its tokens, each call with a seed of its own where none is set; None for a greedy one."""
        return sampling_of(*self._draws)


def validate_engine_config(config: EngineConfig) -> None:
    """Check the engine settings, with the draft settings in them (docs/requirements.md R-04, R-06; 1.X-24).

    Raises:
        ConfigError: with the value, the allowed range and the remedy.
    """
    if config.tp != 1:
        raise ConfigError(f"tp is {config.tp!r}", "1: tensor parallelism is not built", "set tp=1")
    for name in ("session_len", "max_batch_size", "block_size", "prefill_chunk"):
        require_count(name, getattr(config, name))
    if config.cache_blocks is not None:
        require_count("cache_blocks", config.cache_blocks)
    if config.prefill_chunk % config.block_size:
        raise ConfigError(
            f"prefill_chunk is {config.prefill_chunk} with block_size {config.block_size}",
            "a multiple of block_size",
            f"set prefill_chunk={max(1, config.prefill_chunk // config.block_size) * config.block_size}",
        )
    _require_share("cache_max_entry_count", config.cache_max_entry_count, 0.75)
    _require_share("prefill_share", config.prefill_share, 0.5)
    require_choice("dtype", config.dtype, DTYPES)
    require_choice("cache_dtype", config.cache_dtype, get_args(CacheDtype))
    require_choice("target_weights", config.target_weights, get_args(TargetFormat))
    require_choice("device", config.device, ("auto", "cpu", "cuda"))
    for name in ("enable_metrics", "collect_draft_ranks", "collect_last_states", "prefix_cache"):
        require_flag(name, getattr(config, name))
    if not (
        config.acceptance_log is None or (isinstance(config.acceptance_log, str | PathLike) and config.acceptance_log)
    ):
        what, allowed = f"acceptance_log is {shown(config.acceptance_log)}", "the name of a file, or None"
        raise ConfigError(what, allowed, "name a file, or leave it out")
    require_choice("on_draft_failure", config.on_draft_failure, ("raise", "baseline"))
    spec = config.speculative_config
    if spec is not None and not isinstance(spec, SpeculativeConfig):
        raise ConfigError(
            f"speculative_config is {spec!r}", "a SpeculativeConfig or None", "write SpeculativeConfig(model=DIR)"
        )
    if spec is not None and config.session_len < spec.decoding_tokens:
        raise ConfigError(
            f"session_len is {config.session_len} with max_decoding_tokens {spec.decoding_tokens}",
            "session_len >= max_decoding_tokens",
            "raise session_len or lower num_speculative_tokens",
        )
    _check_step_tokens(config)
    if spec is not None and config.varies_depth and config.collect_draft_ranks:
        raise ConfigError(
            f"collect_draft_ranks is on with {'adaptive speculation' if spec.adaptive else 'max_tokens_per_step'}",
            "one of the two: ranks are kept of steps that all have the same depth",
            "leave one of them out",
        )
    if spec is not None and spec.method not in HEADS and config.collect_draft_ranks:
        raise ConfigError(
            f"collect_draft_ranks is on with method {spec.method!r}",
            "ranks in the order of a head, method 'eagle3' or 'eagle'",
            "leave collect_draft_ranks out",
        )
    if spec is not None and spec.acceptance is not None and config.collect_draft_ranks:
        raise ConfigError(
            f"collect_draft_ranks is on with acceptance {spec.acceptance.label}",
            "ranks of the target's own choice, acceptance None",
            "leave collect_draft_ranks or acceptance out",
        )


def _check_step_tokens(config: EngineConfig) -> None:
    """That every sequence has at least its root in a step, and that a rule of acceptance bears steps of all depths."""
    most, spec = config.max_tokens_per_step, config.speculative_config
    if most is None:
        return
    require_count("max_tokens_per_step", most)
    if most < config.max_batch_size:
        raise ConfigError(
            f"max_tokens_per_step is {most} with max_batch_size {config.max_batch_size}",
            "at least max_batch_size: a step without drafts sends one token for each sequence",
            f"set max_tokens_per_step={config.max_batch_size} or more, or lower max_batch_size",
        )
    rule = spec.acceptance if spec is not None else None
    if config.varies_depth and rule is not None and rule.of_one_depth is not None:
        raise ConfigError(
            f"max_tokens_per_step is {most} with acceptance {rule.label}, where {rule.of_one_depth}",
            "acceptance None, RelaxedAcceptance or MedusaAcceptance where chains become shorter",
            "leave max_tokens_per_step out, or acceptance",
        )


def _require_share(name: str, value: object, usual: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= 1.0:
        raise ConfigError(f"{name} is {shown(value)}", "a share in (0, 1]", f"set {name} to {usual}")
