"""Attention's reference, its mask words, and how launches are laid out."""

import pytest
import torch

from eagle3core.errors import BackendUnavailable, KernelLimit
from eagle3core.kernels import proof
from eagle3core.kernels.attention.card import CARD
from eagle3core.kernels.attention.launcher import attention, attention_scratch
from eagle3core.kernels.attention.layout import Shape
from eagle3core.kernels.attention.plan import Plan, choose_plan, order_of
from eagle3core.kernels.attention.reference import paged_attention_reference
from eagle3core.kernels.attention.variant import attention_variant
from eagle3core.kernels.card import ARCHES, SHARED_BYTES
from eagle3core.kernels.tree.mask_words import pack_words
from lab.probes.kernels import attention_peers as peers

pytestmark = pytest.mark.reference
CPU = torch.device("cpu")


def test_mask_words_hold_key_j_in_bit_j_least_significant_first():
    mask = torch.zeros(1, 34, 34, dtype=torch.bool)
    mask[0, 0, 0] = mask[0, 1, 31] = mask[0, 2, 33] = True
    words = pack_words(mask)
    assert words.shape == (1, 34, 2)
    assert words.dtype == torch.int32
    assert words[0, :3].tolist() == [[1, 0], [-(1 << 31), 0], [0, 2]]


def test_the_reference_with_a_window_equals_attention_over_the_kept_keys_alone():
    case = {
        "dtype": "bf16", "dim": 64, "heads": 2, "kv_heads": 1, "tokens": 1, "prefix": (63,), "window": 20,
    }  # fmt: skip
    inputs = CARD.example(case, proof.generator(7, CPU), CPU)
    q, k, v = (inputs[name].float() for name in ("q", "k", "v"))
    out = paged_attention_reference(
        q, k, v, inputs["tables"], inputs["prefix"], inputs["mask"], window=20, positions=inputs["positions"].long()
    )
    block = int(inputs["tables"][0, 0])
    kept_k, kept_v = k[block, 0, 44:64], v[block, 0, 44:64]
    by_hand = ((q[0, 0] @ kept_k.T) / 8).softmax(-1) @ kept_v
    torch.testing.assert_close(out[0, 0], by_hand)


def test_plans_fit_every_architecture():
    for arch in ARCHES:
        for dim, group in ((64, 1), (64, 8), (64, 16), (128, 1), (128, 4), (128, 16)):
            for tokens in (1, 2, 8, 16, 33, 64):
                for batch in (1, 3, 4, 64):
                    shape = Shape("bf16", dim, group, *order_of(arch, 8, dim))
                    plan = choose_plan(arch, shape, tokens, batch, 8)
                    assert 1 <= plan.run <= shape.splits
                    assert attention_variant(arch, shape, tokens, plan).shared_bytes <= SHARED_BYTES[arch]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float32}, "torch.float32"),
        ({"dim": 96}, "head size of 96"),
        ({"heads": 17}, "17 query heads"),
        ({"tokens": 65}, "65 query tokens"),
        ({"block": 16}, "blocks of 16"),
        ({"earlier": 193, "tokens": 64}, "193 earlier and 64 new keys"),
        ({"earlier": -1}, "-1 earlier and 1 new"),
        ({"window": 1 << 22}, "a window of 4194304"),
    ],
)
def test_a_shape_beyond_the_limits_is_refused_by_its_value(change, words):
    about = {"dtype": torch.bfloat16, "dim": 64, "heads": 1, "tokens": 1, "block": 64, **change}
    q = torch.zeros(1, about["tokens"], about["heads"], about["dim"], dtype=about["dtype"])
    cache = torch.zeros(1, 1, about["block"], about["dim"], dtype=about["dtype"])
    shape = Shape("bf16", 64, 1, 2, 2)
    with pytest.raises(KernelLimit, match=words):
        attention(
            "sm_90a", q=q, k_blocks=cache, v_blocks=cache, block_tables=torch.zeros(1, 1, dtype=torch.int32),
            prefix_lens=torch.zeros(1, dtype=torch.int32), masks=torch.zeros(1, 1, 1, dtype=torch.int32),
            out=torch.empty_like(q), scratch=attention_scratch(shape, 1, 1, 1, CPU), plan=Plan(0, 2, 1),
            earlier=about.get("earlier", 0), window=about.get("window", 0),
        )  # fmt: skip


def test_the_peer_made_of_two_parts_computes_the_same_attention():
    case = {"dtype": "bf16", "dim": 64, "heads": 4, "kv_heads": 2, "tokens": 5, "prefix": (128, 128)}
    inputs = CARD.example(case, proof.generator(9, CPU), CPU)
    inputs |= {name: inputs[name].double().nan_to_num() for name in ("q", "k", "v")}
    truth = CARD.reference(case, inputs)["out"]
    keys, values, prefix = peers.contiguous(case, inputs)
    assert prefix == 128
    q = peers.folded(inputs["q"], 2)
    mask = inputs["mask"].repeat_interleave(2, 1)[:, None]
    scores = (q @ keys[:, :, :prefix].mT) / 8
    first = (scores.softmax(-1) @ values[:, :, :prefix], scores.logsumexp(-1).float())
    out = peers.merged(*first, *peers.tail(q, keys[:, :, prefix:], values[:, :, prefix:], mask))
    ours = truth.view(2, 5, 2, 2, 64).transpose(1, 2).reshape(2, 2, 10, 64)
    torch.testing.assert_close(out, ours, atol=1e-6, rtol=1e-5)


def test_a_peer_reads_the_keys_of_one_tokens_window_alone():
    case = {"dtype": "bf16", "dim": 64, "heads": 4, "kv_heads": 2, "tokens": 1, "prefix": (128,), "window": 20}
    inputs = CARD.example(case, proof.generator(9, CPU), CPU)
    inputs |= {name: inputs[name].double().nan_to_num() for name in ("q", "k", "v")}
    keys, values, prefix = peers.contiguous(case, inputs)
    assert (prefix, keys.shape[2]) == (19, 20)
    scores = (peers.folded(inputs["q"], 2) @ keys.mT) / 8
    out = (scores.softmax(-1) @ values).view(1, 1, 4, 64)
    torch.testing.assert_close(out, CARD.reference(case, inputs)["out"])


def test_a_peer_that_does_not_exist_for_a_case_says_why():
    case = {"dtype": "bf16", "dim": 64, "heads": 4, "kv_heads": 2, "tokens": 3, "prefix": (128,), "window": 20}
    with pytest.raises(BackendUnavailable, match="3 tokens under a window"):
        peers.flash_tail_merge(case, CARD.example(case, proof.generator(9, CPU), CPU))
    case = {"tokens": 1}
    with pytest.raises(BackendUnavailable, match="more than one token"):
        peers.flash_tail_merge(case, {})
    with pytest.raises(BackendUnavailable, match="FlexAttention at 1"):
        peers.flex(case, {})


@pytest.mark.parametrize("seed", range(8))
def test_an_empty_slot_gives_zeros_whatever_lies_in_the_block_that_its_table_names(seed: int) -> None:
    case = next(case for case in CARD.slow_cases if case.get("earlier") == 61 and -1 in case["prefix"])
    inputs = CARD.example(case, proof.generator(seed, CPU), CPU)
    out = CARD.reference(case, inputs)["out"]
    assert not out.isnan().any()
    assert not out[case["prefix"].index(-1)].any()
