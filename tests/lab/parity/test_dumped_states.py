"""Another engine's hidden states: read in every form, judged layer by layer, and every planted fault told apart."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from state_dumps import Dumper, write_specforge, write_speculators, write_vllm
from torch import Tensor

from lab import cli
from lab.errors import ExperimentError, NotComparable
from lab.pairs import shipped_pair
from lab.parity.dumped.files import read_dump
from lab.rows.store import read_rows

pytestmark = pytest.mark.reference

TOKENS = [5, 170, 99, 2300, 301, 44, 8, 412, 77, 1000, 31, 6]
TAPS = (2, 4, 5)


@pytest.fixture(scope="module")
def dumper() -> Dumper:
    return Dumper(shipped_pair().target)


def inspect(*words: object) -> int:
    return cli.run(["inspect", "states", *map(str, words)])


def ending(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, object]]:
    """What was printed before the last line, and the last line."""
    *lines, last = capsys.readouterr().out.splitlines()
    return "\n".join(lines), json.loads(last)


def test_every_form_of_dump_holds_the_same_states(tmp_path: Path, dumper: Dumper) -> None:
    states, last = dumper.stacked(TOKENS, TAPS), dumper.states(TOKENS)[-1]
    dumps = [
        read_dump(path, dumper.width)
        for path in (
            write_vllm(tmp_path / "v.safetensors", TOKENS, states),
            write_speculators(tmp_path / "s.pt", TOKENS, states),
            write_speculators(tmp_path / "l.pt", TOKENS, states, as_list=True),
            write_specforge(tmp_path / "f.ckpt", TOKENS, states, last),
        )
    ]
    assert [dump.form for dump in dumps] == ["vLLM", "speculators", "speculators", "SpecForge"]
    for dump in dumps:
        assert (dump.tokens, dump.dtype) == (tuple(TOKENS), "bfloat16")
        for state, values in zip(dump.states, states.unbind(1), strict=False):
            assert torch.equal(state.values, values)
            assert not state.is_normed
    assert dumps[3].states[3].is_normed
    assert torch.equal(dumps[3].states[3].values, last)


def test_states_in_bf16_pass_and_each_layer_is_best_fitted_by_itself(
    tmp_path: Path, dumper: Dumper, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_vllm(tmp_path / "v.safetensors", TOKENS, dumper.stacked(TOKENS, (*TAPS, 8)))
    out = tmp_path / "rows.jsonl"
    assert inspect(path, "--capture-layers", *TAPS, 8, "--out", out) == 0
    rows = read_rows(out)
    assert [row.values["stage"] for row in rows] == [f"target.{i - 1}.mlp" for i in (*TAPS, 8)]
    for row in rows:
        assert row.values["status"] == "pass"
        assert row.values["best"] == row.values["stage"]
        assert 0 < row.values["ratio"] <= 1
    assert "All 4 dumped layers agree" in ending(capsys)[0]
    assert inspect(path) == 0  # nobody says which layers they are: they are those that fit
    assert "target.7.mlp?" in ending(capsys)[0]


@pytest.mark.slow
def test_a_file_of_specforge_and_of_speculators_needs_no_ids(tmp_path: Path, dumper: Dumper) -> None:
    states, last = dumper.stacked(TOKENS, TAPS), dumper.states(TOKENS)[-1]
    assert inspect(write_specforge(tmp_path / "f.ckpt", TOKENS, states, last)) == 0
    with_last = dumper.stacked(TOKENS, (*TAPS, 8))
    assert inspect(write_speculators(tmp_path / "s.pt", TOKENS, with_last, as_list=True)) == 0


@pytest.mark.slow
def test_widened_states_are_judged_in_the_dtype_they_were_computed_in(tmp_path: Path, dumper: Dumper) -> None:
    path = write_vllm(tmp_path / "v.safetensors", TOKENS, dumper.stacked(TOKENS, TAPS).float())
    assert read_dump(path, dumper.width).dtype == "bfloat16"
    assert inspect(path, "--capture-layers", *TAPS) == 0
    assert inspect(path, "--capture-layers", *TAPS, "--dtype", "float32") == 1


def test_ids_that_count_outputs_are_told(tmp_path: Path, dumper: Dumper, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_vllm(tmp_path / "v.safetensors", TOKENS, dumper.stacked(TOKENS, TAPS))
    off = [boundary - 1 for boundary in TAPS]
    assert inspect(path, "--capture-layers", *off) == 1
    text, last = ending(capsys)
    assert last["first"] == "target.0.mlp"
    assert "named boundary 1 (output of layer 0), it is boundary 2 (output of layer 1)" in text
    assert "Every one is 1 later than named: read the ids as outputs." in text
    assert inspect(path, "--capture-layers", *off, "--capture-convention", "output") == 0


@pytest.mark.slow
def test_a_last_state_after_the_final_norm_is_told(
    tmp_path: Path, dumper: Dumper, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_vllm(tmp_path / "v.safetensors", TOKENS, dumper.stacked(TOKENS, (*TAPS, -1)))
    assert inspect(path, "--capture-layers", *TAPS, 8) == 1
    text, last = ending(capsys)
    assert last["first"] == "target.7.mlp"
    assert "it is the final norm's output" in text


def test_one_wrong_layer_is_named_and_the_others_pass(
    tmp_path: Path, dumper: Dumper, capsys: pytest.CaptureFixture[str]
) -> None:
    states = dumper.stacked(TOKENS, (*TAPS, 8)).clone()
    states[:, 1, ::7] *= 1.5
    path = write_vllm(tmp_path / "v.safetensors", TOKENS, states)
    assert inspect(path, "--capture-layers", *TAPS, 8) == 1
    text, last = ending(capsys)
    assert last["first"] == "target.3.mlp"
    assert (
        "1 of 4 dumped layers diverge in bfloat16; the first is boundary 4 (output of layer 3), hidden_states[1]"
        in text
    )


def noisy(states: Tensor) -> Tensor:
    noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    return (states.float() + 0.04 * states.float().std(dim=(0, 2), keepdim=True) * noise).bfloat16()


def rotated(states: Tensor) -> Tensor:
    square = torch.randn(states.shape[2], states.shape[2], generator=torch.Generator().manual_seed(2))
    return (states.float() @ torch.linalg.qr(square).Q).bfloat16()


def slow(change: Callable[[Tensor], Tensor], words: str) -> object:
    return pytest.param(change, words, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (noisy, "as quantised weights"),
        (rotated, "it is a rotation of ours"),
        slow(lambda states: 2 * states, "it is ours times a factor"),
        slow(lambda states: states.roll(1, dims=0), "no state of ours is near it"),
        slow(lambda states: states * float("nan"), "holds NaN or infinity"),
    ],
    ids=["quantised", "rotated", "scaled", "other tokens", "NaN"],
)
def test_what_a_divergence_may_be_is_told_apart(
    tmp_path: Path, dumper: Dumper, capsys: pytest.CaptureFixture[str], change: Callable[[Tensor], Tensor], words: str
) -> None:
    path = write_vllm(tmp_path / "v.safetensors", TOKENS, change(dumper.stacked(TOKENS, TAPS)))
    assert inspect(path, "--capture-layers", *TAPS) == 1
    text, last = ending(capsys)
    assert last["first"] == "target.1.mlp"
    assert words in text
    assert "3 of 3 dumped layers diverge" in text


def test_a_dump_of_another_prompt_is_refused_with_the_first_other_token(tmp_path: Path, dumper: Dumper) -> None:
    prompts = shipped_pair().prompts
    path = write_vllm(tmp_path / "v.safetensors", TOKENS, dumper.stacked(TOKENS, TAPS))
    with pytest.raises(NotComparable, match=r"v\.safetensors holds token \d+ at position \d+"):
        inspect(path, "--prompts", prompts)


def test_damaged_and_foreign_files_are_refused_in_three_parts_and_never_run(tmp_path: Path, dumper: Dumper) -> None:
    states = dumper.stacked(TOKENS, TAPS)
    whole = write_vllm(tmp_path / "v.safetensors", TOKENS, states).read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-100])
    (tmp_path / "canary.ckpt").write_bytes(pickle.dumps({"input_ids": _Touch(tmp_path / "run")}))
    save_file({"token_ids": torch.tensor(TOKENS)}, tmp_path / "none.safetensors")
    write_vllm(tmp_path / "short.safetensors", TOKENS[:5], states)
    write_vllm(tmp_path / "large.safetensors", [*TOKENS[:-1], 4096], states)
    (tmp_path / "v.safetensors.zst").write_bytes(b"x")
    for name, words in {
        "cut.safetensors": "cannot be read",
        "canary.ckpt": "cannot be read",
        "none.safetensors": "holds 'token_ids'",
        "short.safetensors": r"hidden_states is \[12, 3, 256\] beside 5 token ids",
        "large.safetensors": "token id 4096",
        "v.safetensors.zst": "unpack it first",
    }.items():
        with pytest.raises(ExperimentError, match=words):
            inspect(tmp_path / name)
    with pytest.raises(ExperimentError, match=r"holds 3 layers, and \[2\] are named"):
        inspect(tmp_path / "v.safetensors", "--capture-layers", 2)
    assert not (tmp_path / "run").exists()


class _Touch:
    """A pickle that would make a file were it run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)
