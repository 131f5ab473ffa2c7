"""Where the bits of two runs part: a planted difference is found at its stage and position, and none where none is."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest
import torch
from tiny_engines import Pair, engine_config, random_prompts, tiny_engine, write_tiny_pair
from torch import Tensor

from eagle3core import Engine, SpeculativeConfig
from lab.cli import main
from lab.errors import NotComparable
from lab.probes.bits.command import drawn
from lab.probes.bits.compare import ABSENT, DIFFERS, sentences, strip_of, strips_of, worst
from lab.probes.bits.hashes import Hashes, HashTrace, accepted_path, filed, read_hashes, record_hashes, write_hashes

pytestmark = pytest.mark.reference

PROMPTS = random_prompts([5, 9, 3])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_tiny_pair(tmp_path_factory.mktemp("pair"))


def recorded(engine: Engine, n: int = 8) -> list[Hashes]:
    return record_hashes(engine, PROMPTS, n)


def tree_engine(pair: Pair) -> Engine:
    tree = {"use_dynamic_tree": True, "dynamic_tree_max_top_k": 3, "max_decoding_tokens": 10}
    return Engine.from_pretrained(
        pair[0], engine_config(pair, None, speculative_config=SpeculativeConfig(model=str(pair[1]), **tree))
    )


def test_equal_runs_have_equal_bits_at_every_stage_and_position(pair: Pair) -> None:
    one, other = (recorded(tiny_engine(pair, None, max_batch_size=1)) for _ in range(2))
    strips = strips_of(one, other)
    assert all(strip.first is None for strip in strips)
    assert strips[0].stages[0] == "target.embed"
    assert strips[0].stages[-2:] == ("target.norm", "target.head")
    held = strips[0].cells != ABSENT
    n, last = len(PROMPTS[0]), strips[0].stages.index("target.1.attn")
    assert held[:last, :-1].all(), "layers of all tokens but the last, which nothing reads"
    assert held[last:, n - 1 : -1].all()
    assert not held[last:, : n - 1].any(), "of a prompt's last layer its last token alone"
    assert sentences(strips, "a", "b")[1] == "no bit of any stage differs"


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_rows_of_drafts_are_filed_under_the_positions_that_they_were_accepted_at(pair: Pair, kind: str) -> None:
    """What a position holds is the plain run's to rounding; so a table of the first logit is near, row by row."""
    made = tiny_engine(pair, 3) if kind == "chain" else tree_engine(pair)
    tables = []
    for engine in (tiny_engine(pair, None), made):
        kept: list[Tensor] = []

        class FirstLogit(HashTrace):
            def _hashed(self, rows: Tensor) -> Tensor:
                return (rows[:, 0] * 1e6).round().long() * 2 + 1

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lab.probes.bits.hashes.HashTrace", FirstLogit)
            kept = [one.table for one in record_hashes(engine, PROMPTS, 12)]
        tables.append(kept)
    for plain, drafted in zip(*tables, strict=True):
        assert plain.shape == drafted.shape
        # The draft reads the last layer's output, of a prompt too, which without it is made of the last token alone.
        assert not ((plain != 0) & (drafted == 0))[:, :-4].any()
        assert ((plain == 0) == (drafted == 0))[:-4, :-4].all()
        held = (plain != 0) & (drafted != 0)
        assert ((plain - drafted).abs()[held] <= 4).all()


@pytest.mark.parametrize(("layer", "part", "stage"), [(0, "o", "target.0.attn"), (1, "mlp.down", "target.1.mlp")])
def test_a_changed_weight_is_named_by_its_stage(pair: Pair, layer: int, part: str, stage: str) -> None:
    one = recorded(tiny_engine(pair, None))
    changed = tiny_engine(pair, None)
    weight = attrgetter(part)(changed.target.layers[layer]).weight
    weight.view(-1)[0] += 1e-3
    strips = strips_of(one, recorded(changed))
    # A prompt's last layer is made of its last token alone.
    assert [strip.first for strip in strips] == [(len(prompt) - 1 if layer else 0, stage) for prompt in PROMPTS]
    before = strips[0].stages[: strips[0].stages.index(stage)]
    assert all((strips[0].cells[i] != DIFFERS).all() for i in range(len(before)))
    found = sentences(strips, "a", "b")
    assert f"at {stage}" in found[1]
    assert found[2].endswith(", ".join(before))


def test_rows_after_the_first_other_token_are_not_compared() -> None:
    stages, table = ("target.head",), torch.arange(1, 9)[None]
    one = Hashes((1, 2, 3), (4, 5, 6, 7, 8), stages, table)
    other = Hashes((1, 2, 3), (4, 5, 9, 7, 8), stages, table + (torch.arange(8) > 4))
    strip = strip_of(one, other)
    assert strip.cells.shape == (1, 5)
    assert strip.first is None
    assert (strip.n_equal_tokens, strip.n_tokens) == (2, 5)


def test_an_accepted_path_is_followed_through_equal_tokens_of_other_branches() -> None:
    tensors = {
        "step0/tree.tokens": torch.tensor([9, 4, 5, 5, 6, 6]),
        "step0/tree.parents": torch.tensor([-1, 0, 0, 1, 2, 3]),
        "step0/accept.tokens": torch.tensor([4, 5, 6, 1, -1]),
    }
    assert accepted_path(tensors, "step0") == [0, 1, 3, 5]
    verify = torch.tensor([10, 11, 12, 13, 14, 15])
    made = filed((1, 2), (9, 4, 5, 6, 1), {**tensors, "step0/verify/target.embed": verify})
    assert made.table.tolist() == [[0, 0, 10, 11, 13, 15, 0]]


def test_hashes_come_back_from_their_file(pair: Pair, tmp_path: Path) -> None:
    made = recorded(tiny_engine(pair, 2))
    write_hashes(tmp_path / "made" / "a.safetensors", made)
    back = read_hashes(tmp_path / "made" / "a.safetensors")
    assert all(strip.first is None and strip.n_compared for strip in strips_of(made, back))


def test_what_cannot_be_compared_is_refused(pair: Pair, tmp_path: Path) -> None:
    made = recorded(tiny_engine(pair, None))
    with pytest.raises(NotComparable, match="different prompts"):
        strips_of(made[:2], made[1:])
    with pytest.raises(NotComparable, match="3 and 2 prompts"):
        strips_of(made, made[:2])
    (tmp_path / "a.safetensors").write_bytes(b"no hashes")
    with pytest.raises(NotComparable, match=r"a\.safetensors cannot be read"):
        read_hashes(tmp_path / "a.safetensors")


def test_a_strip_of_many_positions_shows_the_worst_of_a_column() -> None:
    table = torch.arange(1, 301)[None]
    other = table.clone()
    other[0, 150] += 1
    prompt = tuple(range(300))
    strip = strip_of(*(Hashes(prompt, (), ("target.embed",), each) for each in (table, other)))
    line, legend = drawn(strip)
    assert line.count("x") == 1
    assert line.split()[-1].index("x") == 50
    assert "3 positions" in legend
    assert worst([strip]) is strip


def test_any_changed_bit_changes_a_rows_number() -> None:
    trace, random = HashTrace(1), torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        rows = torch.randn(64, 33, generator=random).to(dtype)
        words = rows.view(torch.int16)
        before = trace._hashed(rows)
        for row in range(64):
            at = int(torch.randint(words.shape[1], (), generator=random))
            words[row, at] ^= 1 << int(torch.randint(15, (), generator=random))
        assert (trace._hashed(rows) != before).all()


@pytest.mark.slow
def test_the_command_says_it_saves_it_and_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, few = (
        tmp_path / "plain.safetensors",
        ["--n-prompts", "1", "--max-new-tokens", "4", "--max-prompt-tokens", "9"],
    )
    assert main(["inspect", "bits", "--other", "plain", "--save", str(saved), *few]) == 0
    assert "no bit of any stage differs" in capsys.readouterr().out
    figure = tmp_path / "strip.svg"
    assert main(["inspect", "bits", "--one", str(saved), "--other", "plain", "--figure", str(figure), *few]) == 0
    assert "<svg" in figure.read_text()
    assert main(["inspect", "bits", "--one", str(saved), "--dtype", "bfloat16", "--other", "plain", *few]) == 1
    assert "at position 0 (in the prompt) of prompt 0, at target.embed" in capsys.readouterr().out
    assert main(["inspect", "bits", "--one", "absent.safetensors", *few]) == 2
    assert main(["inspect", "bits", "--one", "chain-99", *few]) == 2
