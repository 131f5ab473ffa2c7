"""Attention in which keys of earlier passes lie, under the mask too, between the prefix and the rows of a pass."""

import inspect
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3core.kernels import proof
from eagle3core.kernels.attention import mask as attention_mask
from eagle3core.kernels.attention import tile as attention_tile
from eagle3core.kernels.attention.card import CARD
from eagle3core.kernels.attention.launcher import ATTENTION
from eagle3core.kernels.attention.layout import Shape
from eagle3core.kernels.attention.plan import Plan
from eagle3core.kernels.attention.reference import paged_attention_reference, visible_keys
from eagle3core.kernels.attention.variant import PARAMETERS, attention_variant
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.tree.mask_words import pack_words
from eagle3core.step.passes import Emitter, Rows
from lab.probes.kernels import attention_peers as peers
from lab.probes.profiles.costs import launch_bytes

CPU = torch.device("cpu")
TINY = {"dtype": "bf16", "dim": 64, "heads": 2, "kv_heads": 1, "order": (2, 2), "tree": "random"}
# Masked keys 0 .. 42 begin at the 31st: units begin at their 2nd, their 18th, whose bits lie in two words, and 34th.
LEVEL = {**TINY, "prefix": (30,), "tokens": 3, "earlier": 40, "tree": "chain"}
STREAMS, ROWS = {}, {"row_warps": 2, "groups": 2, "units": 1, "stages": 3}


def example(case, seed=1):
    return CARD.example(case, proof.generator(seed, CPU), CPU)


def last_rows(case, inputs, tokens):
    """A pass of the last `tokens` nodes of a pass over a whole tree: the other nodes' keys lie there already."""
    earlier = case["tokens"] - tokens
    kept = {name: inputs[name][:, earlier:].clone() for name in ("q", "mask", "words", "positions")}
    return {**case, "tokens": tokens, "earlier": earlier}, {**inputs, **kept}


def emulated(case, inputs, setting=STREAMS):
    return proof.run(CARD, "sm_90a", case, inputs, emulator.execute, setting)


@pytest.mark.reference
def test_a_row_may_see_the_masked_keys_after_the_prefix_that_its_bits_name():
    mask = torch.tensor([[[True, False, True, False, True], [False, True, False, False, True]]])
    seen = visible_keys(torch.tensor([3]), mask, 10)[0].long()
    assert seen.tolist() == [[1, 1, 1, 1, 0, 1, 0, 1, 0, 0], [1, 1, 1, 0, 1, 0, 0, 1, 0, 0]]


@pytest.mark.reference
@settings(max_examples=40)
@given(st.integers(2, 90), st.data())
def test_the_last_rows_of_a_tree_mean_the_same_in_a_pass_of_their_own(nodes, data):
    tokens, prefix = data.draw(st.integers(1, nodes - 1)), data.draw(st.integers(0, 70))
    whole = {**TINY, "prefix": (prefix, 5), "tokens": nodes}
    inputs = example(whole, seed=nodes)
    outs = []
    for case, given_inputs in ((whole, inputs), last_rows(whole, inputs, tokens)):
        wide = {name: proof.widened(proof.widened(t)) for name, t in given_inputs.items()}
        out = torch.full_like(wide["q"], float("nan"))
        ATTENTION.meaning(
            q=wide["q"], k_blocks=wide["k"], v_blocks=wide["v"], block_tables=wide["tables"], out=out,
            prefix_lens=wide["prefix"], masks=wide["words"], earlier=case.get("earlier", 0),
        )  # fmt: skip
        outs.append(out)
    torch.testing.assert_close(outs[0][:, -tokens:], outs[1], atol=1e-12, rtol=1e-10)


@pytest.mark.reference
def test_a_window_hides_old_keys_alone_and_none_of_earlier_passes():
    """By the position of a row: of keys at their index below the prefix those that are 20 or more back."""
    case = {**LEVEL, "prefix": (70,)}
    inputs = example(case)
    wide = {name: proof.widened(proof.widened(t)) for name, t in inputs.items()}
    cache = (wide["v"], wide["tables"], wide["prefix"], wide["mask"])
    positions = torch.tensor([[74, 75, 76]])
    near = paged_attention_reference(wide["q"], wide["k"], *cache, window=20, positions=positions)
    for t, position in enumerate(positions[0].tolist()):
        k = wide["k"].clone()
        for key in range(position - 19):  # these cannot matter: score them so that they would win if they were seen
            k[wide["tables"][0, key // 64].long(), :, key % 64] = 1e3 * wide["q"][0, t, :1]
        alone = paged_attention_reference(wide["q"], k, *cache, window=20, positions=positions)
        torch.testing.assert_close(alone[:, t], near[:, t], rtol=1e-12, atol=1e-12)
        key = position - 19  # the oldest that is seen
        k[wide["tables"][0, key // 64].long(), :, key % 64] = 1e3 * wide["q"][0, t, :1]
        other = paged_attention_reference(wide["q"], k, *cache, window=20, positions=positions)
        assert (other[:, t] - near[:, t]).abs().max() > 1e-3


@pytest.mark.emulated
@pytest.mark.parametrize("setting", [STREAMS, ROWS])
def test_a_window_with_words_to_spare_has_the_bits_of_the_window_of_a_pass(setting):
    """The same keys and the same window, by the kernel for a pass alone and by the one for earlier keys, of none."""
    case = {**TINY, "prefix": (75,), "tokens": 2, "window": 20, "tree": "chain"}
    inputs = example(case)
    spare = {**inputs, "words": torch.nn.functional.pad(inputs["words"], (0, 1))}
    first = emulated(case, inputs, setting)["out"]
    assert torch.equal(emulated({**case, "words": 2}, spare, setting)["out"], first)
    assert not torch.equal(emulated({**case, "window": 19}, inputs, setting)["out"], first)


@pytest.mark.reference
def test_mask_words_of_another_number_of_keys_are_refused():
    inputs = example(LEVEL)
    inputs["words"] = inputs["words"][..., :1].contiguous()
    with pytest.raises(AssertionError, match="1 mask words for 40 \\+ 3 keys, which take 2"):
        CARD.launches("sm_90a", LEVEL, inputs, CARD.outputs(LEVEL, inputs))


@pytest.mark.reference
@pytest.mark.parametrize("plan", [Plan(0, 2, 1), Plan(2, 3, 1)], ids=["streams", "rows"])
def test_a_variant_without_earlier_rows_is_what_it_was_and_one_with_them_serves_every_number(plan):
    shape = Shape("bf16", 64, 2, 2, 2)
    without, with_them = (attention_variant("sm_90a", shape, 3, plan, words=words) for words in (0, 7))
    assert without.parameters == PARAMETERS
    assert "earlier" not in without.name
    assert "earlier" not in without.constants
    assert with_them.constants == {**without.constants, "words": 7}
    setting = {} if plan.row_warps == 0 else ROWS
    used = []
    for earlier in (0, 61, 200):
        case = {**LEVEL, "earlier": earlier, "words": 7}
        inputs = example(case)
        first, _ = CARD.launches("sm_90a", case, inputs, CARD.outputs(case, inputs), **setting)
        assert first.operands["earlier"] == earlier
        assert first.operands["tokens"] == 3
        used.append(first.variant)
    assert used[0] == used[1] == used[2]
    assert "_earlier7" in used[0].name


@pytest.mark.reference
def test_the_bytes_of_a_launch_count_the_earlier_keys():
    inputs = example(LEVEL)
    first, _ = CARD.launches("sm_90a", LEVEL, inputs, CARD.outputs(LEVEL, inputs))
    assert launch_bytes(first, 30.0) == CARD.cost(LEVEL).bytes
    keys = 2 * 40 * 64 * 2
    assert CARD.cost(LEVEL).bytes - CARD.cost({**LEVEL, "earlier": 0}).bytes == keys + 3 * 4 + 4


@pytest.mark.reference
def test_a_pass_hands_its_earlier_rows_on_to_attention():
    inputs = example(LEVEL)
    q, out = inputs["q"], torch.full_like(inputs["q"], float("nan"))
    act = SimpleNamespace(q=q.view(3, -1), mixed=out.view(3, -1), partial=torch.empty(0), tops=torch.empty(0))
    nowhere = torch.zeros(3, dtype=torch.int32)
    rows = Rows(nowhere, nowhere, inputs["prefix"], inputs["tables"], inputs["words"], earlier=40)
    block = SimpleNamespace(n_heads=2, head_dim=64)
    layer = SimpleNamespace(o=None, sinks=None)  # a map that is no kernel's leaves its rows as they are
    [call] = Emitter(None).attend(layer, act, rows, (inputs["k"], inputs["v"]), block)
    assert call.operands["earlier"] == 40
    call.meaning()
    torch.testing.assert_close(out, CARD.reference(LEVEL, inputs)["out"], atol=1e-2, rtol=1e-2)


@pytest.mark.reference
def test_the_peer_made_of_two_parts_takes_the_keys_of_earlier_passes_under_the_mask():
    case = {**TINY, "prefix": (64,), "tokens": 3, "earlier": 9}
    inputs = example(case)
    inputs |= {name: inputs[name].double().nan_to_num() for name in ("q", "k", "v")}
    keys, values, prefix = peers.contiguous(case, inputs)
    assert (prefix, keys.shape[2]) == (64, 76)
    scores = (inputs["q"].transpose(1, 2) @ keys.mT) / 8
    out = scores.masked_fill(~peers._full_mask(inputs["mask"], prefix), float("-inf")).softmax(-1) @ values
    torch.testing.assert_close(out.transpose(1, 2), CARD.reference(case, inputs)["out"])


@pytest.mark.emulated
@pytest.mark.parametrize("setting", [STREAMS, ROWS], ids=["streams", "rows"])
@settings(max_examples=4)
@given(st.integers(2, 14), st.data())
def test_a_row_has_the_same_bits_whether_its_ancestors_are_earlier_rows_or_of_its_pass(setting, nodes, data):
    tokens, prefix = data.draw(st.integers(1, nodes - 1)), data.draw(st.integers(0, 40))
    whole = {**TINY, "heads": 1, "prefix": (prefix,), "tokens": nodes}
    inputs = example(whole, seed=100 * nodes + prefix)
    expected = emulated(whole, inputs, setting)["out"][:, -tokens:]
    assert proof.differing(emulated(*last_rows(whole, inputs, tokens), setting)["out"], expected) == 0


@pytest.mark.emulated
@pytest.mark.parametrize("setting", [STREAMS, ROWS], ids=["streams", "rows"])
def test_a_tree_of_60_nodes_read_ten_at_a_time_has_the_bits_of_one_pass(setting):
    whole = {**TINY, "heads": 1, "prefix": (21,), "tokens": 60}
    inputs = example(whole)
    expected = emulated(whole, inputs)["out"]
    for n in (20, 60):
        first = {name: inputs[name][:, :n].clone() for name in ("q", "positions")}
        first["mask"] = inputs["mask"][:, :n, :n].clone()
        level = last_rows({**whole, "tokens": n}, {**inputs, **first, "words": pack_words(first["mask"])}, 10)
        assert proof.differing(emulated(*level, setting)["out"], expected[:, n - 10 : n]) == 0


@pytest.mark.emulated
def test_tiles_of_earlier_keys_that_nobody_sees_are_counted_as_hidden():
    case = {**TINY, "heads": 1, "prefix": (31,), "tokens": 2, "earlier": 40, "counting": True}
    inputs = example(case)
    inputs["mask"][:, :, :17] = False  # keys 31 .. 47
    inputs["mask"][:, :, 17:] = True
    inputs["words"] = pack_words(inputs["mask"])
    outputs = emulated(case, inputs)
    # Of the 12 units of three blocks 5 hold keys; that of keys 32 .. 47 is hidden from both rows.
    assert outputs["counters"].tolist() == [12, 7, 1, 4]
    assert all(d.passes for d in proof.deviations(CARD, case, inputs, outputs))


PLANTED = {
    # name: (pattern, replacement)
    "the second word forgotten": (r"if shift > UNIT and word \+ 1 < words:", "if word + 1 < 0:"),
    "the word after the last read": (r"UNIT and word \+ 1 < words:", "UNIT and word + 1 <= words:"),
    "masked keys one place off": (r"left, offset = i32\(end - first\), i32\(first - ctx\)",
                                  "left, offset = i32(end - first), i32(first - ctx + 1)"),
    "prefix keys of a mixed unit one too many": (r"before, word = i32\(max\(-offset, 0\)\)",
                                                 "before, word = i32(max(1 - offset, 0))"),
    "rows of the mask one word apart": (r"i32\(token \* words \+ word\)", "i32(token + word)"),
}  # fmt: skip


def faults():
    """What the proofs say of a chain, of a tree with gaps, and of 23 keys, with a unit from bit 18 of one word.

    In words; what the emulator refuses counts as well.
    """
    found = []
    for case in (LEVEL, {**LEVEL, "tree": "random"}, {**LEVEL, "earlier": 20}):
        inputs = example(case)
        try:
            outputs = emulated(case, inputs)
        except EmulationError as error:
            found.append(str(error))
            continue
        found += [f"{d.output}: {d.error}" for d in proof.deviations(CARD, case, inputs, outputs) if not d.passes]
    return found


@pytest.mark.emulated
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug, monkeypatch):
    assert faults() == []
    changed, n = re.subn(*PLANTED[bug], inspect.getsource(attention_mask))
    assert n == 1, f"{PLANTED[bug][0]!r} occurs {n} times"
    scope = {"__name__": attention_mask.__name__}
    exec(compile(changed, attention_mask.__file__, "exec"), scope)
    monkeypatch.setattr(attention_tile, "make_hide", scope["make_hide"])
    assert faults(), bug
