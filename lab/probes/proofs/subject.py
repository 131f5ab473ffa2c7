"""The pair under proof as packed models, and engines over it that can be watched step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from eagle3core import Engine
from eagle3core.backend import Backend
from eagle3core.config import EngineConfig
from eagle3core.kernels import launch
from eagle3core.loading import device_sizes
from eagle3core.memory import plan_loaded
from eagle3core.speculative import CacheDtype, SpeculativeConfig
from eagle3core.step import DeviceRunner, GraphReplayer, Replayer
from eagle3core.trace import Trace
from eagle3core.weights import PackedDraft, PackedTarget
from lab.acceptance.shapes import shape_named
from lab.errors import ExperimentError
from lab.options.formats import Formats
from lab.pairs.planted import TokenMap, share_for_length
from lab.probes.bench.scenario import Point, Scenario
from lab.probes.bench.source import open_pair

PLANTED_LENGTH, PLANTED_DEPTH = 3.0, 3  # the dial: tokens a step at three drafts

Watch = Callable[["WatchedEngine"], AbstractContextManager[None]]


class WatchedEngine(Engine):
    """An engine whose steps run inside a context that a proof gives.

    Attributes:
        watch: makes the context of one step; None leaves steps alone.
    """

    watch: Watch | None = None

    def step(self) -> bool:
        """One round of the scheduler, watched."""
        if self.watch is None:
            return super().step()
        with self.watch(self):
            return super().step()


@dataclass(frozen=True)
class Setting:
    """What an engine is made for.

    Attributes:
        k: drafts of a chain; of a tree the most on a path.
        batch: slots. session_len: tokens of a session.
        tree: name of a tree's shape (`lab.acceptance.shapes`), or None for a chain.
        cache_blocks: of a cache that keeps blocks for texts that begin alike; None: room for every session, none kept.
        adaptive: `k` is the most, and each step's depth is chosen anew.
        chunk: rows of the largest pass over prompts, or None for the subject's.
        last_states: the last layer's output is made for every token of a prompt.
    """

    k: int
    batch: int
    session_len: int
    tree: str | None = None
    cache_blocks: int | None = None
    adaptive: bool = False
    chunk: int | None = None
    last_states: bool = False

    @property
    def drafts(self) -> str:
        """What a step drafts, in a word or two."""
        return self.tree or f"spec-{self.k}"

    def speculation(self, model: str) -> SpeculativeConfig | None:
        """The draft settings; None for plain decoding."""
        if self.tree is not None:
            return SpeculativeConfig(model=model, **shape_named(self.tree).settings)
        if not self.k:
            return None
        return SpeculativeConfig(model=model, num_speculative_tokens=self.k, adaptive=self.adaptive)


def tree_setting(tree: str, batch: int, session_len: int) -> Setting:
    """The setting of a tree's shape by its name."""
    spec = Setting(0, batch, session_len, tree).speculation(tree)
    assert spec is not None, "a tree drafts"
    return Setting(spec.depth, batch, session_len, tree)


@dataclass(frozen=True)
class Subject:
    """A pair whose engines are proven.

    Attributes:
        name: for rows.
        target, draft: packed, on one device.
        tokens: the planted map, or None for a trained pair.
        arch: compile target. replayer: how programs run.
        settings: of `EngineConfig`, beside what a `Setting` says.
        order: (splits, streams) of attention, or None for the architecture's own.
        draft_cache_dtype: of the draft's keys and values.
    """

    name: str
    target: PackedTarget
    draft: PackedDraft
    tokens: TokenMap | None
    arch: str
    replayer: Replayer
    settings: Mapping[str, Any] = field(default_factory=dict)
    order: tuple[int, int] | None = None
    draft_cache_dtype: CacheDtype = "as_computed"

    @property
    def on_gpu(self) -> bool:
        """Whether its engines run on a GPU."""
        return self.target.device.type == "cuda"

    def config(self, setting: Setting) -> EngineConfig:
        """The configuration of an engine."""
        chunk = {} if setting.chunk is None else {"prefill_chunk": setting.chunk}
        spec = setting.speculation(self.name)
        if spec is not None:
            spec = replace(spec, draft_weights=self.draft.weights, draft_cache_dtype=self.draft_cache_dtype)
        return EngineConfig(**{
            "session_len": setting.session_len, "max_batch_size": setting.batch, "cache_max_entry_count": 0.95,
            "dtype": str(self.target.dtype).removeprefix("torch."), "device": self.target.device.type,
            "cache_blocks": setting.cache_blocks, "prefix_cache": setting.cache_blocks is not None,
            "collect_last_states": setting.last_states, **self.settings, **chunk,
        }, speculative_config=spec)  # fmt: skip

    def runner(
        self,
        setting: Setting,
        through: Callable[[Replayer], Replayer] | None = None,
        n_blocks: int | None = None,
    ) -> DeviceRunner:
        """A runner for a setting; a plain one captures no taps, as a plain engine's target does not."""
        sizes = device_sizes(self.config(setting), drafts=setting.k > 0, n_blocks=n_blocks)
        target = self.target if setting.k else replace(self.target, taps=())
        draft = self.draft if setting.k else None
        replayer = through(self.replayer) if through else self.replayer
        return DeviceRunner(target, draft, sizes, arch=self.arch, replayer=replayer, order=self.order)

    def engine(
        self,
        setting: Setting,
        *,
        trace: Trace | None = None,
        through: Callable[[Replayer], Replayer] | None = None,
    ) -> WatchedEngine:
        """An engine for a setting.

        Args:
            through: wraps the replayer, to see or time what is run.

        Raises:
            ExperimentError: the session is longer than the target's positions.
            ConfigError: it does not fit in memory.
        """
        config, path = self.config(setting), "kernels" if self.on_gpu else "torch"
        limit = self.target.geometry.max_position_embeddings
        if setting.session_len > limit:
            raise ExperimentError(
                f"a session of {setting.session_len} tokens",
                f"at most {limit}, the target's positions",
                "shorten context or answer",
            )
        backend = Backend(self.target.device, "the proof's device", path, self.arch)  # type: ignore[arg-type]
        plan = plan_loaded(self.target, self.draft if setting.k else None, config, backend)
        runner = self.runner(setting, through, plan.n_blocks)
        if self.on_gpu:
            runner.prepare()
        return WatchedEngine(
            runner.target, runner.draft, config, trace=trace, backend=backend, memory_plan=plan, runner=runner
        )


def open_subject(geometry: str, device: str = "cuda", formats: Formats | None = None) -> Subject:
    """The shipped pair ("shipped") or a planted one of a geometry, packed in bf16 or `formats` on a GPU."""
    own: Formats = {**(formats or {})}
    is_shipped = geometry == "shipped"
    scenario = Scenario(
        geometry=geometry, pair="shipped" if is_shipped else "planted", points=(Point(512, 1),), ks=(0, PLANTED_DEPTH),
        share=share_for_length(PLANTED_LENGTH, PLANTED_DEPTH), dtype="bfloat16", device=device, peers=(),
        **own,
    )  # fmt: skip
    source = open_pair(scenario)
    assert source.target.is_packed, "a pair in bf16 on a GPU is packed for its kernels"
    tokens = source.planted.tokens if source.planted else None
    name = geometry if is_shipped else f"planted {geometry}"
    on = source.target.device
    settings = {"cache_dtype": own.get("cache_dtype", "as_computed")}
    draft_cache = own.get("draft_cache_dtype", "as_computed")
    return Subject(
        name, source.target, source.draft, tokens, launch.device_arch(on), GraphReplayer(on), settings,
        draft_cache_dtype=draft_cache,
    )  # fmt: skip
