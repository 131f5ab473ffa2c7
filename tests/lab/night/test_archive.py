"""A pack is read to its last byte before a file of it is laid out, and is refused if anything was changed."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from lab.errors import ExperimentError, RunFailed
from lab.night.archive import LIST_FILE, read_pack, write_pack
from lab.night.parts import unpack

pytestmark = pytest.mark.reference

JOBS = [{"id": "one", "hash": "h1"}, {"id": "two", "hash": "h2"}]
PLAN = {"run": "night", "config_hash": "c", "fingerprint": "f", "jobs": JOBS}


def run_folder(folder: Path, *, plan: object = PLAN, record: object = None) -> Path:
    """A small run whose first job came to its end."""
    job = folder / "jobs" / "one"
    (job / "figures").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(plan))
    (job / "job.json").write_text(json.dumps({"id": "one", "hash": "h1"} if record is None else record))
    (job / "figures" / "größe.svg").write_text("<svg/>")
    (job / "empty").write_bytes(b"")
    (job / "rows.jsonl").write_bytes(b"x" * 1500)
    return folder


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    write_pack(run_folder(tmp_path / "night"), tmp_path / "night.tar")
    return tmp_path / "night.tar"


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(archive: Path, folder: Path) -> str:
    """The refusal's text; nothing may have been laid out."""
    with pytest.raises(ExperimentError) as caught:
        unpack([archive], folder / "there" / "night")
    assert not (folder / "there").exists()
    assert all((caught.value.what, caught.value.allowed, caught.value.remedy))
    return caught.value.what


def test_what_was_packed_is_laid_out_byte_for_byte_and_other_programs_read_it(archive: Path, tmp_path: Path) -> None:
    unpack([archive], tmp_path / "there" / "night")
    assert content(tmp_path / "there" / "night") == content(tmp_path / "night")
    with tarfile.open(archive, "r:") as tar:
        assert tar.getnames() == [LIST_FILE, *sorted(content(tmp_path / "night"))]
    again = tmp_path / "again.tar"
    write_pack(tmp_path / "there" / "night", again)
    assert again.read_bytes() == archive.read_bytes()


def test_any_changed_byte_is_found(archive: Path, tmp_path: Path) -> None:
    whole = archive.read_bytes()
    for at in range(0, len(whole), 7):  # 7 divides neither a block nor a record, so every kind of byte is met
        archive.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(ExperimentError):
            read_pack(archive)
    for cut in (0, 1, 511, 512, 1024, len(whole) - 512, len(whole) - 1):
        archive.write_bytes(whole[:cut])
        with pytest.raises(ExperimentError):
            read_pack(archive)
    archive.write_bytes(whole + bytes(512))
    assert "does not end" in refused(archive, tmp_path)


def forged(folder: Path, name: str = "a", type_: bytes = tarfile.REGTYPE, **about: object) -> Path:
    """An archive with a list that fits, and one member more as an attacker would write it."""
    files = {"run.json": json.dumps(PLAN).encode(), name: b"evil" if type_ == tarfile.REGTYPE else b""}
    listed = {key: sha256(data).hexdigest() for key, data in files.items()}
    files = {LIST_FILE: json.dumps({"schema": 1, "files": listed}).encode(), **dict(sorted(files.items()))}
    with tarfile.open(folder / "forged.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        for key, data in files.items():
            member = tarfile.TarInfo(key)
            member.size = len(data)
            if key == name:
                member.type = type_
                for field, value in about.items():
                    setattr(member, field, value)
            tar.addfile(member, io.BytesIO(data))
    return folder / "forged.tar"


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: forged(folder, "../outside"),
        lambda folder: forged(folder, "/tmp/outside"),
        lambda folder: forged(folder, "jobs/../../outside"),
        lambda folder: forged(folder, "a//b"),
        lambda folder: forged(folder, "./a"),
        lambda folder: forged(folder, "a\\b"),
        lambda folder: forged(folder, "a\nb"),
        lambda folder: forged(folder, type_=tarfile.SYMTYPE, linkname="/etc/passwd"),
        lambda folder: forged(folder, type_=tarfile.LNKTYPE, linkname="run.json"),
        lambda folder: forged(folder, type_=tarfile.FIFOTYPE),
        lambda folder: forged(folder, type_=tarfile.CHRTYPE),
        lambda folder: forged(folder, type_=tarfile.DIRTYPE),
        lambda folder: forged(folder, "x" * 300),
        lambda folder: forged(folder, "run.json/below"),
        lambda folder: forged(folder, "jobs/../a", mode=0o4755),
    ],
)
def test_a_member_that_is_no_plain_file_below_the_folder_is_refused(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    assert "forged.tar" in refused(make(tmp_path), tmp_path)


def test_a_pack_of_another_program_or_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    run_folder(tmp_path / "night")
    for mode in ("w", "w:gz"):
        with tarfile.open(tmp_path / "other.tar", mode) as tar:  # type: ignore[call-overload]
            tar.add(tmp_path / "night", arcname=".")
        refused(tmp_path / "other.tar", tmp_path)
    (tmp_path / "text.tar").write_text("not a tar " * 200)
    refused(tmp_path / "text.tar", tmp_path)
    assert "cannot be read" in refused(tmp_path / "absent.tar", tmp_path)


@pytest.mark.parametrize(
    ("plan", "record", "words"),
    [
        (PLAN, {"id": "one", "hash": "h2"}, "hash 'h2', not 'h1'"),
        (PLAN, {"id": "two", "hash": "h1"}, "record of 'two'"),
        (PLAN, "[" * 100_000, "job.json of one"),
        (PLAN | {"jobs": [{"id": "two", "hash": "h2"}]}, None, "'one' is no job of its night"),
        (PLAN | {"jobs": [{"id": "../one", "hash": "h1"}]}, None, "no name of a folder"),
        (PLAN | {"jobs": 3}, None, "TypeError"),
        ([], None, "TypeError"),
    ],
)
def test_jobs_are_those_of_the_night_that_the_pack_names(
    plan: object, record: object, words: str, tmp_path: Path
) -> None:
    write_pack(run_folder(tmp_path / "night", plan=plan, record=record), tmp_path / "night.tar")
    assert words in refused(tmp_path / "night.tar", tmp_path)


def test_a_run_with_a_link_in_it_is_not_packed(tmp_path: Path) -> None:
    run_folder(tmp_path / "night")
    (tmp_path / "night" / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(RunFailed, match="passwd"):
        write_pack(tmp_path / "night", tmp_path / "night.tar")
    assert not list(tmp_path.glob("night.tar*"))
