"""Every layout in which heads are published gives the logits that its readers' formulas give, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafted_logits import drafted, relative_error
from layout_files import FORMATS, Changes, read_head, write_head
from layout_oracle import HeadOracle
from oracle import Target
from random_pairs import write_random_pair
from rings import slow_but

from eagle3core.checkpoint import convert_draft

pytestmark = pytest.mark.reference

K = 4  # a first pass and three chained ones
PROMPT = [5, 17, 3, 40, 9, 22, 31]
Variant = Callable[[Changes], object]
QKV = tuple(f"midlayer.self_attn.{name}_proj" for name in "qkv")
OUT, MLP = "midlayer.self_attn.o_proj", tuple(f"midlayer.mlp.{name}_proj" for name in ("gate", "up", "down"))
GEOMETRIES = {
    "equal widths": {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48},
    "another width": {
        "hidden": 48, "heads": 3, "kv_heads": 1, "head_dim": 16, "ffn": 40, "draft_hidden": 32, "draft_heads": 2,
        "draft_kv_heads": 1,
    },
}  # fmt: skip


def several(*changes: Variant) -> Variant:
    return lambda head: [change(head) for change in changes]


def nbr(head: Changes) -> None:
    head.flags(norm_before_residual=True)


def nbf(head: Changes) -> None:
    head.flags(norm_before_fc=True)
    head.norm_over_all()


def each(head: Changes) -> None:
    head.flags(fc_norm=True)
    head.norm_over_each()


def fed(head: Changes) -> None:
    head.flags(return_hidden_post_norm=True)


def qk(head: Changes) -> None:
    head.norms_of_heads()


def near(head: Changes) -> None:
    head.flags(layer_types=["sliding_attention"], sliding_window=5)


ANYWHERE: dict[str, Variant] = {
    "normed residual": nbr,
    "norm over all taps": nbf,
    "norm over all taps, by its tensor": lambda head: head.norm_over_all(),
    "norm over all taps, in eagle_config": lambda head: (head.inner(norm_before_fc=True), head.norm_over_all()),
    "norm of each tap": each,
    "norm of each tap, older names": lambda head: (
        head.flags(use_aux_norm=True), head.norm_over_each(("aux_norm_low", "aux_norm_mid", "aux_norm_high"))
    ),
    "normed feedback": fed,
    "normed feedback, in eagle_config": lambda head: head.inner(norm_output=True),
    "EAGLE 3.1": several(each, fed),
    "norm over all taps, residual and feedback": several(nbr, nbf, fed),
    "biases of q, k, v": lambda head: (head.flags(attention_bias=True), head.biases(*QKV)),
    "biases of q, k, v, without a key": lambda head: head.biases(*QKV),
    "biases of all attention": lambda head: (head.flags(attention_bias=True), head.biases(*QKV, OUT)),
    "biases of the feed-forward": lambda head: (head.flags(mlp_bias=True), head.biases(*MLP)),
    "bias of fc": lambda head: (head.flags(bias=True), head.biases("fc")),
    "two taps": lambda head: head.taps([3, 5], "input"),
    "four taps": lambda head: head.taps([0, 2, 4, 7], "output"),
    "boundaries": lambda head: head.taps([2, 5, 8]),
    "lists that begin with 1": lambda head: head.taps([1, 3, 6]),
    "undecided ids": lambda head: head.taps([0, 3, 6]),
    "gelu": lambda head: head.flags(hidden_act="gelu"),
    "tanh-gelu": lambda head: head.flags(hidden_act="gelu_pytorch_tanh"),
    "relu": lambda head: head.flags(hidden_act="relu"),
    "scaled logits": lambda head: head.flags(logit_scale=0.37),
    "full vocabulary": lambda head: head.full_vocabulary(),
    "own embedding": lambda head: head.own_embedding(),
    "unsorted map": lambda head: head.unsorted(),
    "older name of the vocabulary": lambda head: head.flags(truncated_vocab_size=head.config["draft_vocab_size"]),
    "older name of the map": lambda head: head.rename("d2t", "draft_id_to_target_id"),
    "no mask": lambda head: head.drop("t2d"),
    "neighbours rotate": lambda head: head.flags(rope_is_neox_style=False),
    "mrope": lambda head: head.flags(rope_theta=7e4, rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]}),
    "a head tied to its embedding": lambda head: (
        head.own_embedding(), head.full_vocabulary(own_head=False), head.flags(tie_word_embeddings=True)
    ),
    "norms of heads": qk,
    "norms of heads, by their key": lambda head: (head.flags(use_qk_norm=True), qk(head)),
    "norms of heads whose neighbours rotate": lambda head: (head.flags(rope_is_neox_style=False), qk(head)),
    "norms of heads, biases of all attention": lambda head: (
        head.flags(attention_bias=True), head.biases(*QKV, OUT), qk(head)
    ),
    "a window": near,
    "norms of heads and a window": several(qk, near),
    "everything a trainer of 2026 has": several(qk, near, nbr, nbf, fed),
    "EAGLE 3.1 with norms of heads and a normed residual": several(each, fed, qk, nbr),
    "width of llama4": lambda head: head.flags(
        model_type="llama4_text", intermediate_size_mlp=head.config["intermediate_size"], intermediate_size=16
    ),
}  # fmt: skip
EQUAL_WIDTHS: dict[str, Variant] = {
    "the target's head": lambda head: head.full_vocabulary(own_head=False),
    "the last state": lambda head: (head.inner(use_aux_hidden_state=False), head.drop("fc.weight")),
    "the last state, not normed again": lambda head: (
        head.inner(use_aux_hidden_state=False), head.drop("fc.weight", "midlayer.hidden_norm.weight")
    ),
    "the last state, normed residual and feedback": lambda head: (
        head.inner(use_aux_hidden_state=False), head.drop("fc.weight"), nbr(head), fed(head)
    ),
}  # fmt: skip
CASES = [
    *((geometry, "safeailab", name) for geometry in GEOMETRIES for name in ANYWHERE),
    *(("equal widths", "safeailab", name) for name in EQUAL_WIDTHS),
    *((geometry, layout, "plain") for geometry in GEOMETRIES for layout in FORMATS),
    *(("equal widths", layout, name) for layout in ("speculators", "modelopt") for name in (
        "normed residual", "norm over all taps", "norm of each tap", "own embedding", "full vocabulary",
        "norms of heads", "everything a trainer of 2026 has")),
]  # fmt: skip
VARIANTS: dict[str, Variant] = {"plain": lambda head: None, **ANYWHERE, **EQUAL_WIDTHS}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path, Target]]:
    made = {}
    for i, (name, geometry) in enumerate(GEOMETRIES.items()):
        folder = tmp_path_factory.mktemp("pair")
        target, draft = write_random_pair(folder, vocab=64, draft_vocab=44, eos=[], seed=i, **geometry)
        made[name] = target, draft, Target(target)
    return made


def assert_as_the_oracle(
    pair: tuple[Path, Path, Target], draft: Path, norm_output: str | None = None, *, as_tree: bool = False
) -> None:
    sequence, ours, drafts = drafted(pair[0], draft, PROMPT, K, norm_output, as_tree=as_tree)
    theirs, expected = HeadOracle(draft, pair[2], norm_output).chain(sequence, K)
    assert relative_error(ours, theirs) < 1e-5
    assert drafts == expected


@pytest.mark.parametrize(("geometry", "layout", "variant"), CASES)
def test_a_layout_gives_the_logits_of_its_formulas(
    pairs: dict[str, tuple[Path, Path, Target]], tmp_path: Path, geometry: str, layout: str, variant: str
) -> None:
    pair = pairs[geometry]
    config, weights = read_head(pair[1])
    VARIANTS[variant](Changes(config, weights, pair[2].embedding.shape[1], 64))
    FORMATS[layout](config, weights)
    assert_as_the_oracle(pair, write_head(tmp_path / "head", config, weights))


@pytest.mark.parametrize(
    "variant",
    [
        "norm over all taps, residual and feedback", "EAGLE 3.1", "the last state, not normed again",
        "the last state, normed residual and feedback", "norms of heads and a window",
        "everything a trainer of 2026 has",
    ],
)  # fmt: skip
def test_passes_over_a_trees_beams_have_the_variant_too(
    pairs: dict[str, tuple[Path, Path, Target]], tmp_path: Path, variant: str
) -> None:
    pair = pairs["equal widths"]
    config, weights = read_head(pair[1])
    VARIANTS[variant](Changes(config, weights, pair[2].embedding.shape[1], 64))
    assert_as_the_oracle(pair, write_head(tmp_path / "head", config, weights), as_tree=True)


@pytest.mark.parametrize(("meaning", "value"), [("feedback", True), ("feedback", False), ("head", True)])
def test_what_norm_output_means_in_a_flat_file_is_told_by_a_setting(
    pairs: dict[str, tuple[Path, Path, Target]], tmp_path: Path, meaning: str, value: bool
) -> None:
    pair = pairs["equal widths"]
    config, weights = read_head(pair[1])
    config["norm_output"] = value
    assert_as_the_oracle(pair, write_head(tmp_path / "head", config, weights), meaning)


@pytest.mark.parametrize("geometry", slow_but(["another width"], GEOMETRIES))
@pytest.mark.parametrize(("form", "variant"), [
    ("turbomind", "plain"), ("turbomind", "four taps"), ("turbomind", "unsorted map"), ("gguf", "plain"),
    ("gguf", "two taps"), ("gguf", "normed residual"), ("gguf", "EAGLE 3.1"), ("gguf", "full vocabulary"),
    ("gguf", "unsorted map"), ("gguf", "own embedding"),
])  # fmt: skip
def test_a_container_gives_the_logits_of_what_lies_in_it(
    pairs: dict[str, tuple[Path, Path, Target]], tmp_path: Path, geometry: str, form: str, variant: str
) -> None:
    pair = pairs[geometry]
    config, weights = read_head(pair[1])
    VARIANTS[variant](Changes(config, weights, pair[2].embedding.shape[1], 64))
    head, dtype = write_head(tmp_path / "head", config, weights), torch.bfloat16 if form == "turbomind" else None
    convert_draft(head, tmp_path / form, form, target=pair[0], dtype=dtype)
    assert_as_the_oracle(pair, tmp_path / form)


def test_at_least_seventy_layouts_are_compared() -> None:
    assert len(set(CASES)) >= 70
