"""What other attention would make of a pass over a tree: the calls do what they say, and the arithmetic is right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3core.kernels import proof
from eagle3core.kernels.attention import CARD
from lab.options.kernels import AttentionBoundOptions
from lab.probes.kernels.bound import command, ratio
from lab.probes.kernels.bound.ways import Way, attended, pieced_ways, products, whole_ways
from lab.rows.maker import RowMaker
from lab.rows.store import Row, RowWriter

pytestmark = pytest.mark.reference
MAKER = RowMaker("r", "kernels", "m")


def qkv(n_keys: int = 24, tokens: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of 8 heads, keys and values of 2, fp64."""
    source = proof.generator(0, torch.device("cpu"))
    shapes = ((1, tokens, 8, 16), (1, 2, n_keys, 16), (1, 2, n_keys, 16))
    q, k, v = (torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes)
    return q, k, v


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`[T, H, D]`, a head and a token at a time."""
    out = torch.empty_like(q[0])
    for t in range(q.shape[1]):
        for h in range(q.shape[2]):
            weights = (k[0, h // 4] @ q[0, t, h] / 4.0).softmax(0)
            out[t, h] = weights @ v[0, h // 4]
    return out


def of_folded(out: torch.Tensor, tokens: int) -> torch.Tensor:
    """`[K, T * 4, D]` of folded rows as `[T, H, D]`."""
    return out.view(2, tokens, 4, -1).transpose(0, 1).flatten(1, 2)


def test_heads_as_rows_and_heads_by_themselves_give_the_same_attention() -> None:
    q, k, v = qkv()
    plain, folded = (Way("math", is_folded=folds) for folds in (False, True))
    torch.testing.assert_close(plain.call(*plain.operands(q, k, v))()[0].transpose(0, 1), naive(q, k, v))
    torch.testing.assert_close(of_folded(folded.call(*folded.operands(q, k, v))()[0], 3), naive(q, k, v))


def test_pieces_of_the_keys_merge_to_the_attention_of_all() -> None:
    q, k, v = qkv()
    way = Way("math", n_pieces=4)
    rows, keys, values = way.operands(q, k, v)
    assert keys.shape == values.shape == (4, 2, 6, 16)
    parts = way.call(rows, keys, values)()
    torch.testing.assert_close(parts, attended(rows, keys, values))
    shares = (rows @ keys.mT / 4.0).logsumexp(-1).softmax(0)[..., None]
    torch.testing.assert_close(of_folded((parts * shares).sum(0), 3), naive(q, k, v))


def test_ways_have_names_of_their_own_and_no_piece_is_below_a_tile() -> None:
    for n_keys in command.KEYS:
        ways = [*whole_ways(), *pieced_ways(n_keys)]
        assert len({way.name for way in ways}) == len(ways)
        assert all(n_keys % way.n_pieces == 0 and n_keys // way.n_pieces >= 64 for way in ways)
    assert {way.n_pieces for way in pieced_ways(512)} == {4, 8}


def test_the_plain_products_are_those_of_attention() -> None:
    q, k, v = qkv()
    made = products(q, k, v)
    rows = Way("math").operands(q, k, v)[0]
    torch.testing.assert_close(made["scores"](), (rows @ k.mT)[0])
    assert made["output"]().shape == rows[0].shape


def test_every_kernel_of_the_run_is_among_those_built_ahead() -> None:
    names = {variant.name for variant in command.needed("sm_90a")}
    for n_keys in command.KEYS:
        for n_nodes in command.NODES:
            assert {v.name for v in CARD.variants_of("sm_90a", command.shape(n_keys, n_nodes))} <= names


def bound_row(n_nodes: int = 64, **values: float) -> Row:
    """A row of attention at 512 keys."""
    taken = {"time_us": 20.0, "floor_us": 3.0, "compute_floor_us": 5.0, **values}
    return MAKER.measured(ratio.BOUND, "attention", taken, {"shape.kv": 512, "shape.tokens": n_nodes})


def pass_row(tree: str = "dynamic-64/6/8", context: int = 512) -> Row:
    """A pass of 32 layers: 5000 us, of them attention 640 + 160, where a plain step takes 4000."""
    values = {
        "target_us": 5000.0, "plain_step_us": 4000.0, "most_target_over_plain": 1.5,
        "kernel_us.target.attn/attention_rows": 640.0, "kernel_us.target.attn/attention_combine": 160.0,
        "kernel_us.target.attn/gemm_qkv": 500.0,
    }  # fmt: skip
    about = {"pair": "planted llama-3.1-8b", "tree": tree, "context": context}
    return MAKER.measured("proof", f"trees/{tree} at {context}", values, about)


def test_other_attention_takes_the_place_of_ours_in_every_layer() -> None:
    [each] = ratio.read_passes([pass_row()])
    assert (each.n_nodes, each.n_layers, each.attention) == (64, 32, 800.0)
    assert each.ratio == 1.25
    assert each.ratio_with(0.0) == pytest.approx(4200 / 4000)
    assert each.ratio_with(25.0) == pytest.approx(each.ratio), "ours, by the step's own times"


def test_the_best_call_counts_and_the_longer_floor() -> None:
    row = bound_row(**{"unmasked_us.a": 12.0, "unmasked_us.b": 10.0, "unmerged_us.c": 8.0})
    [bound] = ratio.read_bounds([row])
    assert (bound.unmasked, bound.unmerged, bound.names, bound.floor) == (10.0, 8.0, ("b", "c"), 5.0)
    [without] = ratio.read_bounds([bound_row()])
    assert without.unmasked is None
    assert "no mask" not in " ".join(without.attentions())


def test_rows_are_read_without_a_gpu_and_said_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bounds, passes = tmp_path / "attention_bound.jsonl", tmp_path / "proofs.jsonl"
    with RowWriter(bounds) as out:
        out.write(bound_row(**{"unmasked_us.b": 10.0}))
        out.write(bound_row(8))
        out.write(MAKER.missing(ratio.BOUND, "attention", "the time was up", {"shape.kv": 512, "shape.tokens": 16}))
    with RowWriter(passes) as out:
        for row in (pass_row(), pass_row(context=32768), pass_row("chain-3")):
            out.write(row)
    assert command.main(AttentionBoundOptions(rows=bounds, proofs=passes)) == 0
    told = capsys.readouterr().out.splitlines()
    assert "dynamic-64/6/8 at 512: 1.250 of a plain step, at most 1.5 allowed" in told
    assert "  1.130 with no mask (b)" in told
    assert "  1.090 with floor of bytes and products" in told
    assert not any("32768" in line or "chain-3" in line for line in told), "of what was not measured nothing is said"
