"""`attention_splits`: the bits of `attention_streams`, its early reads, what it refuses, and planted bugs found."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from early_reads import early_reads_of_new_keys
from planted_sources import rebuilt

from eagle3core.errors import ConfigError, KernelLimit
from eagle3core.kernels import proof
from eagle3core.kernels.attention import totals as attention_totals
from eagle3core.kernels.attention import variant as attention_variants
from eagle3core.kernels.attention.card import CARD
from eagle3core.kernels.attention.layout import Shape, shape_over
from eagle3core.kernels.attention.overrides import KV_TILE, MAX_TILES, SPLITS_PER_CTA, overrides
from eagle3core.kernels.attention.plan import Plan, choose_plan, order_of
from eagle3core.kernels.attention.variant import attention_variant
from eagle3core.kernels.attention.warp import fetch as attention_fetch
from eagle3core.kernels.attention.warp import split as attention_split
from eagle3core.kernels.attention.warp import splits as attention_splits
from eagle3core.kernels.attention.warp import walk as attention_walk
from eagle3core.kernels.card import Case, Tensors
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.tuned import NO_FILE, TUNED_VARIABLE

pytestmark = pytest.mark.emulated
CPU = torch.device("cpu")
STREAMS = {"by_split": False, "row_warps": 0, "units": 1, "stages": 2}
SPLITS = {**STREAMS, "by_split": True}
CHAIN: Case = {
    "dtype": "bf16", "dim": 64, "heads": 2, "kv_heads": 1, "order": (8, 2), "tokens": 3, "prefix": (300, 14),
    "tree": "chain",
}  # fmt: skip
FEW = {**CHAIN, "dim": 128, "heads": 4, "tokens": 1, "order": (16, 4), "prefix": (1100, 40, -1), "tree": "none"}
WIDE = {**CHAIN, "tokens": 4, "heads": 4}  # more than eight rows, of which a lane then has two
CASES: dict[str, Case] = {
    "a stream of several units, and one without": CHAIN,
    "at most eight rows": {**CHAIN, "tokens": 1, "heads": 4, "dim": 128, "prefix": (290, 0)},
    "as many rows as there may be": {**WIDE, "tree": "random"},
    "a window, sinks, an empty slot": {
        **CHAIN, "tokens": 2, "prefix": (150, -3), "window": 70, "sinks": True, "tree": "random",
    },
    "keys of earlier passes": {**CHAIN, "prefix": (170, 9), "earlier": 5, "tree": "random"},
    "both": {**CHAIN, "prefix": (170, 9), "earlier": 5, "window": 20, "tree": "random"},
    "eight streams a split": {**CHAIN, "order": (4, 8), "heads": 8, "tokens": 2},
    "fewer splits than a bundle has elsewhere": {**CHAIN, "order": (2, 2), "prefix": (93,)},
}  # fmt: skip


def ran(case: Case, inputs: Tensors, **setting: Any) -> Tensors:
    return proof.run(CARD, "sm_90a", case, inputs, emulator.execute, setting)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_bits_and_counts_are_those_of_warps_that_walk_streams(name: str, stages: int) -> None:
    case = {**CASES[name], "counting": True}
    inputs = CARD.example(case, proof.generator(3, CPU), CPU)
    usual, ours = ran(case, inputs, **STREAMS), ran(case, inputs, **{**SPLITS, "stages": stages})
    assert proof.differing(ours["out"], usual["out"]) == 0
    assert ours["counters"].tolist() == usual["counters"].tolist()
    assert [d for d in proof.deviations(CARD, case, inputs, ours) if not d.passes] == []


def test_the_order_of_an_engine_after_a_thousand_keys_gives_the_same_bits() -> None:
    inputs = CARD.example(FEW, proof.generator(3, CPU), CPU)
    assert proof.differing(ran(FEW, inputs, **SPLITS)["out"], ran(FEW, inputs, **STREAMS)["out"]) == 0


def test_scores_far_apart_move_the_running_maximum_and_a_key_that_is_no_number_shows() -> None:
    inputs = CARD.example(CHAIN, proof.generator(4, CPU), CPU)
    inputs["k"] = inputs["k"] * torch.linspace(0.2, 12, 64)[:, None].to(torch.bfloat16)
    usual, ours = (ran(CHAIN, inputs, **setting)["out"] for setting in (STREAMS, SPLITS))
    assert proof.differing(ours, usual) == 0
    inputs["k"][int(inputs["tables"][0, 0]), :, 5] = torch.nan
    spoiled = ran(CHAIN, inputs, **SPLITS)["out"]
    assert spoiled[0].isnan().all(), "every row of the first sequence sees its sixth key"
    assert torch.equal(spoiled[1], ours[1]), "another sequence is not touched"


def early_reads() -> list[str]:
    return early_reads_of_new_keys({**CHAIN, "order": (2, 2)}, [{**SPLITS, "stages": 4}])


def faults(case: Case) -> list[str]:
    """What is wrong with the kernel over a case, in words: what the emulator refuses, and bits that differ."""
    inputs = CARD.example(case, proof.generator(1, CPU), CPU)
    usual = ran(case, inputs, **STREAMS)["out"]
    try:
        ours = ran(case, inputs, **SPLITS)["out"]
    except EmulationError as error:
        return [str(error)]
    n = proof.differing(ours, usual)
    return [f"{n} elements differ"] if n else []


USERS = (attention_splits, attention_walk, attention_variants)
OWN, FACTORY = attention_splits, "make_attention_splits"
PLANTED: dict[str, tuple[Any, str, str, str, Case | None]] = {
    # name: (module, factory, pattern, replacement, case; None: early reads)
    "a stream joined without its maximum": (
        OWN, FACTORY, r"isa\.product\(accumulators\[i\], take\[far\]\)", "accumulators[i]", WIDE,
    ),
    "the same of at most eight rows": (
        OWN, FACTORY, r"isa\.product\(accumulators\[i\], take\[i & 1\]\)", "accumulators[i]",
        CHAIN,
    ),
    "what was joined not weighed anew": (
        OWN, FACTORY, r"isa\.fused\(joined\[i\], keep\[far\],", "isa.fused(joined[i], np.float32(1),", WIDE,
    ),
    "an odd row's factor taken for an even one's": (
        OWN, FACTORY, r"i32\(\(lane & 3\) \* 8 \+ 4\)", "i32((lane & 3) * 8)", CHAIN,
    ),
    "factors of a lane's rows exchanged": (OWN, FACTORY, r"far = \(i >> 1\) & 1", "far = 1 - ((i >> 1) & 1)", WIDE),
    "sums of a stream not begun anew": (
        OWN, FACTORY, r"( +)tops\[i\] = FLOOR\n +sums\[i\] = zero", r"\1tops[i] = FLOOR\n\1sums[i] = joined_sums[i]",
        CHAIN,
    ),
    "a stream too few": (
        OWN, FACTORY, r"end_stream = i32\(first_stream \+ streams\)", "end_stream = i32(first_stream + streams - 1)",
        CHAIN,
    ),
    "a warp of another split": (
        OWN, FACTORY, r"i32\(i32\(first_split \+ warp\) \* streams\)", "i32(i32(first_split + (warp & 2)) * streams)",
        CHAIN,
    ),
    "sums of lanes added once more": (attention_split, "make_split", r"if not whole:", "if whole:", CHAIN),
    "a copy too few waited for": (
        OWN, FACTORY, r"isa\.COPY_WAIT\[stages - 2\]", "isa.COPY_WAIT[stages - 1]", CHAIN,
    ),
    "lanes of a warp not waited for": (OWN, FACTORY, r"wait_unit\(\)\n +cuda\.syncwarp\(\)", "wait_unit()", CHAIN),
    "no barrier before the splits are joined": (
        OWN, FACTORY, r"cuda\.syncthreads\(\)\n( +)join_tile\(0", r"cuda.syncwarp()\n\1join_tile(0", CHAIN,
    ),
    "the next stream's entries looked up a warp too far": (
        attention_fetch, "make_fetch", r"interleave\), apart, end,", "interleave), apart + 1, end,", CHAIN,
    ),
    "streams joined in their lanes alone": (
        attention_totals, "make_join_row", r"total \+ isa\.shuffle_xor_f32\(total, 2\)", "total", CHAIN,
    ),
    "hidden units weighed": (
        attention_walk, "make_own_walk", r"if i32\(first \+ UNIT\) > ctx or first < seen_by_all:",
        "if i32(first + UNIT) < 0:",
        {**CHAIN, "tree": "none"},
    ),
    "the usual path past the last key": (
        OWN, FACTORY, r"unit >= lowest and unit < limit:", "unit >= lowest:", {**CHAIN, "tree": "none"},
    ),
    "new keys read before their kernel has finished": (
        OWN, FACTORY, r"overlap and i32\(next_unit \* UNIT \+ UNIT\) > ctx", "overlap and next_unit < 0", None,
    ),
}  # fmt: skip


def test_what_planted_bugs_run_on_is_clean() -> None:
    for case in {str(case): case for *_, case in PLANTED.values() if case}.values():
        assert faults(case) == []
    assert early_reads() == []


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, factory, pattern, replacement, case = PLANTED[bug]
    rebuilt(module, pattern, replacement, monkeypatch, factory, USERS)
    assert faults(case) if case else early_reads(), bug


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("keys", [500, 1100, 5000])
def test_many_sessions_have_the_bits_of_streams_on_the_gpu(keys: int, tokens: int, stages: int, gpu: Any) -> None:
    device, arch, execute = gpu
    prefix = (*(keys - 37 * i for i in range(12)), -1, 0)
    case = {**FEW, "heads": 32, "kv_heads": 8, "prefix": prefix, "tokens": tokens, "tree": "chain"}
    case["order"] = order_of(arch, 8, 128)
    inputs = CARD.example(case, proof.generator(tokens, device), device)
    usual = proof.run(CARD, arch, case, inputs, execute, STREAMS)["out"]
    for _ in range(3):  # who waits for whom changes from run to run
        ours = proof.run(CARD, arch, case, inputs, execute, {**SPLITS, "stages": stages})["out"]
        assert proof.differing(ours, usual) == 0


@pytest.mark.reference
@pytest.mark.parametrize(
    ("plan", "tokens"),
    [
        (Plan(0, 2, 4, by_split=True), 5),  # 20 rows
        (Plan(0, 2, 8, by_split=True), 1),
        (Plan(0, 2, 4, units=2, by_split=True), 1),
        (Plan(0, 1, 4, by_split=True), 1),
        (Plan(2, 3, 4, by_split=True), 1),
    ],
    ids=["rows", "run", "units", "stages", "row_warps"],
)
def test_a_plan_that_it_is_not_made_for_is_refused(plan: Plan, tokens: int) -> None:
    with pytest.raises(KernelLimit, match="attention_splits with") as refused:
        attention_variant("sm_90a", Shape("bf16", 128, 4, 16, 4), tokens, plan)
    assert "by_split=False" in refused.value.remedy


@pytest.mark.reference
def test_the_environment_changes_its_ring_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape("bf16", 128, 4, 16, 4)
    monkeypatch.setenv(MAX_TILES, "3")
    assert overrides(shape, 0, by_split=True) == {"stages": 3}
    for variable, value, allowed in ((KV_TILE, "32", "[16]"), (SPLITS_PER_CTA, "8", "[4]")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            with pytest.raises(ConfigError) as refused:
                overrides(shape, 0, by_split=True)
            assert allowed in refused.value.allowed


@pytest.mark.reference
def test_a_plan_has_warps_own_splits_where_sessions_are_short_and_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TUNED_VARIABLE, NO_FILE)
    shape = Shape("bf16", 128, 4, *order_of("sm_90a", 8, 128))

    def plan(tokens: int, batch: int, keys: int, arch: str = "sm_90a", **about: Any) -> Plan:
        return choose_plan(arch, replace(shape, **about), tokens, batch, 8, keys)

    for tokens, batch, keys in product((1, 4), (4, 16, 64), (600, 2100)):
        chosen = plan(tokens, batch, keys)
        assert chosen.by_split
        attention_variant("sm_90a", shape, tokens, chosen)
    for tokens, batch, keys in ((1, 16, 3072), (4, 64, 32768), (1, 1, 600), (8, 16, 600)):
        assert not plan(tokens, batch, keys).by_split
    assert not plan(1, 16, 0).by_split, "nobody says how long sessions are"
    for arch in ("sm_80", "sm_100", "sm_120"):
        assert not plan(1, 16, 600, arch).by_split, "not measured there"
    assert not choose_plan("sm_90a", shape_over("sm_90a", True, "bf16", 128, 4, (16, 4)), 1, 16, 8, 600).by_split
    assert (plan(1, 1, 600).units, plan(1, 1, 600).stages) == (1, 3)
    assert (plan(1, 1, 4000).units, plan(1, 1, 4000).stages) == (2, 3)
