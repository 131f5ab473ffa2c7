"""Many kernels at once: what is missing is compiled side by side, each once, whatever a process or a disk does."""

from __future__ import annotations

import io
import logging
import os
import pickle
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3core.kernels import cubins, registry
from eagle3core.kernels.card import ARCHES, Variant, parameters
from eagle3core.kernels.cubins import lookup, many, progress
from eagle3core.kernels.cubins.pool import Pool

ARCH = "sm_90a"
PARAMETERS = parameters("x:in y:out n:i32")


def make_plus(isa: Any, *, width: int) -> Any:
    def kernel(x: Any, y: Any, n: Any) -> None:
        i = isa.cuda.blockIdx.x * width + isa.cuda.threadIdx.x
        if i < n:
            isa.store_f32(y + isa.i64(i) * 4, isa.load_f32(x + isa.i64(i) * 4) + isa.load_f32(x))

    return kernel


def make_deadly(isa: Any, *, width: int) -> Any:
    """The same, but a process other than this test's is killed while it makes it, as where memory ends."""
    if "EAGLE3_TESTS_PROCESS" in os.environ and os.environ["EAGLE3_TESTS_PROCESS"] != str(os.getpid()):
        os.kill(os.getpid(), signal.SIGKILL)
    return make_plus(isa, width=width)


def make_wrong(isa: Any, *, width: int) -> Any:
    def kernel(x: Any, y: Any, n: Any) -> None:
        isa.store_f32(y, isa.no_such_instruction(x))

    return kernel


PLUS = [Variant(f"plus_{width}", make_plus, {"width": width}, PARAMETERS, 64) for width in (32, 64, 96, 128)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cubins.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(cubins.CUBINS_VARIABLE, raising=False)
    monkeypatch.setattr(lookup, "_own_folders", [])
    lookup._own_folder.cache_clear()
    return tmp_path / "cache"


def compile_all(variants: list[Variant], **how: Any) -> cubins.Compilation:
    with cubins.Compiling(variants, ARCH, **{"n_processes": 2, **how}) as under_way:
        return under_way.wait()


@pytest.mark.compiled
def test_missing_kernels_are_compiled_elsewhere_to_the_bytes_of_one_compiled_here(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = lookup.build(PLUS[0], ARCH, tmp_path / "alone", "kernel")
    with monkeypatch.context() as patch:
        patch.setattr(lookup, "compile_variant", lambda *a: pytest.fail("compiled in this process"))
        done = compile_all([*PLUS, PLUS[0]])
        assert (done.n_wanted, done.n_compiled, done.n_processes) == (4, 4, 2)
        assert done.processor_s > 0
        assert cubins.cubin(PLUS[0], ARCH) == alone
        again = compile_all(PLUS)
    assert (again.n_compiled, again.n_processes) == (0, 0)
    assert len(list(cache.glob("*.cubin"))) == 4


@pytest.mark.slow
@pytest.mark.compiled
def test_a_kernel_whose_process_dies_is_compiled_here(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadly = replace(PLUS[0], name="deadly", make=make_deadly)
    monkeypatch.setenv("EAGLE3_TESTS_PROCESS", str(os.getpid()))
    told: list[Variant] = []
    compile_variant = lookup.compile_variant
    monkeypatch.setattr(lookup, "compile_variant", lambda v, arch: told.append(v) or compile_variant(v, arch))
    assert compile_all([deadly, *PLUS]).n_compiled == 5
    assert [variant.name for variant in told] == ["deadly"]
    assert all(cubins.is_stored(variant, ARCH) for variant in (deadly, *PLUS))


@pytest.mark.slow
@pytest.mark.compiled
def test_a_kernel_that_no_process_can_compile_raises_its_own_error_and_the_others_are_kept(cache: Path) -> None:
    wrong = replace(PLUS[0], name="wrong", make=make_wrong)
    with pytest.raises(AttributeError, match="no_such_instruction"):
        compile_all([wrong, *PLUS])
    assert all(cubins.is_stored(variant, ARCH) for variant in PLUS)


@pytest.mark.slow
@pytest.mark.compiled
def test_where_no_process_can_be_started_kernels_are_compiled_here(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> Pool:
        raise OSError("no processes left")

    monkeypatch.setattr(many, "Pool", refused)
    assert compile_all(PLUS[:2]).n_processes == 1
    assert all(cubins.is_stored(variant, ARCH) for variant in PLUS[:2])


@pytest.mark.slow
@pytest.mark.compiled
def test_a_cache_that_cannot_be_written_is_told_once_and_kernels_are_found_all_the_same(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert compile_all(PLUS[:2]).n_compiled == 2
        assert cubins.cubin(PLUS[2], ARCH)[0][:4] == b"\x7fELF"
    assert compile_all(PLUS[:3]).n_compiled == 0
    assert [cubins.CACHE_VARIABLE in record.message for record in caplog.records] == [True]
    assert cache.read_text() == "a file where the folder should be"


@pytest.mark.slow
@pytest.mark.compiled
def test_a_damaged_kernel_in_the_cache_is_compiled_anew(cache: Path) -> None:
    compile_all(PLUS[:2])
    [damaged] = cache.glob("plus_32.*.cubin")
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-8])
    assert not cubins.is_stored(PLUS[0], ARCH)
    assert compile_all(PLUS[:2]).n_compiled == 1
    assert damaged.read_bytes() == whole


@pytest.mark.slow
@pytest.mark.compiled
def test_an_archive_stands_for_a_folder(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, archive = tmp_path / "ahead", tmp_path / "kernels.zip"
    assert cubins.build_cubins(PLUS, ARCH, folder) == 4
    names = {cubins.cubin_name(variant, ARCH): variant for variant in PLUS}
    found = {name: cubins.read_from(folder, name) for name in names}
    cubins.write_archive(archive, {name: kernel for name, kernel in found.items() if kernel}, {"arch": ARCH})
    monkeypatch.setenv(cubins.CUBINS_VARIABLE, str(archive))
    assert compile_all(PLUS).n_compiled == 0
    assert cubins.cubin(PLUS[1], ARCH) == found[cubins.cubin_name(PLUS[1], ARCH)]
    assert not cache.exists()


@pytest.mark.reference
def test_every_kernel_of_the_package_can_be_sent_to_a_process() -> None:
    for card in registry().values():
        for arch in ARCHES:
            for variant in card.variants(arch):
                assert pickle.loads(pickle.dumps(variant)) == variant


@pytest.mark.reference
def test_what_takes_longest_begins_first() -> None:
    variants = [variant for card in registry().values() for variant in card.variants(ARCH)]
    under_way = cubins.Compiling(variants, ARCH, folder=Path("nowhere"), n_processes=1)
    expected = [many._expected_s(job[0]) for job in under_way._jobs]
    assert expected == sorted(expected, reverse=True)
    assert expected[0] > 4 * expected[-1]
    factories = {variant.make.__name__ for card in registry().values() for variant in card.slow_variants(ARCH)}
    assert set(many._SECONDS) <= factories | {variant.make.__name__ for variant in variants}


class Terminal(io.StringIO):
    """A stream that says it is a terminal, or not."""

    def __init__(self, is_one: bool) -> None:
        super().__init__()
        self.is_one = is_one

    def isatty(self) -> bool:
        return self.is_one


@pytest.mark.reference
def test_a_terminal_sees_one_line_with_the_time_left_and_nothing_of_it_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    terminal = Terminal(True)
    with progress.ProgressLine("compiling kernels", [6.0, 2.0, 2.0], 2, terminal) as line:
        now[0] += 4.0
        line.done(2.0)
        now[0] += 4.0
        line.done(6.0)
        line.done(2.0)
    shown = terminal.getvalue().split("\r\x1b[K")[1:]
    assert shown == [
        "compiling kernels: 0 of 3, about 5 s left",
        "compiling kernels: 1 of 3, about 3 s left",
        "compiling kernels: 2 of 3, about 1 s left",
        "compiling kernels: 3 of 3, about 1 s left",
        "",
    ]
    assert "\n" not in terminal.getvalue()


@pytest.mark.reference
def test_whoever_reads_from_a_pipe_sees_no_line() -> None:
    pipe = Terminal(False)
    with progress.ProgressLine("compiling kernels", [1.0], 1, pipe) as line:
        line.done(1.0)
    assert pipe.getvalue() == ""
