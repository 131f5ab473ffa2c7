"""Options of nights, of single notebooks, and of what is made from stored runs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lab.options.fields import Options, option
from lab.options.values import Folder, Seconds


class NoOptions(Options):
    """A command that takes none."""


class DoctorOptions(Options):
    """Say what this machine can run, and why not the rest; of a pair, everything that keeps it from being loaded."""

    target: Path | None = option(None, "target model, Hugging Face layout", metavar="DIR")
    draft: Path | None = option(None, "draft head of that target", metavar="DIR")
    method: Literal["eagle3", "eagle"] = option("eagle3", "what the head is for; eagle: of EAGLE-1 and 2")
    norm_output: Literal["feedback", "head"] | None = option(None, "what that key of a flat draft config means")


class _PairAndPlace(Options):
    """Which pair is examined, and where the run is kept."""

    target: Path | None = option(None, "target model, Hugging Face layout", metavar="DIR")
    draft: Path | None = option(None, "EAGLE-3 draft of that target", metavar="DIR")
    prompts: Path | None = option(None, "prompts, one JSON object a line", metavar="FILE")
    out: Folder | None = option(None, "run folder; an unfinished one is resumed", metavar="DIR")


class NightOptions(_PairAndPlace):
    """Run every notebook of a configuration and write a report; each option beats the configuration's value."""

    config: Path | None = option(
        None, "a night's configuration; default: the packaged nightly.toml", flag="", metavar="CONFIG.toml"
    )
    require_gpu: bool = option(False, "exit 3 when there is no GPU")
    strict_undecided: bool = option(False, "exit 4 when a compared number is unsure or missing")
    dry_run: bool = option(False, "show the jobs and the time; start nothing")
    settings: tuple[str, ...] = option(
        (), "a parameter, for every notebook that has it, or for one", flag="-p", metavar="[NOTEBOOK.]NAME=VALUE",
        shape="repeated",
    )  # fmt: skip
    part: str | None = option(None, "only the jobs of this part; the last part judges the night", metavar="I/N")
    pack: Path | None = option(None, "write the run folder to one archive at the end", metavar="OUT.tar")
    resume_from: tuple[Path, ...] = option(
        (), "begin from a packed run, or from several parts of it; --out must be new", metavar="IN.tar",
        shape="repeated",
    )  # fmt: skip


class RunOptions(_PairAndPlace):
    """Run one notebook with checked parameters and write a report."""

    notebook: str = option(..., "a name from `eagle3lab notebooks`, or a path", flag="", metavar="NOTEBOOK")
    settings: tuple[str, ...] = option((), "a parameter", flag="-p", metavar="NAME=VALUE", shape="repeated")
    timeout_s: Seconds = option(1800.0, "limit for the whole notebook", metavar="S")


class NotebooksOptions(Options):
    """List the notebooks and their parameters."""

    copies: Path | None = option(
        None, "copy them into DIR instead, to work in; copies that are there are kept", flag="--copy", metavar="DIR"
    )


class ReportOptions(Options):
    """Draw a run's report again from its stored rows (needs no torch)."""

    run_dir: Folder = option(..., "a run folder", flag="", metavar="DIR")


class CompareOptions(Options):
    """Compare two runs of one machine; exit 1 if anything is slower."""

    before: Folder = option(..., "the earlier run folder", flag="", metavar="A")
    after: Folder = option(..., "the later run folder", flag="", metavar="B")
    markdown: bool = option(False, "as tables for a pull request")
    html: Path | None = option(None, "write a page: curves overlaid, rows that moved, environments", metavar="OUT.html")
