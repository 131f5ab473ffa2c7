"""On a GPU a planted pair with experts decodes its tokens, and the whole of gpt-oss-120b is made there."""

from __future__ import annotations

import pytest
import torch

from eagle3core import Engine, GenerationConfig
from lab.pairs.planted import PlantedPair
from lab.probes.bench.load import watched_load

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
NEEDED = 72 * 10**9  # bytes free: the models' 65.8 GB, and what making them takes beyond


def test_a_pair_with_experts_decodes_the_planted_tokens_with_and_without_drafts() -> None:
    pair = PlantedPair("nano-experts", share=0.8, repeated=0.5, dtype=torch.bfloat16, device=CUDA)
    target, draft = pair.models()
    prompts = pair.prompts(2, 20)
    for k in (0, 3):
        engine = Engine(target, draft if k else None, pair.config(k, session_len=128, max_batch_size=2))
        responses = engine.generate(prompts, GenerationConfig(max_new_tokens=40))
        assert [list(r.token_ids) for r in responses] == [pair.tokens.follow(prompt[-1], 40) for prompt in prompts]


def test_the_whole_120b_is_made_in_4_bits_within_two_gigabytes_beyond_it() -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(CUDA)[0]
    if free < NEEDED:
        pytest.skip(f"{free / 1e9:.0f} GB of this GPU are free, the 120B needs {NEEDED / 1e9:.0f}")
    pair = PlantedPair("gpt-oss-120b", share=0.8, dtype=torch.bfloat16, device=CUDA)
    with torch.no_grad():
        models, load = watched_load(pair.models, CUDA)
    assert load.kept == pytest.approx(65.8e9, rel=0.01)
    assert load.holds, load.values()
    del models
    torch.cuda.empty_cache()
