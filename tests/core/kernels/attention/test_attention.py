"""Attention's promises beyond the derived tests: what is read early, edge cases, and that planted bugs are found."""

import itertools

import pytest
import torch
from early_reads import early_reads_of_new_keys
from planted_sources import rebuilt
from rings import exhaustive_but

from eagle3core.kernels import proof
from eagle3core.kernels.attention import combine as attention_combine
from eagle3core.kernels.attention import layout as attention_layout
from eagle3core.kernels.attention import mask as attention_mask
from eagle3core.kernels.attention import pieces as attention_pieces
from eagle3core.kernels.attention import rows as attention_rows
from eagle3core.kernels.attention import tile as attention_tile
from eagle3core.kernels.attention import totals as attention_totals
from eagle3core.kernels.attention import variant as attention_variants
from eagle3core.kernels.attention.card import CARD
from eagle3core.kernels.attention.offers import attention_variants_of
from eagle3core.kernels.attention.warp import fetch as attention_fetch
from eagle3core.kernels.attention.warp import split as attention_split
from eagle3core.kernels.attention.warp import streams as attention_streams
from eagle3core.kernels.attention.warp import walk as attention_walk
from eagle3core.kernels.card import ARCHES
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.tree.mask_words import pack_words

pytestmark = pytest.mark.emulated
CPU = torch.device("cpu")
CHAIN = {
    "dtype": "bf16", "dim": 64, "heads": 2, "kv_heads": 1, "order": (2, 2), "tokens": 3, "prefix": (93, 14),
    "tree": "chain",
}  # fmt: skip
# The kernel for many rows, two streams at a time.
SIDE_BY_SIDE = {"row_warps": 2, "groups": 2, "units": 1, "stages": 3}
PAIRS = {"units": 2, "stages": 2}  # the kernel for few rows, two units at a time
BUNDLES = {**CHAIN, "order": (8, 2), "prefix": (200, 14)}
WINDOW = {**CHAIN, "tokens": 2, "prefix": (75,), "window": 20, "tree": "random"}


def faults(case, *, settings=({},), seed=1):
    """What the proofs say of a case under each setting, in words; what the emulator refuses counts as well."""
    found = []
    inputs = CARD.example(case, proof.generator(seed, CPU), CPU)
    for setting in settings:
        try:
            outputs = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, setting)
        except EmulationError as error:
            found.append(str(error))
            continue
        found += [f"{d.output}: {d.error}" for d in proof.deviations(CARD, case, inputs, outputs) if not d.passes]
    return found


USERS = (attention_tile, attention_streams, attention_walk, attention_rows, attention_variants)
PLANTED = {
    # name: (module, factory, pattern, replacement, case, settings)
    "mask off by one": (
        attention_mask, "make_hide", r"offset, left = i32\(first - ctx\)", "offset, left = i32(first - ctx + 1)",
        CHAIN, ({},),
    ),
    "new keys one place too early": (
        attention_mask, "make_hide", r"i32\(min\(-offset, UNIT\)\)", "i32(min(-offset, UNIT) - 1)", CHAIN, ({},),
    ),
    "window one too wide": (
        attention_mask, "make_hide", r"position - stands >= window", "position - stands > window", WINDOW, ({},),
    ),
    "window's first unit too late": (
        attention_layout, "make_span", r"\(ctx \+ 1 - window\) >> 4", "(ctx + 16 - window) >> 4", WINDOW, ({},),
    ),
    "streams joined without their maxima": (
        attention_split, "make_split", r"isa\.product\(a\[0\], take\)", "a[0]", CHAIN, ({},),
    ),
    "splits merged with the wrong weight": (
        attention_combine, "make_attention_combine", r"isa\.fused\(tops\[i\], scale, -level\)",
        "isa.fused(zero, scale, -level)", BUNDLES, ({},),
    ),
    "splits of a bundle merged with the wrong weight": (
        attention_combine, "make_attention_combine", r"isa\.exp2\(\(before - high\) \* scale\)",
        "isa.exp2((top - high) * scale)", CHAIN, ({},),
    ),
    "splits merged with a neighbour's weight": (
        attention_combine, "make_attention_combine", r"\(lane & 16\) \+ s \+ j\)",
        "(lane & 16) + ((s + j) ^ 1))", CHAIN, ({},),
    ),
    "values swizzled otherwise than they are read": (
        attention_fetch, "make_fetch", r"\(t \^ \(g >> 1\)\)", "(t ^ (g & 3))", CHAIN, ({},),
    ),
    "sums swizzled otherwise than they are read": (
        attention_split, "make_split", r"\(chunk \^ \(2 \* \(tile_row & 3\)\)\)",
        "(chunk ^ (2 * (tile_row & 1)))",
        CHAIN, ({},),
    ),
    "a copy too few waited for": (
        attention_streams, "make_attention_streams", r"isa\.COPY_WAIT\[stages - 2\]", "isa.COPY_WAIT[stages - 1]",
        CHAIN, ({"stages": 2},),
    ),
    "a copy too few waited for, shared ring": (
        attention_rows, "make_attention_rows", r"isa\.COPY_WAIT\[stages - 3\]", "isa.COPY_WAIT[stages - 2]", CHAIN,
        (SIDE_BY_SIDE,),
    ),
    "no barrier before the shared ring is read": (
        attention_rows, "make_attention_rows", r"wait_others\(barrier, parity\)", "isa.fence_gpu()", CHAIN,
        (SIDE_BY_SIDE,),
    ),
    "a slot of the shared ring written while others read it": (
        attention_rows, "make_attention_rows", r"ahead, step = units \* unit_bytes, stages - 2,",
        "ahead, step = units * unit_bytes, stages - 1,", {**CHAIN, "prefix": (250,)}, (SIDE_BY_SIDE,),
    ),
    "a stream joined before its turn": (
        attention_rows, "make_attention_rows", r"wait_others\(i32\(turns.*\), turn_parity\)",
        "isa.fence_gpu()", CHAIN, (SIDE_BY_SIDE,),
    ),
    "turns not handed on": (
        attention_rows, "make_attention_rows", r"isa\.mbarrier_arrive\(i32\(turns.*\)", "isa.fence_gpu()",
        CHAIN, (SIDE_BY_SIDE,),
    ),
    "streams joined without their maxima, side by side": (
        attention_totals, "make_totals", r"isa\.product\(accumulators\[i\], take\[r\]\)", "accumulators[i]", CHAIN,
        (SIDE_BY_SIDE,),
    ),
    "splits of a bundle joined without their maxima": (
        attention_totals, "make_totals", r"isa\.product\(t\[0\], take\[2 \* m\]\)", "t[0]", CHAIN,
        ({**SIDE_BY_SIDE, "run": 2},),
    ),
    "splits of a bundle joined without their maxima, in streams": (
        attention_split, "make_split", r"isa\.product\(o\[0\], take\)", "o[0]", CHAIN, ({"run": 2},),
    ),
    "a unit's second half of a set taken for its first": (
        attention_pieces, "make_take_unit", r"x = scores\[unit_scores \* \(other \+ 1\) \+ i\]", "pass", CHAIN,
        ({"units": 2},),
    ),
    "a set's second block looked up in the place of its first": (
        attention_fetch, "make_fetch", r"i32\(place \+ u\)", "i32(place)", {**CHAIN, "prefix": (250,)}, ({"units": 2},),
    ),
    "no barrier before the streams are joined": (
        attention_streams, "make_attention_streams",
        r"cuda\.syncthreads\(\)\n( +)join_tile\(0", r"cuda.syncwarp()\n\1join_tile(0", CHAIN, ({},),
    ),
    "no barrier after the streams were joined": (
        attention_streams, "make_attention_streams",
        r"(join_tile\(0.*\n +if both_tiles:\n.*\n +)cuda\.syncthreads\(\)", r"\1cuda.syncwarp()",
        {**CHAIN, "prefix": (150,)}, ({"stages": 2, "run": 2},),
    ),
    "lanes of a warp not waited for": (
        attention_streams, "make_attention_streams", r"wait_set\(\)\n +cuda\.syncwarp\(\)", "wait_set()", CHAIN,
        ({},),
    ),
    "keys past the end copied": (
        attention_fetch, "make_fetch", r"if first \+ g < end:", "if first + g <= end:",
        {**CHAIN, "prefix": (94,)}, ({},),
    ),
    "queries beyond the last row read": (
        attention_fetch, "make_queries", r"if row < tokens \* group:", "if row <= tokens * group:",
        {**CHAIN, "prefix": (20,)}, ({},),
    ),
    "new keys read before their kernel has finished": (
        attention_streams, "make_attention_streams",
        r"i32\(\(next_unit \+ \(step - interleave\)\) \* UNIT \+ UNIT\) > ctx", "i32(next_unit * UNIT) > end",
        None, ({},),
    ),
}  # fmt: skip


def test_the_cases_that_planted_bugs_run_on_are_clean():
    assert faults(CHAIN, settings=({}, {"stages": 2, "run": 2}, SIDE_BY_SIDE)) == []
    assert faults(WINDOW) == []
    assert early_reads() == []


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug, monkeypatch):
    module, factory, pattern, replacement, case, settings = PLANTED[bug]
    rebuilt(module, pattern, replacement, monkeypatch, factory, USERS)
    found = faults(case, settings=settings) if case else early_reads()
    assert found, bug


def early_reads():
    return early_reads_of_new_keys({**CHAIN, "order": (2, 2)}, ({}, {**SIDE_BY_SIDE, "stages": 4}))


def test_a_row_without_any_visible_key_and_an_empty_slot_give_zeros():
    case = {**CHAIN, "prefix": (0, -5, 30), "tree": "none"}
    inputs = CARD.example(case, proof.generator(2, CPU), CPU)
    out = proof.run(CARD, "sm_90a", case, inputs, emulator.execute)["out"]
    assert (out[:2] == 0).all()
    assert (out[2] != 0).any()


@pytest.mark.parametrize("setting", [{}, SIDE_BY_SIDE, PAIRS], ids=["few", "many", "pairs"])
@pytest.mark.parametrize("case", [CHAIN, pytest.param(BUNDLES, marks=pytest.mark.slow)], ids=["short", "bundles"])
def test_a_row_that_sees_a_key_that_is_no_number_is_none_itself(case, setting):
    """A sum of NaN is not zero: a row whose keys cannot be weighed must not pass for one that sees none."""
    inputs = CARD.example(case, proof.generator(3, CPU), CPU)
    whole = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, setting)["out"]
    block, place = int(inputs["tables"][0, 0]), 5
    inputs["k"][block, :, place] = torch.nan
    inputs["v"][block, :, place] = torch.nan
    out = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, setting)["out"]
    assert out[0].isnan().all(), "every row of the first sequence sees its sixth key"
    assert torch.equal(out[1], whole[1]), "another sequence is not touched"


def test_a_large_sink_takes_nearly_all_of_the_weight():
    case = {**CHAIN, "prefix": (30,), "sinks": True}
    inputs = CARD.example(case, proof.generator(3, CPU), CPU)
    inputs["sinks"] = torch.tensor([0.0, 40.0])
    out = proof.run(CARD, "sm_90a", case, inputs, emulator.execute)["out"]
    assert out[0, :, 1].abs().max() < 1e-10
    assert out[0, :, 0].abs().max() > 1e-2


def test_scores_far_apart_move_the_running_maximum_and_stay_exact():
    case = {**CHAIN, "prefix": (120,)}
    inputs = CARD.example(case, proof.generator(4, CPU), CPU)
    inputs["k"] = inputs["k"] * torch.linspace(0.2, 12, 64)[:, None].to(torch.bfloat16)
    for setting in ({}, SIDE_BY_SIDE):
        outputs = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, setting)
        assert all(d.passes for d in proof.deviations(CARD, case, inputs, outputs))


def test_tiles_hidden_by_the_mask_are_counted_and_change_nothing():
    case = {**CHAIN, "heads": 1, "prefix": (31,), "tokens": 16, "counting": True}
    inputs = CARD.example(case, proof.generator(6, CPU), CPU)
    inputs["mask"][:, :, 1:] = False  # keys 32 .. 46 are new and nobody sees them
    inputs["words"] = pack_words(inputs["mask"])
    outputs = proof.run(CARD, "sm_90a", case, inputs, emulator.execute)
    assert outputs["counters"].tolist() == [8, 5, 1, 2]
    assert all(d.passes for d in proof.deviations(CARD, case, inputs, outputs))


def test_later_tokens_do_not_change_a_bit_of_earlier_rows():
    """Decode at every length of a chain equals the rows of one verify: plain and speculative decoding agree."""
    case = {**CHAIN, "prefix": (37,), "tokens": 6}
    inputs = CARD.example(case, proof.generator(8, CPU), CPU)
    whole = proof.run(CARD, "sm_90a", case, inputs, emulator.execute)["out"]
    for kept in (1, 4):
        less = {**inputs, "q": inputs["q"][:, :kept].clone(), "mask": inputs["mask"][:, :kept, :kept]}
        less |= {"words": pack_words(less["mask"]), "positions": inputs["positions"][:, :kept].clone()}
        out = proof.run(CARD, "sm_90a", {**case, "tokens": kept}, less, emulator.execute)["out"]
        assert proof.differing(out, whole[:, :kept]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("tokens", exhaustive_but([3], [3, 17]))
def test_splits_of_a_bundle_give_the_same_bits_whoever_joins_them(tokens):
    """One split a block, pairs, whole bundles, all of them; by streams side by side and one after the other."""
    case = {**BUNDLES, "tokens": tokens}
    inputs = CARD.example(case, proof.generator(9, CPU), CPU)
    few = (({"units": 1}, (1, 4)), (PAIRS, (1, 8))) if tokens <= 16 else (({}, (1,)),)
    outs = [
        proof.run(CARD, "sm_90a", case, inputs, emulator.execute, {**setting, "run": run})["out"]
        for setting, runs in (*few, (SIDE_BY_SIDE, (1, 2, 4)), ({**SIDE_BY_SIDE, "groups": 1}, (8,)))
        for run in runs
    ]
    assert torch.isfinite(outs[0]).all()
    assert all(proof.differing(out, outs[0]) == 0 for out in outs[1:])


@pytest.mark.slow
def test_a_stream_longer_than_the_entries_looked_up_at_once_finds_its_blocks():
    case = {**CHAIN, "tokens": 1, "prefix": (2200,), "order": (2, 2), "heads": 1}
    assert faults(case, settings=({"units": 1, "run": 1}, {**PAIRS, "run": 2})) == []


@pytest.mark.reference
@pytest.mark.parametrize("arch", ARCHES)
def test_the_card_lists_both_forms_of_every_kernel_that_an_engine_asks_for(arch):
    listed = {variant.name for variant in (*CARD.variants(arch), *CARD.slow_variants(arch))}
    for tokens, (dim, heads), fp8, paths, batch, run in itertools.product(
        range(1, 65), ((64, 64), (128, 32)), (False, True), (False, True), (1, 4), (1, 4)
    ):
        case = {"dtype": "bf16", "dim": dim, "heads": heads, "kv_heads": 8, "kv": 1024, "tokens": tokens}
        case |= {"batch": batch, "fp8": fp8, "paths": paths}
        asked_for = {variant.name for variant in attention_variants_of(arch, case, run=run)}
        assert asked_for <= listed, asked_for - listed
