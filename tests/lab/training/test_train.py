"""Training a pair: what comes out, that a resumed run is the same run, and that training sees what decoding will."""

from __future__ import annotations

import io
import json
import shutil
import sysconfig
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab import cli
from lab.errors import ExperimentError, RunFailed
from lab.options.reader import read_values
from lab.options.training import TrainOptions
from lab.training import draft as drafts
from lab.training import target
from lab.training.command import TrainedPair, train
from lab.training.sizes import SIZES

pytestmark = pytest.mark.reference

MODULES = ("abc", "ast", "cmd", "codecs", "copy", "dis", "enum", "fnmatch", "functools", "glob", "gzip", "hashlib")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of a dozen small modules."""
    folder = tmp_path_factory.mktemp("text")
    for name in MODULES:
        shutil.copy(Path(sysconfig.get_path("stdlib")) / f"{name}.py", folder)
    return folder


def _options(text: Path, out: Path, **changes: object) -> TrainOptions:
    given = {"size": "tiny", "out": out, "corpus": text, "save_every": 7, "bar": False, **changes}
    return read_values(TrainOptions, given, "eagle3lab train")


@pytest.fixture(scope="module")
def pair(text: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedPair:
    return train(_options(text, tmp_path_factory.mktemp("run") / "pair"))


@pytest.mark.slow
def test_hugging_face_loads_the_target_and_the_tokenizer(pair: TrainedPair) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    source = "def f(x):\n    return 'ünï' + x\n"
    ids = tokenizer(source)["input_ids"]
    assert tokenizer.decode(ids) == source
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 0
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "sort a list"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "# user: sort a list\n# assistant:"
    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    ours = target.load_target(pair.target, torch.device("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(model(torch.tensor([ids])).logits, ours(torch.tensor([ids])).logits)


@pytest.mark.slow
def test_the_target_is_stored_in_bf16_with_both_spellings_of_its_settings(pair: TrainedPair) -> None:
    config = json.loads((pair.target / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["max_position_embeddings"] >= 2048
    weights = load_file(pair.target / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in weights  # tied


@pytest.mark.slow
def test_the_draft_is_stored_in_the_published_layout(pair: TrainedPair) -> None:
    size = SIZES["tiny"]
    weights = load_file(pair.draft / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    wide = (size.heads * size.head_dim, 2 * size.hidden)
    assert shapes == {
        "fc.weight": (size.hidden, 3 * size.hidden),
        "midlayer.input_layernorm.weight": (size.hidden,),
        "midlayer.hidden_norm.weight": (size.hidden,),
        "midlayer.self_attn.q_proj.weight": wide,
        "midlayer.self_attn.k_proj.weight": wide,
        "midlayer.self_attn.v_proj.weight": wide,
        "midlayer.self_attn.o_proj.weight": (size.hidden, size.heads * size.head_dim),
        "midlayer.post_attention_layernorm.weight": (size.hidden,),
        "midlayer.mlp.gate_proj.weight": (size.draft_ffn, size.hidden),
        "midlayer.mlp.up_proj.weight": (size.draft_ffn, size.hidden),
        "midlayer.mlp.down_proj.weight": (size.hidden, size.draft_ffn),
        "norm.weight": (size.hidden,),
        "lm_head.weight": (size.draft_vocab, size.hidden),
        "d2t": (size.draft_vocab,),
        "t2d": (size.vocab,),
    }
    ids = weights["d2t"] + torch.arange(size.draft_vocab)
    assert weights["d2t"].dtype == torch.int64
    assert weights["t2d"].dtype == torch.bool
    assert torch.equal(ids, weights["t2d"].nonzero()[:, 0])  # ascending, and the mask says the same


@pytest.mark.slow
def test_the_drafts_tap_ids_are_layer_outputs_and_say_so(pair: TrainedPair) -> None:
    config = json.loads((pair.draft / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
    assert config["eagle_aux_hidden_state_layer_convention"] == "output"
    assert drafts.tap_layers(8) == (2, 4, 5)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0


@pytest.mark.slow
def test_the_card_holds_data_losses_and_acceptance_and_the_curves_are_kept(pair: TrainedPair) -> None:
    card = pair.card
    assert len(card["data"]["sha256"]) == 64
    assert card["held_out_loss_nats_per_token"]["five_gram"] > 0
    assert card["acceptance"]["n_drafts"] == 3
    assert len(card["acceptance"]["by_position"]) == 3
    assert card["stages"]["target"]["steps"] == SIZES["tiny"].target.steps
    curves = [json.loads(line) for line in (pair.target.parent / "losses.jsonl").read_text().splitlines()]
    assert {record["stage"] for record in curves} == {"target", "draft"}
    losses = [record["loss"] for record in curves if record["stage"] == "target" and "loss" in record]
    assert losses[-1] < losses[0]
    readme = (pair.target.parent / "README.md").read_text()
    assert card["data"]["sha256"] in readme
    assert not (pair.target.parent / "work").exists()


@pytest.mark.slow
def test_prompts_are_held_out_stretches_of_the_right_length(text: Path, pair: TrainedPair) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    whole = "".join((text / f"{name}.py").read_text() for name in MODULES)
    rows = [json.loads(line) for line in pair.prompts.read_text().splitlines()]
    assert len(rows) >= 8
    for row in rows:
        assert 48 <= len(tokenizer(row["text"])["input_ids"]) <= 160
        assert row["text"] + "\n" in whole
        assert not row["text"].endswith("\n")


@pytest.mark.slow
def test_a_run_stopped_in_both_stages_and_resumed_gives_the_same_bits(
    text: Path, pair: TrainedPair, tmp_path: Path
) -> None:
    out = tmp_path / "pair"
    for stage, step in (("target", 13), ("draft", 9)):
        with pytest.raises(RunFailed, match=f"training {stage} was interrupted after step {step}"):
            train(_options(text, out, stop_after=(stage, step)))
    resumed = train(_options(text, out))
    for part in ("target", "draft"):
        mine = load_file(out / part / "model.safetensors")
        theirs = load_file(pair.target.parent / part / "model.safetensors")
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert resumed.card["acceptance"] == pair.card["acceptance"]
    assert (out / "prompts.jsonl").read_bytes() == pair.prompts.read_bytes()
    assert (out / "losses.jsonl").read_bytes() == (pair.target.parent / "losses.jsonl").read_bytes()


@pytest.mark.slow
def test_a_finished_run_is_returned_without_training_again(text: Path, pair: TrainedPair) -> None:
    before = (pair.target / "model.safetensors").stat().st_mtime_ns
    assert train(_options(text, pair.target.parent)) == pair
    assert (pair.target / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("changes", "what", "allowed"),
    [
        ({"size": "nanno"}, r"--size is nanno \(did you mean nano\?\)", "shipped"),
        ({"corpus": Path("absent.txt")}, r"corpus absent\.txt does not exist", "text file"),
        ({"target_steps": 0}, "--target-steps is 0", "at least 1"),
        ({"minutes": 0.0}, "--minutes is 0.0", "at least 0.05"),
        ({"dropout": 1.0}, "--dropout is 1.0", "below 1"),
        ({"device": "warp"}, "--device 'warp' cannot be used", "cpu, or cuda"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(
    text: Path, tmp_path: Path, changes: dict[str, object], what: str, allowed: str
) -> None:
    with pytest.raises(ExperimentError, match=what) as caught:
        train(_options(text, tmp_path / "pair", **changes))
    assert allowed in caught.value.allowed
    assert not (tmp_path / "pair").exists()


@pytest.mark.slow
def test_a_folder_that_holds_another_run_or_something_else_is_left_alone(
    text: Path, pair: TrainedPair, tmp_path: Path
) -> None:
    with pytest.raises(ExperimentError, match=r"holds another run \(seed: 0 there, 1 now\)"):
        train(_options(text, pair.target.parent, seed=1))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ExperimentError, match="is not empty and holds no training run"):
        train(_options(text, tmp_path))
    with pytest.raises(ExperimentError, match=r"notes\.txt is a file"):
        train(_options(text, tmp_path / "notes.txt"))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_command_line_shows_three_parts_and_exits_two(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["train", "--size", "nanno", "--out", str(tmp_path / "pair")]) == 2
    shown = capsys.readouterr().err
    assert "--size is nanno" in shown
    assert "allowed: shipped, nano, tiny" in shown
    assert "do: " in shown


@pytest.mark.slow
def test_the_command_line_writes_a_corpus_and_trains_on_it(text: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "corpus.jsonl", tmp_path / "pair"
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert cli.main(["train", "--corpus", str(text), "--write-corpus", str(file)]) == 0
        assert not out.exists()
        steps = ["--target-steps", "2", "--draft-steps", "2"]
        assert cli.main(["train", "--size", "tiny", "--corpus", str(file), "--out", str(out), *steps]) == 0
    card = json.loads((out / "card.json").read_text())
    assert card["data"]["sha256"] in printed.getvalue()
    assert card["stages"]["draft"]["steps"] == 2


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_nano_pair_from_scratch_takes_under_five_minutes_and_its_draft_is_accepted(tmp_path: Path) -> None:
    started = time.monotonic()
    made = train(TrainOptions(size="nano", out=tmp_path / "pair", bar=False, minutes=3.0))
    assert time.monotonic() - started < 300
    assert made.card["data"]["source"] == "python-stdlib"
    assert len(made.prompts.read_text(encoding="utf-8").splitlines()) == 64
    assert made.card["acceptance"]["length_outside_loops"] > 1.3
