"""What attention's card offers: kernels that are compiled ahead, shapes worth measuring, settings worth timing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from eagle3core.kernels import tuned
from eagle3core.kernels.attention.cases import further_words_of, masked_of, prefixes_of
from eagle3core.kernels.attention.layout import BUNDLE, Shape, shape_over
from eagle3core.kernels.attention.plan import Plan, choose_plan, is_grouped, order_of, ruled_plan
from eagle3core.kernels.attention.variant import attention_variant, combine_variant
from eagle3core.kernels.attention.warp.splits import has_splits_kernel
from eagle3core.kernels.card import SHARED_BYTES, Case, Variant


def shape_of(arch: str, case: Case) -> Shape:
    """What a case's kernels are made for."""
    order = case.get("order") or order_of(arch, case["kv_heads"], case["dim"])
    group = case["heads"] // case["kv_heads"]
    return shape_over(arch, bool(case.get("fp8")), case["dtype"], case["dim"], group, order)


def plan_of(arch: str, case: Case, setting: Mapping[str, Any]) -> Plan:
    """How a case is cut, by the engine's choice but for `setting`."""
    shape = shape_of(arch, case)
    keys = max(prefixes_of(case)) + masked_of(case)
    sizes = (case["tokens"], len(prefixes_of(case)), case["kv_heads"], keys)
    plan = choose_plan(arch, shape, *sizes, paths=bool(case.get("paths")))
    if "groups" in setting:
        setting = {**setting, "groups": min(setting["groups"], shape.streams)}
    if setting.get("by_split"):
        has_kernel = has_splits_kernel(shape, case["tokens"]) and not case.get("paths")
        setting = {**setting, "run": shape.bundle} if has_kernel else {}
    elif setting:
        setting = {"by_split": False, **setting}
    return replace(plan, counting=bool(case.get("counting")), **setting)


def attention_variants_of(arch: str, case: Case, **setting: Any) -> list[Variant]:
    """The variants that a case launches."""
    shape, plan = shape_of(arch, case), plan_of(arch, case, setting)
    paths = bool(case.get("paths"))
    windowed, words = bool(case.get("window")), further_words_of(case)
    whole = plan.is_whole(shape, paths=paths, words=words)
    first = attention_variant(
        arch, shape, case["tokens"], plan, words=words, paths=paths, windowed=windowed, whole=whole
    )
    return [first] if whole else [first, combine_variant(arch, shape, joined=plan.is_joined(shape))]


_KINDS = ((128, 32), (64, 64))  # head size, query heads; 8 key heads


def measured_cases() -> tuple[Case, ...]:
    """Decoding and verifying, chunks and chains, then trees; then a draft that reads its tree a level of 10 nodes at a
    time, in a middle and in its last pass of seven (the default tree of github.com/SafeAILab/EAGLE); then gpt-oss's
    layers with a window of 128 over a long text: a token, a chain of three drafts, a chunk and a tree."""
    kinds: list[Case] = [{"dtype": "bf16", "dim": dim, "heads": heads, "kv_heads": 8} for dim, heads in _KINDS]
    whole = [
        {**kind, "batch": batch, "kv": kv, "tokens": tokens}
        for kind in kinds
        for batch, kv in ((1, 32768), (4, 16384))
        for tokens in (1, 4, 8, 16, 32, 64)
    ]
    trees = [{**kinds[0], "batch": 1, "kv": kv, "tokens": 60, "paths": True} for kv in (512, 32768)]
    levels = [
        {**kind, "batch": 1, "kv": kv, "tokens": 10, "earlier": earlier}
        for kind in kinds
        for kv in (512, 32768)
        for earlier in (30, 60)
    ]
    near: list[Case] = [{**kinds[1], "batch": 1, "kv": 32768, "tokens": tokens, "window": 128} for tokens in (1, 4, 64)]
    near.append({**near[0], "tokens": 60, "paths": True})
    return (*whole, *trees, *levels, *near)


def _variants(
    arch: str, wanted: Sequence[tuple[str, int, int]], batches: Sequence[int], setting: Mapping[str, Any] | None = None,
    **more: Any,
) -> list[Variant]:  # fmt: skip
    """What (dtype, head size, tokens) launch; the largest batch lets a block join the splits of a bundle."""
    made: dict[str, Variant] = {}
    for dtype, dim, tokens in wanted:
        about = {"dtype": dtype, "dim": dim, "heads": dict(_KINDS)[dim], "kv_heads": 8, "kv": 1024, "tokens": tokens}
        about |= more
        for batch in batches:
            made |= {v.name: v for v in attention_variants_of(arch, {**about, "batch": batch}, **setting or {})}
    return list(made.values())


# Tokens whose kernels are those of all numbers up to the most: for one more of them a kernel has another tile of rows,
# a tree another unit (a test counts through all). Most first, so that a form's first variant has most registers.
_TOKENS = (64, 49, 32, 17, 16, 15, 8, 7, 4, 2, 1)


def _asked_for(arch: str) -> list[Variant]:
    """What an engine asks for: any number of tokens, of one sequence or four, chains and trees, both kinds of cache;
    and warps that own splits, of many short sessions.

    Both forms of each: which of them a launch takes depends on its splits a block, hence on batch and processors.
    """
    made: dict[str, Variant] = {}
    by_split = {"by_split": True, "row_warps": 0, "units": 1, "stages": 2}
    for dim, tokens in ((128, 4), (128, 2), (64, 2), (64, 1)):  # the most rows of each kernel for few
        made |= {v.name: v for v in _variants(arch, [("bf16", dim, tokens)], (1,), by_split)}
    for paths, (dim, _), fp8, tokens in product((False, True), _KINDS, (False, True), _TOKENS):
        about = {"paths": paths, "fp8": fp8}
        for run in (1, BUNDLE):
            made |= {v.name: v for v in _variants(arch, [("bf16", dim, tokens)], (1, 4), {"run": run}, **about)}
    return list(made.values())


def attention_variants(arch: str) -> list[Variant]:
    """Variants with many registers on one architecture, a small one on the others: most take five seconds and more."""
    if arch == "sm_90a":
        return _variants(arch, [("bf16", 128, 8)], batches=(4,)) + _variants(arch, [("bf16", 128, 8)], (1,), fp8=True)
    return _variants(arch, [("bf16", 64, 1)], batches=(1,))


def attention_slow_variants(arch: str) -> list[Variant]:
    """What an engine asks for, then fp16, keys of earlier passes and windows; on the other architectures fewer."""
    made = _asked_for(arch)
    if arch != "sm_90a":
        made += _variants(arch, [("bf16", 128, 10), ("bf16", 64, 3)], batches=(1,), earlier=30)
        made += _variants(arch, [("bf16", 128, 10)], batches=(1,), earlier=30, window=512)
        made += _variants(arch, [("bf16", 64, 16)], batches=(1,), paths=True, window=128)
    else:
        made += _variants(arch, [("f16", 128, 8), ("f16", 64, 8)], batches=(4,))
        made += _variants(arch, [("bf16", dim, t) for dim, _ in _KINDS for t in (1, 3, 10)], batches=(1,), earlier=30)
        made += _variants(arch, [("bf16", 128, 10)], batches=(4,), earlier=30)
        made += _variants(arch, [("bf16", 128, t) for t in (3, 10)], batches=(1,), earlier=30, window=512)
        made += _variants(arch, [("bf16", 128, 10)], batches=(1,), earlier=30, fp8=True)
        made += _variants(arch, [("f16", 128, 8)], batches=(4,), fp8=True)
        made += _variants(
            arch, [("bf16", 64, 8), ("bf16", 64, 60), ("bf16", 128, 60)], batches=(1,), paths=True, window=128
        )
    fast = {v.name for v in attention_variants(arch)}
    return list({v.name: v for v in made if v.name not in fast}.values())


SHORT_RINGS = (3, 2)  # stages of one unit


def attention_sweep(arch: str, case: Case) -> list[Mapping[str, Any]]:
    """Splits of a block, which need no kernel of their own beside the joined one, and units one at a time; where
    streams have few, or keys are in e4m3, also in rings so short that a processor has room for several blocks."""
    shape, batch = shape_of(arch, case), len(prefixes_of(case))
    # That of long sessions, whatever the rule has for these: the first candidate is what is used now in any case.
    plan = ruled_plan(
        arch, shape, case["tokens"], batch, case["kv_heads"], tuned.LONG_KEYS,
        grouped=is_grouped(arch, shape, case["tokens"]),
    )  # fmt: skip
    chosen = {name: getattr(plan, name) for name in tuned.NEUTRAL["attention"]}
    runs = [run for run in (1, 2, 4, 8, 16) if run <= shape.splits]
    found = [{**chosen, "run": run} for run in runs]
    if plan.row_warps == 0:
        one_by_one = {**chosen, "units": 1}
        found += [{**one_by_one, "stages": 2 * plan.stages}] if plan.units > shape.least_units else []
        if shape.is_fp8:  # whose sets are to be widened: a processor has room for two blocks that do, or three
            found += [{**chosen, "stages": plan.stages // blocks, "run": run} for blocks in (2, 3) for run in runs]
        is_short = case.get("kv", tuned.MIDDLE_KEYS) < tuned.MIDDLE_KEYS
        rings = SHORT_RINGS if is_short and shape.least_units == 1 else ()
        found += [{**one_by_one, "stages": stages, "run": run} for stages in rings for run in runs]
        if has_splits_kernel(shape, case["tokens"]):
            split = {**one_by_one, "by_split": True, "run": shape.bundle}
            found += [{**split, "stages": stages} for stages in rings or (2 * plan.stages, SHORT_RINGS[0])]
    elif not plan.grouped and plan.units > 1 and plan.row_warps // 4 < plan.units:
        found.append({**chosen, "units": plan.units // 2})
    fitting = [one for one in found if attention_variant(arch, shape, case["tokens"], Plan(**one)).shared_bytes
               <= SHARED_BYTES[arch]]  # fmt: skip
    return list({tuple(sorted(one.items())): one for one in fitting}.values())
