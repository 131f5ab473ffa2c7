"""Every command line that README and docs show can be typed: commands, options, notebooks, parameters, make targets.

Nothing is run. A line is what stands in a code block, without its comment; `[...]` around optional parts, variables of
the environment before a command, and what a scheduler writes before or after it are left out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT

from lab.cli import parsed
from lab.errors import ExperimentError
from lab.night.jobs import load_config
from lab.night.parameters import check_parameters, find_notebook, read_parameters
from lab.night.plan import config_path
from lab.night.settings import one_notebook, with_settings
from lab.options import kernels as kernel_options
from lab.options.examples import EXAMPLES
from lab.options.night import NightOptions, RunOptions
from lab.options.reader import parsed as parsed_by

pytestmark = pytest.mark.reference

PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "log.md")]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"^(?:export )?([A-Z_]+) *[?:]?=", MAKEFILE, re.MULTILINE)) | set(
    re.findall(r"\$\((?:if \$\()?([A-Z_]+)", MAKEFILE)
)
COMMAND = re.compile(r"(?:^|[\s;&=/])(eagle3lab|make|python3 -m (?:lab|eagle3core)\.[\w.]+)(?: (.*))?$")
MISSING = re.compile(r"is '(.+)', which does not exist$")


def code_lines(text: str) -> Iterator[str]:
    """Lines of indented and fenced code, continued ones joined, without comments."""
    is_fenced, kept = False, ""
    before = ""
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            is_fenced, before = not is_fenced, ""
            continue
        if is_fenced or (line.startswith("    ") and not before.strip()):
            kept += re.sub(r"(^|\s)#.*$", "", line).strip()
            if kept.endswith("\\"):
                kept = kept[:-1]
                continue
            yield kept
            kept = ""
            before = "" if not is_fenced else before
        else:
            before = line


def typed(line: str) -> tuple[str, list[str]] | None:
    """The program and its words in a line of code, of several the last; None for a line that holds none."""
    found = COMMAND.search(re.split(r" (?:&&|;) ", line)[-1])
    if found is None or (found[1] == "eagle3lab" and not found[2]):  # the folder of that name, in a scheduler's file
        return None
    rest = re.split(r" (?:>>?|\||2>&1)", found[2] or "")[0]
    words = []
    for word in shlex.split(rest):
        plain = word[1:] if word.startswith("[") else word
        plain = plain[:-1] if plain.endswith("]") and "[" not in plain else plain
        if plain != "...":
            words.append(plain)
    return found[1], words


def shown() -> list[tuple[str, str, list[str]]]:
    """Page, program and words of every command line shown."""
    lines = []
    for page in PAGES:
        for line in code_lines(page.read_text(encoding="utf-8")):
            words = typed(line)
            if words is not None:
                lines.append((page.name, *words))
    return lines


def check(program: str, words: list[str]) -> None:
    """Raises what is wrong with a command line; files that it reads are taken to be there."""
    if program == "make":
        names = {word.partition("=")[0] for word in words if "=" in word}
        unknown = {word for word in words if "=" not in word} - TARGETS | (names - VARIABLES)
        if unknown:
            raise ExperimentError(f"make has no {sorted(unknown)}", ", ".join(sorted(TARGETS)), "correct the line")
        return
    try:
        _check_words(program, words)
    except ExperimentError as error:
        absent = MISSING.search(error.what)
        if absent is None:
            raise
        path = Path(absent[1])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        check(program, words)


def _check_words(program: str, words: list[str]) -> None:
    if program != "eagle3lab":
        module = program.split()[-1]
        source = (ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
        model = re.search(r"run_program\((\w+),", source)
        assert model is not None, f"{module} is no program"
        parsed_by(getattr(kernel_options, model[1]), words, program)
        return
    command, options = parsed(words)
    if isinstance(options, RunOptions):
        [job] = one_notebook(options.notebook, options.settings, options.timeout_s).job
        check_parameters(read_parameters(find_notebook(options.notebook)), job.parameters)
    if isinstance(options, NightOptions) and config_path(options.config).is_file():
        with_settings(load_config(config_path(options.config)).job, options.settings)
    if command.name == "ab":
        parsed(getattr(options, "command", ()))


def test_every_command_line_of_the_pages_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    faults = []
    for page, program, words in shown():
        try:
            check(program, words)
        except (ExperimentError, FileNotFoundError, AssertionError) as error:
            faults.append(f"{page}: {program} {' '.join(words)}: {str(error).splitlines()[0]}")
    assert faults == []


@pytest.mark.parametrize("example", EXAMPLES.values())
def test_every_example_of_help_can_be_typed(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check("eagle3lab", shlex.split(example))


def test_there_are_command_lines_to_check() -> None:
    lines = shown()
    assert len(lines) >= 20
    assert {program.split()[0] for _, program, _ in lines} >= {"eagle3lab", "make"}
    assert {page for page, _, _ in lines} >= {"README.md"}


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("    make setup", "make has no ['setup']"),
        ("    make lab OUTT=x", "make has no ['OUTT']"),
        ("    eagle3lab sweeps", "no command 'sweeps'"),
        ("    .venv/bin/eagle3lab bench --at 512 >> log", "point '512'"),
        ("    EAGLE3_X=1 eagle3lab gates micro [--repeet 3]  # three", "unrecognized arguments: --repeet 3"),
        ("    eagle3lab run 40_spead", "no notebook '40_spead'"),
        ("    eagle3lab run 40_speed -p round=2", "unknown parameter 'round'"),
        ("    eagle3lab nightly -p nothing=2 \\\n        --dry-run", "no notebook of this night has it"),
        ("    python3 -m lab.probes.kernels.bench --arch sm_70", "--arch is sm_70"),
        ("    eagle3lab ab . . --command 'bench --bogus'", "unrecognized arguments: --bogus"),
    ],
)
def test_a_line_that_cannot_be_typed_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    [words] = [typed(code) for code in code_lines(line) if code]
    assert words is not None
    with pytest.raises(ExperimentError) as refused:
        check(*words)
    assert what in refused.value.what


def test_a_line_of_a_scheduler_is_read_like_any_other() -> None:
    cron = "30 2 * * *  cd $HOME/eagle3lab && .venv/bin/eagle3lab nightly x.toml --require-gpu >> cron.log 2>&1"
    assert typed(cron) == ("eagle3lab", ["nightly", "x.toml", "--require-gpu"])
    assert typed("- run: make lab") == ("make", ["lab"])
    assert typed("ExecStart=%h/eagle3lab/.venv/bin/eagle3lab doctor") == ("eagle3lab", ["doctor"])
    assert typed("nothing to type") is None
