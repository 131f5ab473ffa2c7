"""Three green micro runs in a row: who counts, what breaks the row, and a file that nothing destroys."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from gate_rows import SMALL
from places import ROOT

from lab.errors import RunFailed
from lab.probes.gates.config import load_gates
from lab.probes.gates.history import (
    MEASURING,
    Entry,
    Key,
    append,
    code_hash,
    entry_of,
    green_row,
    key_of,
    read,
    require_green,
)
from lab.rows import environment
from lab.rows.gpus import Gpu
from lab.rows.maker import RowMaker
from lab.rows.store import Damaged, read_rows

pytestmark = pytest.mark.reference

KEY = Key("c0de", "c0f1", "NVIDIA H200", "llama-3.1-8b")
OTHERS = {
    "code": replace(KEY, code="beef"),
    "config": replace(KEY, config="beef"),
    "gpu": replace(KEY, gpu="NVIDIA H100"),
    "geometry": replace(KEY, geometry="nano"),
}
# Every kind of line, and what it is to the row of KEY: g counts, x breaks, nothing is passed over.
KINDS: dict[str, tuple[Entry | Damaged, str]] = {
    "green": (entry_of(KEY, "micro", "green", []), "g"),
    "red": (entry_of(KEY, "micro", "red", ["single32k spec: speed-up"]), "x"),
    "incomplete": (entry_of(KEY, "micro", "incomplete", ["x"]), "x"),
    "broke": (entry_of(KEY, "micro", "broke", ["RunFailed: x"]), "x"),
    "damaged": (Damaged(1, "torn"), "x"),
    "full green": (entry_of(KEY, "full", "green", []), ""),
    "full red": (entry_of(KEY, "full", "red", ["x"]), ""),
    **{f"green, other {name}": (entry_of(key, "micro", "green", []), "") for name, key in OTHERS.items()},
    **{f"red, other {name}": (entry_of(key, "micro", "red", ["x"]), "") for name, key in OTHERS.items()},
}


def test_every_history_of_up_to_four_runs_is_counted_as_its_newest_greens() -> None:
    for length in range(5):
        for names in product(KINDS, repeat=length):
            word = "".join(KINDS[name][1] for name in names)
            ending = re.search("g*$", word)
            assert ending is not None
            row = green_row([KINDS[name][0] for name in names], KEY, 3)
            assert row.n_green == len(ending[0]), names
            assert row.is_long_enough == (len(ending[0]) >= 3), names


@pytest.mark.parametrize("spoiler", [name for name, (_, letter) in KINDS.items() if letter == "x"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_run_that_was_not_green_starts_the_count_anew(tmp_path: Path, spoiler: str, after: int) -> None:
    path = tmp_path / "gates.jsonl"
    for _ in range(3):
        append(path, entry_of(KEY, "micro", "green", []))
    assert require_green(path, KEY, 3).is_long_enough
    entry = KINDS[spoiler][0]
    if isinstance(entry, Damaged):
        with path.open("ab") as file:
            file.write(b'{"time": "20\n')
    else:
        append(path, entry)
    for _ in range(after):
        append(path, entry_of(KEY, "micro", "green", []))
    with pytest.raises(RunFailed) as refused:
        require_green(path, KEY, 3)
    assert refused.value.exit_code == 3
    assert f"{after} of 3 green micro runs in a row; before them" in refused.value.what
    assert ("line 4" if spoiler == "damaged" else f", {spoiler}: {entry.why[0]}") in refused.value.what  # type: ignore[union-attr]
    assert f"--repeat {3 - after}" in refused.value.remedy
    for _ in range(3 - after):
        append(path, entry_of(KEY, "micro", "green", []))
    assert require_green(path, KEY, 3).is_long_enough


@pytest.mark.parametrize("name", OTHERS, ids="another {}".format)
def test_another_code_configuration_gpu_or_geometry_has_a_count_of_its_own(tmp_path: Path, name: str) -> None:
    path = tmp_path / "gates.jsonl"
    for _ in range(3):
        append(path, entry_of(KEY, "micro", "green", []))
    now = OTHERS[name]
    with pytest.raises(RunFailed, match=f"0 of 3.* was of another {name} {getattr(KEY, name)}") as refused:
        require_green(path, now, 3)
    assert str(now) in refused.value.allowed
    assert require_green(path, KEY, 3).is_long_enough, "the first one's runs still count for it"


def test_a_run_is_a_row_like_any_other_and_comes_back_as_it_was(tmp_path: Path) -> None:
    entry = entry_of(KEY, "full", "red", ["single32k spec: speed-up"], "fingerprint")
    append(tmp_path / "gates.jsonl", entry)
    assert read(tmp_path / "gates.jsonl") == [entry]
    [row] = read_rows(tmp_path / "gates.jsonl")
    assert (row.kind, row.name, row.environment, row.recorded_at) == ("gate_run", "full", "fingerprint", entry.time)


def test_with_no_file_nothing_was_green(tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as refused:
        require_green(tmp_path / "absent.jsonl", KEY, 3)
    assert refused.value.what.endswith("0 of 3 green micro runs in a row")
    assert read(tmp_path / "absent.jsonl") == []


@pytest.mark.parametrize(
    "line",
    [
        b'{"time":"now","mode":"micro","result":"gre',
        b"\xff\xfe\x00",
        b"[]",
        b'"green"',
        b'{"result":"green"}',
        b'{"time":"now","mode":"micro","result":"green","code":"c0de","config":"c0f1","gpu":"x","geometry":"y","why":[]}',
        RowMaker("gates", "gates", "m")
        .measured("gate", "micro", {"result": "green", "why": []})
        .line()
        .rstrip()
        .encode(),
        entry_of(KEY, "micro", "green", []).row().line().rstrip().replace("green", "GREEN").encode(),
        entry_of(KEY, "micro", "green", []).row().line().rstrip()[:-1].encode() + b',"new_key":1}',
    ],
)
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_damaged_line_is_never_green_and_what_is_in_the_file_stays(tmp_path: Path, line: bytes, end: bytes) -> None:
    path = tmp_path / "gates.jsonl"
    for _ in range(2):
        append(path, entry_of(KEY, "micro", "green", []))
    with path.open("ab") as file:
        file.write(line + end)
    before = path.read_bytes()
    assert isinstance(read(path)[2], Damaged)
    assert green_row(read(path), KEY, 3).n_green == 0
    append(path, entry_of(KEY, "micro", "green", []))
    assert path.read_bytes().startswith(before)
    entries = read(path)
    assert [isinstance(entry, Entry) for entry in entries] == [True, True, False, True]
    assert green_row(entries, KEY, 3).n_green == 1


def test_a_whole_line_that_only_lacks_its_end_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "gates.jsonl"
    append(path, entry_of(KEY, "micro", "green", []))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    append(path, entry_of(KEY, "micro", "green", []))
    assert green_row(read(path), KEY, 3).n_green == 2
    assert path.read_bytes().count(b"\n") == 2


def test_a_file_that_cannot_be_read_or_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="cannot be read"):
        read(tmp_path)
    with pytest.raises(RunFailed, match="could not be written"):
        append(tmp_path, entry_of(KEY, "micro", "green", []))


def test_the_code_hash_is_of_what_a_number_depends_on(tmp_path: Path) -> None:
    places = [place if place.endswith(".py") else f"{place}/one.py" for place in MEASURING]
    for place in (*places, "lab/templates/one.py", "lab/rows/other.py", "eagle3core/__pycache__/one.py"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("x = 1\n")
    known = code_hash(tmp_path)
    for place in ("lab/templates/one.py", "lab/rows/other.py", "eagle3core/__pycache__/one.py"):
        (tmp_path / place).write_text("x = 2\n")
    (tmp_path / "eagle3core/notes.md").write_text("x\n")
    assert code_hash(tmp_path) == known
    hashes = {known}
    for place in places:
        (tmp_path / place).write_text("x = 2\n")
        hashes.add(code_hash(tmp_path))
    (tmp_path / "eagle3core/tuned.json").write_text("{}\n")
    hashes.add(code_hash(tmp_path))
    assert len(hashes) == len(MEASURING) + 2
    assert code_hash() == code_hash()
    assert {"lab/probes/ceilings.py", "lab/rows/clock.py"} <= set(MEASURING), "a step's time and its floor need them"
    assert all((ROOT / place).exists() for place in MEASURING)


def test_a_key_names_the_gpu_for_gates_of_a_gpu_and_else_the_cpu() -> None:
    config, machine = load_gates(SMALL), environment.collect()
    with_gpu = machine.model_copy(update={"gpus": [Gpu(name="NVIDIA H200")]})
    assert key_of(config, with_gpu).gpu == machine.cpu
    assert key_of(config.model_copy(update={"device": "cuda"}), with_gpu).gpu == "NVIDIA H200"
    assert key_of(config, machine).geometry == "nano"
