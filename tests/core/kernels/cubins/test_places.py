"""Kernels in folders and archives: whole or absent, whoever writes at the same time and whatever became of the file."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

import pytest

from eagle3core.kernels.cubins import places
from eagle3core.kernels.cubins.places import check_writable, read_from, write_archive, write_to

pytestmark = pytest.mark.reference

CODE = b"\x7fELF" + bytes(range(256)) * 8


@pytest.fixture(autouse=True)
def _tells_anew() -> None:
    places._tell_damage.cache_clear()
    places._tell_refusal.cache_clear()
    places._opened.cache_clear()


def test_what_was_written_is_read_and_nothing_else_is_left(tmp_path: Path) -> None:
    written = write_to(tmp_path / "new", "kernel", CODE, {"entry": "k"})
    assert read_from(tmp_path / "new", "kernel") == written
    assert written[1]["entry"] == "k"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["kernel.cubin", "kernel.json"]
    assert read_from(tmp_path / "new", "another") is None
    assert read_from(tmp_path / "nowhere", "kernel") is None


@pytest.mark.parametrize(
    ("suffix", "data"),
    [
        (".cubin", CODE[:-1]),
        (".cubin", CODE[:100] + b"\0" + CODE[101:]),
        (".cubin", b""),
        (".json", b"{"),
        (".json", b"[]"),
        (".json", b'{"entry": "k"}'),
        (".json", b""),
    ],
)
def test_a_damaged_file_is_as_good_as_absent_and_is_told_once(
    suffix: str, data: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_to(tmp_path, "kernel", CODE, {"entry": "k"})
    (tmp_path / f"kernel{suffix}").write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert read_from(tmp_path, "kernel") is None
        assert read_from(tmp_path, "kernel") is None
    assert [record.message for record in caplog.records if "damaged" in record.message] == [
        f"[EAGLE] kernel kernel in {tmp_path.name} is damaged: it does not agree with its digest"
    ]
    assert write_to(tmp_path, "kernel", CODE, {"entry": "k"}) == read_from(tmp_path, "kernel")


def test_writers_at_once_leave_a_whole_kernel_of_one_of_them(tmp_path: Path) -> None:
    codes = [bytes([i]) * 4096 for i in range(4)]
    writers = [
        threading.Thread(target=lambda code=code: [write_to(tmp_path, "k", code, {}) for _ in range(25)])
        for code in codes
    ]
    seen = []
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        seen.append(read_from(tmp_path, "k"))
    found = read_from(tmp_path, "k")
    assert {kernel[0] for kernel in [*seen, found] if kernel is not None} <= set(codes)
    write_to(tmp_path, "k", codes[0], {})
    assert read_from(tmp_path, "k") is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k.cubin", "k.json"]


def test_a_folder_that_cannot_be_written_is_refused_and_holds_nothing_afterwards(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError):
        check_writable(tmp_path / "file" / "folder")
    check_writable(tmp_path / "folder")
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_rights_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        check_writable(tmp_path)


def test_an_archive_gives_what_was_put_in_with_a_manifest_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    kernels = {name: (CODE + name.encode(), {"entry": name}) for name in ("b", "a")}
    one, other = tmp_path / "one.zip", tmp_path / "other.zip"
    write_archive(one, kernels, {"arch": "sm_90a"})
    write_archive(other, dict(reversed(kernels.items())), {"arch": "sm_90a"})
    assert one.read_bytes() == other.read_bytes()
    found = read_from(one, "a")
    assert found is not None
    assert found[0] == CODE + b"a"
    assert found[1]["entry"] == "a"
    assert read_from(one, "c") is None
    manifest = json.loads(places._from_archive(one)(places.MANIFEST) or b"")
    assert manifest["arch"] == "sm_90a"
    assert list(manifest["kernels"]) == ["a", "b"]
    assert manifest["kernels"]["a"] == found[1]["sha256"]


def test_an_archive_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "kernels.zip"
    write_archive(path, {"a": (b"first", {})}, {})
    assert (read_from(path, "a") or (b"",))[0] == b"first"
    write_archive(path, {"a": (b"second one", {})}, {})
    assert (read_from(path, "a") or (b"",))[0] == b"second one"


def test_a_damaged_archive_is_as_good_as_absent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "kernels.zip"
    write_archive(path, {"a": (CODE * 8, {})}, {})
    whole = path.read_bytes()
    at = whole.index(b"a.cubin") + 40
    with caplog.at_level(logging.WARNING):
        path.write_bytes(whole[:at] + b"\xff\xff\xff" + whole[at + 3 :])
        assert read_from(path, "a") is None
        path.write_bytes(whole[: len(whole) // 2])
        assert read_from(path, "a") is None
        assert read_from(tmp_path / "none.zip", "a") is None
    assert "a.cubin in kernels.zip cannot be read" in caplog.text
    assert "kernels.zip holds no kernels that can be read" in caplog.text
    assert "none.zip holds no kernels that can be read" in caplog.text
