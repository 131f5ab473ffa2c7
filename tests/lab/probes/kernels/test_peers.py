"""Libraries stand beside the cards in one table of the lab, and do the same work."""

from __future__ import annotations

import pytest
import torch

from eagle3core.kernels import proof, registry
from lab.errors import RunFailed
from lab.probes.kernels.measure import measured
from lab.probes.kernels.peers import PEERS, peers_of

pytestmark = pytest.mark.reference
CARDS, CPU = registry(), torch.device("cpu")


def test_every_library_stands_beside_a_card_and_a_card_without_one_has_none() -> None:
    assert set(PEERS) <= set(CARDS)
    assert set(peers_of("attention")) == {"sdpa_flash", "sdpa_cudnn", "flex", "flash_tail_merge"}
    assert peers_of("commit") == {}


@pytest.mark.parametrize("op", ["argmax", "rms_norm", "gemm"])
def test_a_library_gives_the_numbers_of_the_card_it_is_timed_beside(op: str) -> None:
    card = CARDS[op]
    case = {"gemm": {**card.shapes[0], "m": 3, "n": 32, "k": 64}, "argmax": {**card.cases[0], "maps": False}}.get(
        op, card.cases[0]
    )
    inputs = {name: proof.widened(t) for name, t in card.example(case, proof.generator(0, CPU), CPU).items()}
    (peer,) = peers_of(op).values()
    values = peer(case, inputs)()
    same = [one for one in card.reference(case, inputs).values() if one.shape == values.shape]
    assert min(float((values.double() - one.double()).abs().max()) for one in same) < 1e-5


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no CUDA device")
@pytest.mark.parametrize("op", ["rope", "attention"])
@pytest.mark.slow
def test_measuring_starts_the_benchmark_that_exists_and_says_what_it_lacks(op: str, tmp_path) -> None:
    with pytest.raises(RunFailed, match="device='cpu'"):
        measured(tmp_path, [op], 5.0)
