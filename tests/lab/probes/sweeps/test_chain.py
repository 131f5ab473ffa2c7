"""Products in a chain of layers: the chain holds a pass's products and no others, and rows are judged as asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED, ExperimentError
from lab.options.kernels import ChainOptions
from lab.options.values import PlantedGeometryName, cut_name
from lab.pairs.planted import find_geometry
from lab.probes.proofs.plans import shapes_of
from lab.probes.sweeps.chain import command
from lab.probes.sweeps.chain.passes import by_torch, launches_in, layers_of, products_in, setting_of
from lab.rows.maker import RowMaker
from lab.rows.store import RowWriter, read_rows

LAYERS = 2
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]  # of Llama-3.1-8B, by its published configuration
NAMES: tuple[PlantedGeometryName, ...] = ("llama-3.1-8b", "qwen3-8b")
MAKER = RowMaker("r", "chain", "m")


@pytest.mark.reference
@pytest.mark.parametrize(("rows", "packs"), [(1, 0), (24, 1), (64, 1), (256, 1 + LAYERS)])
def test_a_chain_has_the_four_maps_of_every_layer_and_what_packs_rows_for_them(rows: int, packs: int) -> None:
    runner = shapes_of(find_geometry(cut_name("llama-3.1-8b", LAYERS)), "sm_90a").runner(setting_of(rows))
    layers = layers_of(runner, rows)
    launches, products = launches_in(layers), products_in(layers)
    assert [(one.m, one.key.weight_rows, one.k) for one in products] == [(rows, *shape) for shape in SHAPES] * LAYERS
    names = [one.variant.name for one in launches]
    assert len(names) == len(products) + packs
    assert sum(name == "gemm_pack_rows" for name in names) == packs
    assert {name.partition("_")[0] for name in names} == {"gemm"}


@pytest.mark.reference
def test_rows_that_no_pass_has_are_refused() -> None:
    runner = shapes_of(find_geometry(cut_name("llama-3.1-8b", LAYERS)), "sm_90a").runner(setting_of(128))
    with pytest.raises(ExperimentError, match="a pass of 192 rows"):
        layers_of(runner, 192)


@pytest.mark.reference
def test_torchs_chain_makes_every_product_once_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = shapes_of(find_geometry("nano"), "sm_90a").runner(setting_of(4))
    products = products_in(layers_of(runner, 4))
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr("lab.probes.sweeps.chain.passes.F.linear", lambda x, w: made.append((*x.shape, *w.shape)))
    by_torch(products, torch.device("cpu"))()
    assert made == [(one.m, one.k, one.key.weight_rows, one.k) for one in products]


def rows_of(path: Path, cells: dict[tuple[str, int], float]) -> Path:
    with RowWriter(path) as out:
        for (geometry, rows), over in cells.items():
            place = {"geometry": geometry, "rows": rows}
            out.write(MAKER.measured(command.CELL, f"{geometry} x {rows}", {"over_torch": over}, place, timer="t"))
    return path


@pytest.mark.reference
@pytest.mark.parametrize(
    ("over", "code"),
    [
        ((0.98, 1.02), EXIT_PASSED),  # a mean of 0.9998
        ((0.99, 1.02), EXIT_GATE_FAILED),  # a mean of 1.005
        ((0.80, 1.11), EXIT_GATE_FAILED),  # a cell
        ((0.90, None), EXIT_COULD_NOT_RUN),
        ((1.20, None), EXIT_GATE_FAILED),
    ],
)
def test_a_mean_and_every_cell_are_judged_and_what_is_missing_is_named(
    over: tuple[float, float | None], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = {(cut_name(name, 8), 64): one for name, one in zip(NAMES, over, strict=True) if one is not None}
    path = rows_of(tmp_path / "chain.jsonl", cells)
    assert command.main(ChainOptions(rows=path, geometry=NAMES, at=(64,))) == code
    told = capsys.readouterr().out
    assert ("missing: qwen3-8b, 8 layers x 64" in told) == (over[1] is None)
    assert ("held" in told) != (code == EXIT_GATE_FAILED)


@pytest.mark.gpu
def test_a_chain_is_timed_beside_torchs(tmp_path: Path) -> None:
    out = tmp_path / "chain.jsonl"
    code = command.main(ChainOptions(out=out, geometry=("llama-3.2-1b",), at=(16, 128), layers=LAYERS, limit_s=60.0))
    cells = [row for row in read_rows(out) if row.kind == command.CELL]
    assert [row.parameters["rows"] for row in cells] == [16, 128]
    assert all(row.values["n_products"] == 4 * LAYERS and (row.number("torch_us") or 0) > 0 for row in cells)
    assert code in (EXIT_PASSED, EXIT_GATE_FAILED)
