"""The benchmark compiles what it will need without a GPU, and knows which shapes were asked for."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3core.kernels import cubins, proof, registry, tuned
from eagle3core.kernels.card import case_id
from lab.errors import ExperimentError
from lab.options.kernels import BenchOptions, SanitizeOptions
from lab.probes.kernels import bench
from lab.probes.kernels.settings import compared, unequal
from lab.probes.kernels.thresholds import GEMM_SIZES, HEADS
from lab.probes.sanitizer.command import run as sanitize


@pytest.mark.compiled
def test_the_read_kernel_compiles_and_is_built_once(tmp_path):
    wanted = bench.read_variants()
    assert cubins.build_cubins(wanted, "sm_90a", tmp_path) == 2
    assert cubins.build_cubins(wanted, "sm_90a", tmp_path) == 0


@pytest.mark.emulated
def test_the_read_kernel_reads_every_byte_and_no_byte_beyond():
    from eagle3core.kernels.emulator import instructions as emulator

    variant = bench.read_variants()[0]
    x, y = torch.arange(8 * 512 * 4 // 8 + 36, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    touched = set()
    faulty = {n: v for n, v in vars(emulator).items() if n[0] != "_"}

    def load(address):
        touched.update(range(address, address + 16, 4))
        return emulator.load_u32x4_stream(address)

    isa = type("isa", (), faulty | {"load_u32x4_stream": staticmethod(load)})
    emulator.execute([variant.launch((1,), x=x, y=y, n_bytes=x.nbytes)], isa=isa)
    assert len(touched) == x.numel()


@pytest.fixture(
    params=[tuned.NO_FILE, *sorted(str(path) for path in tuned.FOLDER.glob("*.json"))], ids=lambda p: Path(p).stem
)
def settings_of(request, monkeypatch):
    """The rule alone, or one GPU's tuned settings, whichever machine this is."""
    monkeypatch.setenv(tuned.TUNED_VARIABLE, request.param)
    monkeypatch.setattr(tuned, "gpu_kind", lambda arch: None)
    tuned._active.cache_clear()
    yield
    tuned._active.cache_clear()


@pytest.mark.reference
def test_everything_a_gemm_run_launches_is_known_without_tensors(settings_of):
    card = registry()["gemm"]
    uses = bench._uses(card, "sm_90a")
    assert all(card.variants_of("sm_90a", case, **setting) for case, setting in uses)
    measured = {case_id(case) for case, _ in uses}
    assert {case_id(case) for case in [*card.cases, *card.shapes]} <= measured


@pytest.mark.reference
def test_the_gemm_is_measured_on_every_shape_of_its_gate():
    shapes = registry()["gemm"].shapes
    assert {(case["n"], case["k"]) for case in shapes} == {*GEMM_SIZES, *HEADS}
    assert {case["m"] for case in shapes} == {1, 2, 3, 4, 5, 8, 16, 32, 64, 240}


@pytest.mark.gpu
def test_a_graph_of_copies_is_timed_near_the_time_of_its_bytes(gpu):
    a = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    timing = bench.time_graph([lambda: b.copy_(a)] * 4)
    assert timing.p10_us <= timing.median_us <= timing.p90_us
    assert 2 * a.nbytes / timing.median_us / 1e3 < 10_000  # GB/s; no device copies faster


@pytest.mark.reference
def test_a_failed_proof_ends_with_1_and_an_incomplete_one_with_3():
    assert bench.exit_code([bench.PROVEN, bench.PROVEN]) == 0
    assert bench.exit_code([bench.PROVEN, bench.INCOMPLETE]) == 3
    assert bench.exit_code([bench.INCOMPLETE, bench.FAILED]) == 1


@pytest.mark.reference
def test_a_mistyped_op_is_refused_with_the_names_there_are(tmp_path):
    with pytest.raises(ExperimentError, match="'gem'"):
        bench.main(BenchOptions(ops=("gem",), build=tmp_path))
    with pytest.raises(ExperimentError, match="'gem'"):
        sanitize(SanitizeOptions(ops=("gem",), build=tmp_path))


@pytest.mark.reference
def test_shapes_are_asked_for_by_words_that_may_have_several_values() -> None:
    card = registry()["experts"]
    found = bench.shapes_of(card, "m=1,16 form=mxfp4,fp8 experts=128")
    assert [(case["form"], case["m"]) for case in found] == [("mxfp4", 1), ("mxfp4", 16), ("fp8", 1), ("fp8", 16)]
    assert bench.shapes_of(card, "form=fp") == []
    assert bench.shapes_of(card, "") == list(card.shapes)


@pytest.mark.reference
def test_the_settings_of_an_earlier_trial_are_among_those_that_are_timed() -> None:
    card = registry()["experts"]
    cases = bench.shapes_of(card, "m=16 experts=128")
    found = {(case["form"], *setting.values()) for case, setting in compared(card, "sm_90a", cases)}
    assert {("mxfp4", 2, 4, 3, 2, 3), ("fp8", 2, 5, 2, 1, 4), ("plain", 2, 5, 2, 1, 2)} <= {one[:6] for one in found}
    assert sum(setting == {} for _, setting in compared(card, "sm_90a", cases)) == len(cases)


@pytest.mark.emulated
def test_a_setting_with_other_bits_is_told() -> None:
    from eagle3core.kernels.emulator import instructions as emulator

    card = registry()["experts"]
    case = card.cases[0]
    inputs = card.example(case, proof.generator(0, torch.device("cpu")), torch.device("cpu"))

    def launches(arch, case, inputs, outputs, *, spoilt=False, **setting):
        given = {**inputs, "norms": 2 * inputs["norms"]} if spoilt else inputs
        return card.launches(arch, case, given, outputs, **setting)

    spoiling = replace(card, launches=launches)
    settings = [{}, {"w_tiles": 2, "resident": 4}, {"spoilt": True}]
    fine, also, fault = unequal(spoiling, "sm_90a", case, inputs, emulator.execute, settings)
    assert fine == also == ""
    assert fault.startswith("inner: ")


@pytest.mark.compiled
@pytest.mark.slow
def test_a_run_of_settings_is_built_ahead(tmp_path, capsys) -> None:
    options = BenchOptions(
        ops=("experts",), only="m=1 form=fp8_blocks", settings=True, build=tmp_path, share="1/9", arch="sm_90a"
    )
    assert bench.main(options) == 0
    card = registry()["experts"]
    uses = compared(card, "sm_90a", bench.shapes_of(card, options.only))
    wanted = {v.name for case, setting in uses for v in card.variants_of("sm_90a", case, **setting)}
    assert f"{len(wanted)} kernels wanted" in capsys.readouterr().out
