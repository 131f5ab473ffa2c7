"""Damaged inputs: the ring itself, and that each way to end as none may is found for what it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from places import ROOT

from lab.cli import main
from lab.probes.fuzz import damage
from lab.probes.fuzz.group import Ended, Group, all_groups
from lab.probes.fuzz.heads import all_heads, all_targets
from lab.probes.fuzz.outcomes import Outcome, gathered, of_return

pytestmark = pytest.mark.reference

CASES, SHARES = 24, 4  # of each group, over all shares; about two minutes of processor time in all

# Each is run as the door of a planted group, in a process of its own.
DOORS = {
    "fine": "None",
    "refused": "refuse()",
    "traceback": "{}['gone']",
    "memory": "bytearray(3 << 30)",
    "memory, a little too much": "bytearray(220 << 20)",
    "fine, within the limit": "bytearray(100 << 20)",
    "memory as a refusal": "too_much()",
    "time": "spin()",
    "outside": "(folder.parent / 'beside').write_text('x')",
    "outside, by native code": "save(folder / 'x')",
    "outside, in the input": "(folder / 'more').write_text('x')",
    "outside, by the network": "__import__('socket').getaddrinfo('localhost', 80)",
    "code": "(folder.parent / 'canary').write_text('x')",
    "code, a program": "__import__('os').system('true')",
    "code, of the input": "exec(compile('1', str(folder / 'own.py'), 'exec'))",
    "code, by a pickle": "__import__('pickle').loads(b'cbuiltins\\nlen\\n.')",
    "traceback, a crash": "__import__('ctypes').string_at(0)",
    "traceback, half a refusal": "half()",
    "traceback, a refusal that nobody reads to its end": "refuse('a' * 5000)",
}
PLANTED = """
import json, sys
from lab.errors import ExperimentError
from pathlib import Path
from lab.probes.fuzz import child
from lab.probes.fuzz.group import Group
import safetensors.torch, torch

def refuse(what="a"):
    raise ExperimentError(what, "b", "c")
def half():
    raise ExperimentError("a", "", "c")
def too_much():
    try:
        return bytearray(3 << 30)
    except MemoryError as error:
        raise ExperimentError("a", "b", "c") from error
def spin():
    while True:
        pass
def save(path):
    safetensors.torch.save_file({"a": torch.zeros(1)}, path)

words = {}
for name, text in json.loads(sys.argv[1]).items():
    def door(prepared, folder, text=text):
        eval(text)
    group = Group("planted", "", None, lambda *given: None, door, refusals=("ExperimentError",), most_cpu_s=1)
    words[name] = child.outcome_of(child.Case(group, 0, 0), None, Path(sys.argv[2], name).resolve())
print(json.dumps({name: [outcome.word, outcome.error, outcome.told] for name, outcome in words.items()}))
"""


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own, which forks without the threads of this one."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.long
@pytest.mark.fuzz
@pytest.mark.slow
@pytest.mark.parametrize(
    "share", [1, *(pytest.param(share, marks=pytest.mark.exhaustive) for share in range(2, SHARES + 1))]
)
def test_no_damaged_input_ends_but_by_being_taken_or_refused(share: int) -> None:
    ended = run_python("-m", "lab", "fuzz", "--cases", str(CASES), "--seed", "7", "--share", f"{share}/{SHARES}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    counts = json.loads(ended.stdout.splitlines()[-1])["groups"]
    assert all(sum(words.values()) == CASES // SHARES for words in counts.values())


def test_every_way_to_end_is_found_for_what_it_is(tmp_path: Path) -> None:
    ended = run_python("-c", PLANTED, json.dumps(DOORS), str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    words = json.loads(ended.stdout)
    assert {name: words[name] for name in DOORS if words[name][0] != name.split(",")[0].split(" ")[0]} == {}


def test_a_case_is_the_same_bytes_whenever_it_is_made() -> None:
    value = {"a": [1, 2.5, {"b": "c"}], "d": None, "e": "text"}
    made = [[damage.damaged_text(value, Random(f"{i}")) for i in range(300)] for _ in range(2)]
    assert made[0] == made[1]
    assert len(set(made[0])) > 200


def test_what_a_command_told_is_judged_by_its_code_and_its_three_parts() -> None:
    group = Group("a", "", lambda folder: None, lambda *given: None, lambda *given: None)
    refusal = "eagle3lab: x is 3\n  allowed: 1 to 2\n  do: write 1"
    words = {
        Ended(0, ""): "fine",
        Ended(2, refusal): "refused",
        Ended(1, refusal): "traceback",
        Ended(3, "eagle3lab: broken"): "traceback",
        Ended(3, f"eagle3lab: unforeseen: KeyError: 3\n{refusal}"): "traceback",
    }
    assert {ended: of_return(group, ended).word for ended in words} == words


def test_findings_are_gathered_by_group_kind_and_place() -> None:
    crash, other = Outcome("traceback", "KeyError", "lab/a.py:f"), Outcome("traceback", "KeyError", "lab/a.py:g")
    found = gathered([("a", 1, other), ("a", 2, crash), ("a", 3, crash), ("b", 4, crash), ("a", 5, Outcome("fine"))])
    assert [(one.group, one.first, one.n_cases) for one in found] == [("a", 2, 2), ("a", 1, 1), ("b", 4, 1)]


def test_a_scale_that_should_have_been_refused_and_is_taken_is_a_finding(tmp_path: Path) -> None:
    group = all_groups()["scales"]
    prepared = group.prepare(tmp_path)
    valid = tmp_path / "valid-0"
    how = json.loads((valid / "how.json").read_text())
    (valid / "how.json").write_text(json.dumps({**how, "wrong": "a scale holds NaN"}))
    with pytest.raises(AssertionError, match="taken, and a scale holds NaN"):
        group.open(prepared, valid)


def test_a_group_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--groups", "none-such"]) == 2
    assert "no group is called 'none-such'" in capsys.readouterr().err


def test_heads_and_targets_of_every_kind_are_the_same_noise_whatever_was_made_before() -> None:
    first, second = all_heads(), all_heads()
    assert all(
        torch.equal(tensor, second[kind].weights[name])
        for kind, head in first.items()
        for name, tensor in head.weights.items()
    )
    assert {head.settings.get("method", "eagle3") for head in first.values()} == {"eagle", "eagle3"}
    assert {target.config["model_type"] for target in all_targets().values()} == {"llama", "mistral", "qwen2", "qwen3"}
