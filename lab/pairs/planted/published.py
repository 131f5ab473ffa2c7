"""Shapes by name: those of published models, with the heads drafted for them, and small ones for a CPU.

Source: the published config.json files of the models named; the head of gpt-oss-120b after docs/requirements.md R-21.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

from eagle3core.geometry import BlockGeometry, DraftGeometry, ExpertsGeometry, RopeGeometry, TargetGeometry
from lab.errors import ExperimentError
from lab.options.values import read_cut_name
from lab.pairs.planted.geometries import PlantedGeometry

LEAST_LAYERS = 2  # of a cut target: its draft reads three inputs of layers, the last one's output among them


def _geometry(
    name: str,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    draft_vocab: int,
    taps: tuple[int, ...],
    draft_ffn: int | None = None,
    max_position: int = 131072,
    rope: RopeGeometry | None = None,
    eps: float = 1e-5,
    qk_norm: bool = False,
) -> PlantedGeometry:
    """A target and a head of one layer as wide as the target's."""
    rope = rope or RopeGeometry()
    block = BlockGeometry(hidden, ffn, heads, kv_heads, head_dim, eps, rope, qk_norm)
    own = BlockGeometry(hidden, draft_ffn or ffn, heads, kv_heads, head_dim, eps, RopeGeometry(rope.theta))
    target = TargetGeometry(block, layers, vocab, max_position)
    return PlantedGeometry(name, target, DraftGeometry(own, hidden, vocab, draft_vocab, taps, False, True))


def _with_experts(
    name: str, dense: PlantedGeometry, experts: ExpertsGeometry, *, window: int = 0, draft_ffn: int | None = None,
    draft_vocab: int | None = None,
) -> PlantedGeometry:  # fmt: skip
    """`dense` with experts in every layer; with `window`, gpt-oss's layers: biases, sinks, every other one windowed."""
    target, draft = dense.target, dense.draft
    target = replace(target, block=replace(target.block, experts=experts, has_sinks=window > 0))
    if window:
        windows = tuple(window * (i % 2 == 0) for i in range(target.n_layers))
        target = replace(target, attention_bias=True, windows=windows)
    own = replace(draft.block, intermediate_size=draft_ffn or draft.block.intermediate_size)
    draft = replace(draft, block=own, draft_vocab_size=draft_vocab or draft.draft_vocab_size)
    return PlantedGeometry(name, target, draft)


def _gpt_oss(name: str, *, layers: int, experts: int, **draft: int) -> PlantedGeometry:
    """A published gpt-oss, whose widths are all alike, with the head of R-21 or one of other widths."""
    taps = (2, layers // 2, layers - 3)
    dense = _geometry(
        name, hidden=2880, layers=layers, heads=64, kv_heads=8, head_dim=64, ffn=2880, draft_ffn=17280, vocab=201088,
        draft_vocab=32000, taps=taps, rope=_YARN,
    )  # fmt: skip
    in_4_bits = ExpertsGeometry(experts, 4, 2880, gate="clamped", is_mxfp4=True)
    return _with_experts(name, dense, in_4_bits, window=128, **draft)


_YARN = RopeGeometry(150000.0, "yarn", 32.0, original_max_position=4096, truncate=False)
_LLAMA_31 = RopeGeometry(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
_LLAMA_32 = RopeGeometry(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
_QWEN3: dict[str, Any] = {
    "kv_heads": 8, "head_dim": 128, "vocab": 151936, "draft_vocab": 32000, "max_position": 40960, "eps": 1e-6,
    "rope": RopeGeometry(1e6), "qk_norm": True,
}  # fmt: skip

GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        _geometry(
            "llama-3.1-8b", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256,
            draft_vocab=32000, taps=(2, 16, 29), rope=_LLAMA_31,
        ),
        _geometry(
            "llama-3.1-70b", hidden=8192, layers=80, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocab=128256,
            draft_vocab=32000, taps=(2, 40, 77), rope=_LLAMA_31,
        ),
        # But for their tied tables, as below: a step reads as many bytes either way.
        _geometry(
            "llama-3.2-1b", hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128256,
            draft_vocab=32000, taps=(2, 8, 13), rope=_LLAMA_32,
        ),
        _geometry(
            "llama-3.2-3b", hidden=3072, layers=28, heads=24, kv_heads=8, head_dim=128, ffn=8192, vocab=128256,
            draft_vocab=32000, taps=(2, 14, 25), rope=_LLAMA_32,
        ),
        _geometry("qwen3-8b", hidden=4096, layers=36, heads=32, ffn=12288, taps=(2, 18, 33), **_QWEN3),
        _geometry("qwen3-4b", hidden=2560, layers=36, heads=32, ffn=9728, taps=(2, 18, 33), **_QWEN3),
        _gpt_oss("gpt-oss-20b", layers=24, experts=32),
        _gpt_oss("gpt-oss-120b", layers=36, experts=128),
        # A quarter of the head's feed-forward and half of its vocabulary (docs/requirements.md R-30).
        _gpt_oss("gpt-oss-20b-thin", layers=24, experts=32, draft_ffn=4320, draft_vocab=16000),
        _gpt_oss("gpt-oss-120b-thin", layers=36, experts=128, draft_ffn=4320, draft_vocab=16000),
        _with_experts(
            "qwen3-30b-a3b", _geometry(
                "qwen3-30b-a3b", hidden=2048, layers=48, heads=32, ffn=6144, taps=(2, 24, 45),
                **{**_QWEN3, "kv_heads": 4},
            ), ExpertsGeometry(128, 8, 768),
        ),
        # The shapes of the pair in lab/pairs/shipped, but for its tied table: a tied one has no room for a map.
        _geometry(
            "shipped", hidden=256, layers=8, heads=4, kv_heads=2, head_dim=64, ffn=640, draft_ffn=768, vocab=4096,
            draft_vocab=1024, taps=(2, 4, 5), max_position=2048,
        ),
        # For a CPU: a cycle long enough to count acceptance on, layers few enough for thousands of steps.
        _geometry(
            "nano", hidden=256, layers=3, heads=4, kv_heads=2, head_dim=64, ffn=320, vocab=6144, draft_vocab=4096,
            taps=(0, 1, 2), max_position=16384,
        ),
        # gpt-oss in small.
        _with_experts(
            "nano-experts", _geometry(
                "nano-experts", hidden=256, layers=4, heads=4, kv_heads=2, head_dim=64, ffn=64, draft_ffn=320,
                vocab=6144, draft_vocab=4096, taps=(0, 2, 4), max_position=16384, rope=_YARN,
            ), ExpertsGeometry(32, 4, 64, gate="clamped", is_mxfp4=True), window=16,
        ),
    )
}  # fmt: skip


def find_geometry(name: str) -> PlantedGeometry:
    """The geometry of that name, or the first layers of one (`lab.options.values.cut_name`).

    Raises:
        ExperimentError: there is none, or it has fewer layers.
    """
    whole, layers = read_cut_name(name)
    if whole in GEOMETRIES:
        return GEOMETRIES[whole] if layers is None else _cut(GEOMETRIES[whole], name, layers)
    close = difflib.get_close_matches(name, GEOMETRIES, 1)
    raise ExperimentError(
        f"no geometry {name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""),
        ", ".join(GEOMETRIES),
        "name one of these",
    )


def _cut(geometry: PlantedGeometry, name: str, layers: int) -> PlantedGeometry:
    target, most = geometry.target, geometry.target.n_layers
    if not LEAST_LAYERS <= layers <= most:
        raise ExperimentError(
            f"{layers} layers of {geometry.name}", f"{LEAST_LAYERS} to {most}", "correct the number of layers"
        )
    target = replace(target, n_layers=layers, windows=target.windows[:layers])
    low, middle, high = target.default_taps
    taps = (low, middle, high) if low < middle < high else (0, layers // 2, layers)
    return PlantedGeometry(name, target, replace(geometry.draft, taps=taps))
