"""Attention by warpgroups: the classical bugs of rings and of sums that are handed on, planted and found."""

from __future__ import annotations

import pytest
import torch
from planted_sources import rebuilt
from warpgroup_cases import (
    ALL_SPLITS,
    ARCH,
    BUNDLE,
    BUNDLES,
    CHUNK,
    MANY_BUNDLES,
    ONE,
    PAIR,
    SHORT,
    SHORT_BUNDLE,
    SHORT_ONE,
    TWO_GROUPS,
    TWO_STREAMS,
)

from eagle3core.kernels import proof
from eagle3core.kernels.attention import variant as attention_variants
from eagle3core.kernels.attention.card import CARD
from eagle3core.kernels.attention.warpgroup import across, along, careful, group, held, stages, sums, whole
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.gemm import stages as gemm_stages

CPU = torch.device("cpu")
PLANTED = {
    # name: (module, factory, pattern, replacement, setting), and the case where it is not `CHUNK`
    "a stage overwritten while others read it": (
        stages, "make_fetch_sets", r"isa\.mbarrier_wait\(i32\(empty \+ slot \* 8\), parity\)", "pass", ONE,
    ),
    "more bytes expected than come": (
        stages, "make_fetch_sets", r"i32\(n_there \* unit_bytes\)", "i32(units * unit_bytes)", ONE,
    ),
    "a unit past the last brought as well": (
        stages, "make_fetch_sets", r"lane == 0 and own < n_units", "lane == 0 and own <= n_units", SHORT_ONE, SHORT,
    ),
    "a set announced by every warp that fetches": (
        stages, "make_fetch_sets", r"lane == 0 and part == 0", "lane == 0", ONE,
    ),
    "units brought to each other's places": (
        stages, "make_fetch_sets", r"place = i32\(at \+ part \* TILE_BYTES\)",
        "place = i32(at + (part ^ 1) * TILE_BYTES)", ONE,
    ),
    "a map used before it is acquired": (
        stages, "make_fetch_sets", r"isa\.tensor_map_acquire\(v_map\)", "pass", ONE,
    ),
    "a stage multiplied before it is there": (
        along, "make_long_walk",
        r"await_set\(i32\(full \+ next_slot \* 8\), next_parity\)(?=\n *add\()", "isa.group_fence()", ONE,
    ),
    "a stage never given back": (
        along, "make_long_walk", r"leave_set\(i32\(empty \+ slot \* 8\), lane\)", "pass", ONE,
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
        across, "make_short_walk", r"leave_set\(i32\(empty \+ slot \* 8\), here\)", "pass",
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
    "a stage filled while the other block still reads it": (
        group, "make_attention_group", r"i32\(cluster \* row_warps", "i32(row_warps", ONE, PAIR,
    ),
    "a stage given back to one block of two": (
        gemm_stages, "make_leave_stage", r"for block in range\(cluster\)", "for block in range(1)", ONE, PAIR,
    ),
    "keys brought by both blocks and values by none": (
        stages, "make_fetch_sets", r"brings_values = isa\.cluster\.rank\(\)", "pass", ONE, PAIR,
    ),
    "a set brought to one block of two": (
        stages, "make_fetch_sets", r"i32\(\(1 << cluster\) - 1\)", "i32(1)", ONE, PAIR,
    ),
    "a block that ends while the other copies to it": (
        group, "make_attention_group",  # by those who multiply and those who fetch
        (r"(?s)(last time\n +)isa\.cluster\.arrive\(\)"
        r"(.*) isa\.cluster\.arrive\(\)\n +isa\.cluster\.wait\(\)\n( +else:)"),
        r"\1return\2 pass\n\3", ONE, PAIR,
    ),
    "a stream whose first set nobody scores": (
        along, "make_long_walk", r" or stream < last_with_keys", "", ONE,
    ),
    "a stream joined before its turn": (
        along, "make_long_walk", r"isa\.mbarrier_wait\(i32\(turns \+ own_group \* 8\), turn_parity\)",
        "pass", TWO_STREAMS,
    ),
}  # fmt: skip


@pytest.mark.slow
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
