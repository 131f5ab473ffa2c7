"""Every family of heads that people use: read as its readers read it, or refused with the reason that is true."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted_logits import drafted, relative_error
from layout_files import FORMATS, Changes, read_head, write_head
from layout_oracle import HeadOracle
from oracle import Target
from random_pairs import write_random_pair

from eagle3core.checkpoint import load_draft, load_target
from eagle3core.errors import CheckpointError

pytestmark = pytest.mark.reference

K, PROMPT = 4, [5, 17, 3, 40, 9, 22, 31]
GEOMETRIES: dict[str, dict[str, Any]] = {
    "two queries a group": {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48},
    "no groups, heads wider than the stream": {"hidden": 32, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 80},
    "five queries a group, odd widths": {"hidden": 40, "heads": 5, "kv_heads": 1, "head_dim": 8, "ffn": 56},
}


@dataclass(frozen=True)
class Family:
    """One row: how its heads are stored, what they have beside the plain one, and of what is not built the reason."""

    layout: str
    change: Callable[[Changes], object] = lambda head: None
    refused: str = ""
    pickled: bool = False


def llama3(head: Changes) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    head.flags(rope_theta=5e5, rope_scaling={**scaling, "original_max_position_embeddings": 64})


def yarn(head: Changes) -> None:
    scaling = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    head.flags(rope_theta=150000, rope_scaling={**scaling, "original_max_position_embeddings": 64})


def full(head: Changes) -> None:
    head.full_vocabulary()


def of_redhat(head: Changes, *, fc: bool = False, fed: bool = False) -> None:
    head.own_embedding()
    head.flags(norm_before_residual=True, norm_before_fc=fc)
    if fc:
        head.norm_over_all()
    if fed:
        head.flags(return_hidden_post_norm=True)


def newest(head: Changes) -> None:
    of_redhat(head, fc=True, fed=True)
    full(head)
    head.flags(layer_types=["sliding_attention"], sliding_window=2048, use_sliding_window=True)


def nvidia_gpt_oss(head: Changes) -> None:
    head.full_vocabulary(own_head=False)
    head.flags(draft_vocab_size=None)


def nvidia_short(head: Changes) -> None:
    head.inner(use_aux_hidden_state=False)
    head.drop("fc.weight")


def nvidia_v3(head: Changes) -> None:
    head.inner(norm_before_fc=True)
    head.norm_over_all()
    head.taps([4, 6, 8])


def eagle31(head: Changes) -> None:
    head.flags(fc_norm=True, norm_output=True)
    head.norm_over_each()


def older_vocabulary(head: Changes) -> None:
    yarn(head)
    head.flags(architectures=["LlamaForCausalLM"], truncated_vocab_size=head.config["draft_vocab_size"])


def mla(head: Changes) -> None:
    head.weights["midlayer.self_attn.kv_a_proj_with_mqa.weight"] = torch.ones(4, 64)


def parallel(head: Changes) -> None:
    head.weights["mask_hidden"] = torch.ones(1, 1, 96)


def two_layers(head: Changes) -> None:
    head.weights["layers.1.self_attn.q_proj.weight"] = torch.ones(4, 32)


def scaled(head: Changes) -> None:
    head.weights["midlayer.mlp.up_proj.weight_scale"] = torch.ones(1)


FAMILIES: dict[str, Family] = {
    "yuhuili, Llama 3.1 8B and R1": Family("safeailab", pickled=True),
    "yuhuili, Llama 3.3 70B": Family("safeailab", Changes.own_embedding, pickled=True),
    "yuhuili, Vicuna 13B": Family("safeailab", full, pickled=True),
    "lmsys and other SpecForge heads": Family("specforge", llama3),
    "SpecForge with stated taps": Family("specforge", lambda head: head.taps([1, 4, 6])),
    "AngelSlim": Family("specforge", lambda head: head.flags(architectures=["Eagle3LlamaForCausalLM"])),
    "nebius, gpt-oss": Family("specforge", older_vocabulary),
    "RedHatAI, Llama and Qwen3": Family("speculators", of_redhat),
    "RedHatAI, gpt-oss": Family("speculators", lambda head: of_redhat(head, fc=True)),
    "speculators' trainer as it is": Family("speculators", newest),
    "speculators, Qwen3 layer": Family("speculators", lambda head: (of_redhat(head), head.norms_of_heads())),
    "nvidia, Llama 4 and Qwen3-235B": Family("modelopt", llama3),
    "nvidia, gpt-oss, long context": Family("modelopt", nvidia_gpt_oss),
    "nvidia, gpt-oss, short context": Family("modelopt", nvidia_short),
    "nvidia, gpt-oss, v3": Family("modelopt", nvidia_v3),
    "SpecDrift, TorchSpec": Family("specforge", eagle31, refused="a setting that tells its meaning"),
    "NeMo Automodel": Family("nemo"),
    "NeMo Automodel, EAGLE 3.1": Family("nemo", eagle31, refused="a setting that tells its meaning"),
    "lightseek, Kimi": Family("modelopt", mla, refused=r"latent attention \(MLA\)"),
    "P-EAGLE": Family("speculators", parallel, refused="P-EAGLE"),
    "several layers": Family("modelopt", two_layers, refused="several layers"),
    "quantised by ModelOpt": Family("modelopt", scaled, refused="quantised head"),
}  # fmt: skip
TOLD = {"SpecDrift, TorchSpec": "feedback", "NeMo Automodel, EAGLE 3.1": "feedback"}


@pytest.fixture(scope="module", params=GEOMETRIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Target]:
    folder = tmp_path_factory.mktemp("pair")
    target, draft = write_random_pair(folder, vocab=64, draft_vocab=44, eos=[], **GEOMETRIES[request.param])
    return target, draft, Target(target)


def written(pair: tuple[Path, Path, Target], folder: Path, family: Family) -> Path:
    config, weights = read_head(pair[1])
    changes = Changes(config, weights, pair[2].embedding.shape[1], 64)
    family.change(changes)
    FORMATS[family.layout](config, weights)
    if family.change is llama3:  # which ModelOpt's own form has put aside
        llama3(changes)
    return write_head(folder / "head", config, weights, pickled=family.pickled)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_family_is_read_by_its_formulas_or_refused_with_the_true_reason(
    pair: tuple[Path, Path, Target], tmp_path: Path, name: str
) -> None:
    family, told = FAMILIES[name], TOLD.get(name)
    head = written(pair, tmp_path, family)
    if family.refused:
        with pytest.raises(CheckpointError, match=family.refused):
            load_draft(head, load_target(pair[0]).geometry)
    if told or not family.refused:
        sequence, ours, drafts = drafted(pair[0], head, PROMPT, K, told)
        theirs, expected = HeadOracle(head, pair[2], told).chain(sequence, K)
        assert relative_error(ours, theirs) < 1e-5
        assert drafts == expected
