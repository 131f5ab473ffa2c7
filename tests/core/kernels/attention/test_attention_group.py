"""Attention by warpgroups: the bits of the other kernels, when a plan chooses it, and the classical bugs of rings."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product
from typing import Any

import pytest
import torch
from planted_sources import rebuilt
from rings import exhaustive_but

from eagle3core.errors import ConfigError, KernelLimit
from eagle3core.kernels import proof
from eagle3core.kernels.attention import variant as attention_variants
from eagle3core.kernels.attention.card import CARD
from eagle3core.kernels.attention.layout import Shape
from eagle3core.kernels.attention.overrides import KV_TILE, MAX_TILES, WARPGROUPS
from eagle3core.kernels.attention.plan import Plan, choose_plan, order_of, ruled_plan
from eagle3core.kernels.attention.variant import attention_variant
from eagle3core.kernels.attention.warpgroup import across, along, careful, group, held, stages, sums, whole
from eagle3core.kernels.card import SHARED_BYTES, Case
from eagle3core.kernels.compile import compile_variant
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError

CPU = torch.device("cpu")
ARCH = "sm_90a"
TINY: Case = {"dtype": "bf16", "dim": 64, "heads": 2, "kv_heads": 1, "order": (2, 2), "tree": "random"}
TREE: Case = {**TINY, "prefix": (241,), "tokens": 5, "paths": True}
ROWS = {"row_warps": 2, "groups": 2, "units": 1, "stages": 3, "run": 2, "tiles": 1, "grouped": False}
STREAMS = {"row_warps": 0, "groups": 1, "units": 2, "stages": 2, "run": 2, "tiles": 2, "grouped": False}
ONE = {"grouped": True, "row_warps": 4, "groups": 1, "units": 4, "stages": 2, "tiles": 1, "run": 2}
TWO_STREAMS = {**ONE, "groups": 2, "units": 2, "stages": 3, "run": 1}
TWO_GROUPS = {**ONE, "row_warps": 8, "stages": 3}
# Sets across streams, of which each has a unit at most.
BUNDLE, ALL_SPLITS = {**ONE, "run": 4}, {**ONE, "run": 16}
SHORT_ONE, SHORT_TWO_GROUPS = {**ONE, "short": True}, {**TWO_GROUPS, "short": True}
SHORT_BUNDLE = {**SHORT_ONE, "run": 4}
LONG: Case = {"dtype": "bf16", "dim": 128, "heads": 32, "kv_heads": 8, "prefix": (32741,), "paths": True}
SHAPE = Shape("bf16", 128, 4, *order_of(ARCH, 8, 128))


def outputs(case: Case, setting: dict[str, Any], isa: Any = None, seed: int = 3) -> dict[str, torch.Tensor]:
    inputs = CARD.example(case, proof.generator(seed, CPU), CPU)
    made = CARD.outputs(case, inputs)
    emulator.execute(CARD.launches(ARCH, case, inputs, made, **setting), isa=isa)
    return made


def differing(case: Case, setting: dict[str, Any], isa: Any = None, wanted: dict[str, Any] = ROWS) -> int:
    ours, theirs = outputs(case, setting, isa), outputs(case, wanted)
    assert ours["out"].isfinite().all()
    return sum(proof.differing(ours[name], theirs[name]) for name in ours)


slow = pytest.mark.slow
# Of three sets a stream, the last not full, and a last unit that is not full either.
CHUNK: Case = {**TINY, "heads": 8, "prefix": (597,), "tokens": 8, "tree": "chain"}
# Bundles of four splits, in one of which no stream of the second sequence has a key.
BUNDLES: Case = {**TINY, "heads": 8, "order": (8, 2), "prefix": (300, 30), "tokens": 8, "tree": "chain"}
# Two key heads; the last stream ends with a whole set, right before the unit that its next one would begin with.
WHOLE_SETS: Case = {**TINY, "heads": 4, "kv_heads": 2, "prefix": (296,), "tokens": 8, "tree": "chain"}
# Of one unit a stream or fewer: a set whole, one that the mask ends in, one that the keys end in.
SHORT: Case = {**TINY, "heads": 8, "order": (4, 4), "prefix": (150,), "tokens": 8, "tree": "chain"}
# Four bundles, of which the sequences have keys in all, two and one; none for an empty slot.
MANY_BUNDLES: Case = {**TINY, "heads": 3, "order": (16, 2), "prefix": (600, 300, 20, -1), "tokens": 11, "tree": "chain"}
CASES = [
    (CHUNK, ONE),
    (SHORT, SHORT_BUNDLE),
    (SHORT, {**SHORT_ONE, "run": 1}),
    ({**SHORT, "order": (2, 4), "prefix": (120, 56, -1, 0), "sinks": True}, SHORT_ONE),
    ({**SHORT, "heads": 2, "order": (2, 4), "prefix": (70, 56, -1, 0), "counting": True}, SHORT_ONE),
    ({**SHORT, "kv_heads": 2, "prefix": (200, 30), "window": 20, "sinks": True}, SHORT_BUNDLE),
    ({**SHORT, "prefix": (200, 90), "tokens": 8, "paths": True, "tree": "random"}, BUNDLE),
    ({**SHORT, "order": (2, 8), "prefix": (200, 90)}, SHORT_ONE),
    (MANY_BUNDLES, {**ONE, "run": 16}),
    (BUNDLES, {**ONE, "run": 8}),
    pytest.param({**BUNDLES, "prefix": (-1, 77), "window": 50, "sinks": True}, {**ONE, "run": 8}, marks=slow),
    pytest.param(
        {**SHORT, "dim": 128, "order": (2, 4), "prefix": (100, 140), "tokens": 17, "window": 40},
        {**SHORT_TWO_GROUPS, "stages": 2},
        marks=slow,
    ),
    pytest.param(
        {**SHORT, "heads": 4, "dim": 128, "order": (32, 4), "prefix": (1100,), "tokens": 17, "sinks": True},
        {**SHORT_TWO_GROUPS, "run": 32, "stages": 2},
        marks=pytest.mark.exhaustive,
    ),
    (WHOLE_SETS, ONE),
    (BUNDLES, {**ONE, "run": 4}),
    ({**BUNDLES, "kv_heads": 2, "prefix": (30,)}, {**ONE, "run": 4}),
    pytest.param({**BUNDLES, "window": 90, "sinks": True}, {**ONE, "run": 8}, marks=slow),
    pytest.param({**BUNDLES, "tokens": 6, "paths": True, "tree": "random"}, {**TWO_GROUPS, "run": 8}, marks=slow),
    pytest.param(BUNDLES, {**TWO_STREAMS, "run": 4}, marks=slow),
    pytest.param(BUNDLES, {**ONE, "run": 3}, marks=slow),
    (TREE, ONE),
    ({**TINY, "prefix": (75, -3), "window": 20, "sinks": True, "counting": True, "tokens": 2}, ONE),
    pytest.param({**TINY, "prefix": (93, 14), "tokens": 3, "tree": "chain"}, TWO_STREAMS, marks=slow),
    pytest.param(
        {**TINY, "prefix": (75, 9), "earlier": 5, "window": 20, "tokens": 3, "counting": True}, ONE, marks=slow
    ),
    pytest.param({**TINY, "heads": 4, "prefix": (300, 9), "tokens": 17, "paths": True}, TWO_STREAMS, marks=slow),
    pytest.param(
        {**TINY, "heads": 4, "dim": 128, "prefix": (129, -1, 0), "tokens": 18, "tree": "chain"},
        {**TWO_GROUPS, "stages": 2},
        marks=slow,
    ),
    pytest.param({**TREE, "prefix": (150,), "window": 40, "sinks": True}, ONE, marks=slow),
    pytest.param(
        {
            **TINY,
            "heads": 4,
            "dim": 128,
            "order": (4, 2),
            "prefix": (0, 64),
            "tokens": 7,
            "paths": True,
            "dtype": "f16",
        },
        TWO_STREAMS,
        marks=slow,
    ),
    pytest.param(
        {**TINY, "heads": 4, "prefix": (300,), "tokens": 40, "paths": True}, TWO_GROUPS, marks=pytest.mark.exhaustive
    ),
    pytest.param(
        {**TINY, "heads": 16, "order": (2, 4), "prefix": (200,), "tokens": 9, "window": 33, "tree": "chain"},
        {**TWO_GROUPS, "stages": 2},
        marks=pytest.mark.exhaustive,
    ),
]


@pytest.mark.emulated
@pytest.mark.parametrize(("case", "setting"), CASES)
def test_warpgroups_give_the_bits_of_warps(case: Case, setting: dict[str, Any]) -> None:
    assert differing(case, setting) == 0


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("case", "setting"),
    [
        ({**TINY, "heads": 4, "dim": 128, "prefix": (150, -1), "tokens": 4, "tree": "chain", "dtype": "f16"}, ONE),
        pytest.param({**TINY, "prefix": (93, 14), "tokens": 3, "window": 20}, TWO_STREAMS, marks=slow),
    ],
)
def test_warpgroups_give_the_bits_of_streams(case: Case, setting: dict[str, Any]) -> None:
    assert differing(case, setting, wanted=STREAMS) == 0


@slow
@pytest.mark.emulated
def test_maxima_that_move_in_one_warp_alone_move_in_its_place() -> None:
    """Rows of one warp see scores far apart; the others of its group add their units one by one beside it."""
    case = {**TINY, "heads": 8, "prefix": (400,), "tokens": 8, "paths": True}
    inputs = CARD.example(case, proof.generator(4, CPU), CPU)
    inputs["q"][:, :2] *= 9
    inputs["k"] = inputs["k"] * torch.linspace(0.2, 6, 64)[:, None].to(torch.bfloat16)
    made = []
    for setting in (ONE, ROWS):
        made.append(CARD.outputs(case, inputs))
        emulator.execute(CARD.launches(ARCH, case, inputs, made[-1], **setting))
    assert proof.differing(made[0]["out"], made[1]["out"]) == 0
    assert all(d.passes for d in proof.deviations(CARD, case, inputs, made[0]))


# ---- planted bugs

PLANTED = {
    # name: (module, factory, pattern, replacement, setting), and the case where it is not `CHUNK`
    "a stage overwritten while others read it": (
        stages, "make_fetch_sets", r"isa\.mbarrier_wait\(i32\(empty \+ slot \* 8\), parity\)", "pass", ONE,
    ),
    "more bytes expected than come": (
        stages, "make_fetch_sets", r"i32\(n_there \* unit_bytes\)", "i32(units * unit_bytes)", ONE,
    ),
    "a map used before it is acquired": (
        stages, "make_fetch_sets", r"isa\.tensor_map_acquire\(v_map\)", "pass", ONE,
    ),
    "a stage multiplied before it is there": (
        along, "make_long_walk",
        r"await_set\(i32\(full \+ next_slot \* 8\), next_parity\)(?=\n *add\()", "isa.group_fence()", ONE,
    ),
    "a stage never given back": (
        along, "make_long_walk", r"isa\.mbarrier_arrive\(i32\(empty \+ slot \* 8\)\)", "pass", ONE,
    ),
    "a unit's values in its neighbour's place": (
        stages, "make_products", r"\(u \+ 1\) \* \(TILE_BYTES >> 4\)", "(u ^ 1) * (TILE_BYTES >> 4)", ONE,
    ),
    "keys read as if their columns were in order": (
        stages, "make_products", r"keys_apart = _SWIZZLE \| ", "keys_apart = 1 << 16 | ", ONE,
    ),
    "values past the end left as they are": (
        stages, "make_clear_past", r"isa\.shared_store_u32x4\(.*\)", "pass", ONE,
    ),
    "values past the end cleared while others multiply them": (
        stages, "make_clear_past", r"isa\.named_barrier\(.*\)", "pass", TWO_GROUPS,
    ),
    "zeros not shown to the tensor cores": (
        stages, "make_clear_past", r"isa\.fence_async_shared\(\)", "pass", ONE,
    ),
    "streams joined without their maxima": (
        held, "make_held_join", r"isa\.product\(accumulators\[i\], take\[r\]\)", "accumulators[i]", ONE,
    ),
    "a stream joined to those of the split before": (
        along, "make_long_walk", r"join\(totals_at, place == 0,", "join(totals_at, stream == first_stream,",
        ONE,
    ),
    "splits of a bundle joined without their maxima": (
        held, "make_bundle_sums", r"keep\[r\], take\[r\], tops\[r\] = kept, taken, high",
        "keep[r], take[r], tops[r] = kept, np.float32(1), high", ONE,
    ),
    "a bundle left before its last split": (
        held, "make_held_leave", r"place < step - 1 and not is_last", "False", BUNDLE, BUNDLES,
    ),
    "a bundle of the whole left before its last split": (
        whole, "make_whole_leave", r"place < bundle - 1 or is_last", "is_last", ONE,
    ),
    "maxima of a bundle where another warp's sums lie": (
        whole, "_make_places", r"g \* bundle \+ 2", "g * bundle + 1", ALL_SPLITS, MANY_BUNDLES,
    ),
    "sums of a bundle that nobody brings back": (
        whole, "make_whole_end", r"while g <= last", "while g < last", ALL_SPLITS, MANY_BUNDLES,
    ),
    "a bundle's sums by the weights of the first": (
        whole, "make_whole_end", r"if g == h:", "if h == 0:", ALL_SPLITS, MANY_BUNDLES,
    ),
    "a sink that the whole leaves out": (
        whole, "make_whole_end", r"total = total \+ isa\.exp2\(sink - level\)", "pass", ONE, {**CHUNK, "sinks": True},
    ),
    "columns of the whole left as the lanes hold them": (
        whole, "make_whole_end", r"mine = transposed\((.*), lane\)", r"mine = \1", ONE,
    ),
    "a set across streams as one along them": (
        stages, "make_fetch_sets", r"shift = i32\(0\)", "pass", SHORT_ONE, SHORT,
    ),
    "a short session's set brought twice": (
        stages, "make_fetch_sets", r"later = i32\(unit \+ units\)", "later = i32(unit + units - 1)", SHORT_ONE, SHORT,
    ),
    "the stage of a set across streams never given back": (
        across, "make_short_walk", r"isa\.mbarrier_arrive\(i32\(empty \+ slot \* 8\)\)", "pass",
        SHORT_BUNDLE, {**SHORT, "prefix": (240,)},
    ),
    "keys that a short session's rows may not see": (
        across, "make_short_walk", r"i32\(\(unit \+ units\) \* UNIT\) <= ctx", "True", SHORT_BUNDLE,
        {**SHORT, "prefix": (184,)},
    ),
    "values past a short session's end left as they are": (
        across, "make_short_walk", r"if i32\(first \+ UNIT\) > end", "if False", SHORT_ONE, SHORT,
    ),
    "a unit across streams by another's weights": (
        across, "make_short_walk", r"weigh\(8 \* \(u \+ 1\), scores", "weigh(8 * u, scores", SHORT_BUNDLE, SHORT,
    ),
    "a split of a short session left before its last unit": (
        across, "make_short_walk", r"own & split_mask == split_mask or", "True or", SHORT_ONE,
        {**SHORT, "order": (2, 8), "prefix": (240,)},
    ),
    "a stream whose first set nobody scores": (
        along, "make_long_walk", r" or stream < last_with_keys", "", ONE,
    ),
    "a stream joined before its turn": (
        along, "make_long_walk", r"isa\.mbarrier_wait\(i32\(turns \+ own_group \* 8\), turn_parity\)",
        "pass", TWO_STREAMS,
    ),
}  # fmt: skip


@slow
@pytest.mark.emulated
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_of_warpgroups_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, factory, pattern, replacement, setting, *other = PLANTED[bug]
    case = other[0] if other else CHUNK
    inputs = CARD.example(case, proof.generator(4, CPU), CPU)
    users = (across, along, careful, held, whole, sums, group, attention_variants)
    rebuilt(module, pattern, replacement, monkeypatch, factory, users)
    made = CARD.outputs(case, inputs)
    try:
        emulator.execute(CARD.launches(ARCH, case, inputs, made, **setting))
    except EmulationError:
        return
    assert not all(d.passes for d in proof.deviations(CARD, case, inputs, made)), bug


# ---- plans


@pytest.mark.reference
def test_a_variable_says_whether_warpgroups_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WARPGROUPS, "0")
    assert not choose_plan(ARCH, SHAPE, 64, 1, 8, 32768, paths=True).grouped
    for asked in ("1", ""):
        monkeypatch.setenv(WARPGROUPS, asked)
        assert choose_plan(ARCH, SHAPE, 64, 1, 8, 32768, paths=True).grouped
    for arch in ("sm_80", "sm_100", "sm_120"):
        assert not choose_plan(arch, SHAPE, 64, 1, 8, 32768, paths=True).grouped
    assert choose_plan(ARCH, SHAPE, 64, 1, 8, 512).grouped
    assert not choose_plan(ARCH, SHAPE, 1, 1, 8, 512).grouped, "a warpgroup has 64 rows"
    monkeypatch.setenv(KV_TILE, "32")
    monkeypatch.setenv(MAX_TILES, "2")
    chosen = choose_plan(ARCH, SHAPE, 16, 1, 8, 512)
    assert (chosen.units, chosen.stages) == (2, 2)
    monkeypatch.setenv(WARPGROUPS, "yes")
    with pytest.raises(ConfigError, match=WARPGROUPS):
        choose_plan(ARCH, SHAPE, 64, 1, 8, 32768, paths=True)


@pytest.mark.reference
@pytest.mark.parametrize(
    "setting", [{"row_warps": 2, "groups": 2, "units": 2}, {"units": 2}, {"row_warps": 8, "groups": 2}, {"stages": 1}]
)
def test_warps_that_are_no_warpgroups_are_refused_and_not_waited_for(setting: dict[str, int]) -> None:
    plan = replace(ruled_plan(ARCH, SHAPE, 32, 1, 8, grouped=True), **setting)
    with pytest.raises(KernelLimit, match="set grouped=False"):
        attention_variant(ARCH, SHAPE, 32, plan)


@pytest.mark.reference
@pytest.mark.parametrize("dim", [64, 128])
def test_every_tree_fits_beside_two_stages_of_a_ring(dim: int) -> None:
    for query_heads, tokens in product((1, 4, 8, 16), (4, 16, 17, 33, 64)):
        shape = Shape("bf16", dim, query_heads, *order_of(ARCH, 8, dim))
        if tokens * query_heads < 64:
            continue
        plan = ruled_plan(ARCH, shape, tokens, 1, 8, paths=True, grouped=True)
        variant = attention_variant(ARCH, shape, tokens, plan, paths=True)
        assert plan.stages >= 2
        assert plan.row_warps * plan.groups == 8
        assert variant.shared_bytes <= SHARED_BYTES[ARCH]


@slow
@pytest.mark.compiled
@pytest.mark.parametrize("tokens", exhaustive_but([64], [16, 64]))
def test_a_launch_has_the_registers_that_its_warps_give_each_other(tokens: int) -> None:
    """Those that multiply wait until there are 232 for each: what fetching warps give back is just enough."""
    plan = ruled_plan(ARCH, SHAPE, tokens, 1, 8, paths=True, grouped=True)
    variant = attention_variant(ARCH, SHAPE, tokens, plan, paths=True)
    made = compile_variant(variant, ARCH, disassemble=True)
    assert made.faults(variant) == []
    assert made.registers == 168
    assert made.sass["USETMAXREG"] == 2


# ---- on a GPU


def hopper(gpu: Any) -> tuple[torch.device, Any]:
    """The device and its executor, where it is one whose warpgroups multiply."""
    device, arch, execute = gpu
    if arch != ARCH:
        pytest.skip(f"warpgroups multiply on {ARCH} alone, and this is {arch}")
    return device, execute


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "setting"), [getattr(each, "values", each) for each in CASES])
def test_warpgroups_give_the_bits_of_warps_on_the_gpu(case: Case, setting: dict[str, Any], gpu: Any) -> None:
    device, execute = hopper(gpu)
    inputs = CARD.example(case, proof.generator(3, device), device)
    ours, theirs = (proof.run(CARD, ARCH, case, inputs, execute, each) for each in (setting, ROWS))
    assert {name: proof.differing(ours[name], theirs[name]) for name in ours} == dict.fromkeys(ours, 0)
    assert all(d.passes for d in proof.deviations(CARD, case, inputs, ours))


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "setting"), [(16, {}), (16, {"stages": 2}), (32, {}), (64, {})])
def test_a_tree_over_32768_keys_has_the_bits_of_warps_on_the_gpu(
    tokens: int, setting: dict[str, Any], gpu: Any
) -> None:
    device, execute = hopper(gpu)
    case = {**LONG, "tokens": tokens}
    inputs = CARD.example(case, proof.generator(tokens, device), device)
    by_warps, by_groups = (
        asdict(ruled_plan(ARCH, SHAPE, tokens, 1, 8, paths=True, grouped=grouped)) for grouped in (False, True)
    )
    del by_warps["counting"], by_groups["counting"]
    first = proof.run(CARD, ARCH, case, inputs, execute, by_warps)["out"]
    for _ in range(5):  # who waits for whom changes from run to run
        again = proof.run(CARD, ARCH, case, inputs, execute, {**by_groups, **setting})["out"]
        assert proof.differing(first, again) == 0


@pytest.mark.reference
def test_a_plan_walks_across_streams_where_all_sessions_are_short() -> None:
    def plan(tokens: int, batch: int, keys: int, *, paths: bool = False) -> Plan:
        return choose_plan(ARCH, SHAPE, tokens, batch, 8, keys, paths=paths)

    assert [plan(64, 8, keys).short for keys in (600, 4096, 32768)] == [True, True, False]
    assert not plan(64, 1, 600, paths=True).short, "in a step trees lose by it"
    assert not plan(16, 4, 600).short, "two groups of warps hand the sums of a split on"
    assert not plan(8, 1, 600).short, "warps by themselves"
    of_64 = replace(SHAPE, dim=64, streams=8)
    assert choose_plan(ARCH, of_64, 64, 8, 8, 600).short
    assert not choose_plan(ARCH, replace(SHAPE, streams=2), 64, 8, 8, 600).short, "a set reaches beyond a split"


@pytest.mark.reference
def test_blocks_that_have_all_keys_of_their_rows_launch_no_combination() -> None:
    def launched(tokens: int, batch: int, keys: int, **about: Any) -> list[str]:
        case = {**LONG, "paths": False, "prefix": (keys - tokens,) * batch, "tokens": tokens, **about}
        return [variant.name for variant in CARD.variants_of(ARCH, case)]

    for keys in (600, 32768):
        [only] = launched(64, 8, keys)
        assert "_whole" in only
        assert len(launched(64, 1, keys)) == 2, "a sequence by itself fills the processors by its splits"
        assert len(launched(64, 8, keys, paths=True)) == 2
        assert len(launched(64, 8, keys, earlier=30)) == 2
        assert len(launched(64, 8, keys, fp8=True)) == 2
