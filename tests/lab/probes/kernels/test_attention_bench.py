"""The attention benchmark knows every kernel it will launch and what it expects of them."""

import pytest

from eagle3core.kernels.attention.card import CARD
from lab.probes.kernels import attention_bench, bench

pytestmark = pytest.mark.reference


def test_every_measured_shape_and_setting_finds_its_kernels_among_those_built_ahead():
    names = {variant.name for variant in attention_bench.needed("sm_90a")}
    for case in CARD.shapes:
        assert {v.name for v in CARD.variants_of("sm_90a", case)} <= names
    for case in bench.proven(CARD):
        for setting in CARD.settings:
            assert {v.name for v in CARD.variants_of("sm_90a", case, **setting)} <= names


def test_every_measured_shape_has_a_prediction_no_better_than_its_floor():
    for case in CARD.shapes:
        predicted = attention_bench.PREDICTED_US[case["dim"], case["batch"]]
        us = predicted[attention_bench.TOKENS.index(case["tokens"])]
        assert us > CARD.cost(case).floor_us(bench.KNOWN_GB_PER_S)
