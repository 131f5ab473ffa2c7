"""The commands. Each parses its options and calls one function; errors become three lines and an exit code."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED, EXIT_USAGE, ExperimentError, LabError

_EXIT_CODES = "Exit codes: 0 passed, 1 a gate failed, 2 wrong usage, 3 could not run, 4 undecided (--strict-undecided)."

# Commands whose own module reads their options and runs them: name, module, what they do.
_PASSED_ON = (
    ("bench", "lab.probes.bench.command", "time decoding with and without drafts, beside other engines"),
    ("scenarios", "lab.probes.bench.suite", "run the bench over named contexts, batches and depths"),
    ("ab", "lab.probes.ab.command", "compare two commits or settings, measured in turns"),
    ("import", "lab.acceptance.imported", "hold acceptance that vLLM or SGLang reported against ours"),
    ("prove", "lab.probes.proofs.command", "prove the GPU engine: bits, parity, quiet steps, long runs, memory"),
    ("speed", "lab.probes.speed.command", "time every depth of speculation and take its step apart"),
    ("sweep", "lab.probes.sweeps.command", "time settings of the kernels and keep the best"),
    ("gates", "lab.probes.gates.command", "judge speed: micro runs, and full ones after three green"),
    ("profile", "lab.probes.profiles.command", "profile a step by NVTX range, or a stored capture"),
    ("planted", "lab.probes.bench.dial", "check a planted pair: margin, acceptance; or write it to disk"),
    ("train", "lab.training.command", "train a small (target, draft) pair from scratch"),
    ("rows", "lab.rows.upgrade", "carry stored rows of older forms over to today's: rows upgrade FILE|DIR..."),
    ("taps", "lab.parity.taps", "write the engine's recorded stages to a safetensors file"),
)

Command = Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    """Refuses in the same three parts as everything else."""

    def error(self, message: str) -> NoReturn:
        raise ExperimentError(message, self.format_usage().strip(), f"see `{self.prog} --help`")


def parser() -> argparse.ArgumentParser:
    """The command line of `eagle3lab`."""
    top = _Parser(
        prog="eagle3lab",
        description="Bring up, prove and tune EAGLE-3 speculative decoding.",
        epilog=_EXIT_CODES,
        allow_abbrev=False,
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    _nightly(_command(commands, "nightly", _do_nightly, "run every notebook of a configuration and write a report"))
    _run(_command(commands, "run", _do_run, "run one notebook with checked parameters and write a report"))
    _command(commands, "notebooks", _do_notebooks, "list the notebooks and their parameters")
    redraw = _command(commands, "report", _do_report, "draw a run's report again from its stored rows (needs no torch)")
    redraw.add_argument("run_dir", metavar="DIR", type=Path, help="a run folder")
    pair = _command(commands, "compare", _do_compare, "compare two runs of one machine; exit 1 if anything is slower")
    pair.add_argument("before", metavar="A", type=Path, help="the earlier run folder")
    pair.add_argument("after", metavar="B", type=Path, help="the later run folder")
    pair.add_argument("--markdown", action="store_true", help="as tables for a pull request")
    _command(commands, "doctor", _do_doctor, "say what this machine can run, and why not the rest")
    _kernels(_command(commands, "kernels", _do_kernels, "list the GPU kernels, their proofs and their thresholds"))
    for name, module, help_text in _PASSED_ON:
        _passed_on(commands, name, module, help_text)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit code."""
    before = signal.signal(signal.SIGTERM, _stopped)
    try:
        code = _run_command(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output has left, as `| head` does; what is left in the buffer has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_COULD_NOT_RUN
    finally:
        signal.signal(signal.SIGTERM, before)


def _stopped(signal_number: int, frame: object) -> None:
    """A night told to stop by its scheduler ends its notebook and its kernel, as with Ctrl-C."""
    raise KeyboardInterrupt


def _run_command(arguments: Sequence[str] | None) -> int:
    try:
        parsed, unknown = parser().parse_known_args(arguments)
        if unknown:
            parsed.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        command: Command = parsed.command
        return command(parsed)
    except LabError as error:
        return _refused(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _refused("interrupted; the same command with the same --out goes on", EXIT_COULD_NOT_RUN)
    except Exception as error:
        if not _is_of_the_engine(error):
            raise
        return _refused(str(error), EXIT_USAGE)


def _is_of_the_engine(error: Exception) -> bool:
    """Whether it is an `Eagle3Error`, found without importing the engine, which would import torch."""
    return any(base.__module__ == "eagle3core.errors" for base in type(error).__mro__)


def _refused(text: str, code: int) -> int:
    print(f"eagle3lab: {text}", file=sys.stderr)
    return code


def _command(
    commands: argparse._SubParsersAction[_Parser], name: str, command: Command, help_text: str
) -> argparse.ArgumentParser:
    made = commands.add_parser(name, help=help_text, description=help_text, epilog=_EXIT_CODES, allow_abbrev=False)
    made.set_defaults(command=command, parser=made)
    return made


def _passed_on(commands: argparse._SubParsersAction[_Parser], name: str, module: str, help_text: str) -> None:
    """A command whose own module reads its options, `--help` included; imported when it runs, as it may need torch."""

    def command(given: argparse.Namespace) -> int:
        return int(importlib.import_module(module).main(given.rest) or EXIT_PASSED)

    made = commands.add_parser(name, help=help_text, add_help=False, prefix_chars="\0")
    made.add_argument("rest", nargs=argparse.REMAINDER)
    made.set_defaults(command=command, parser=made)


def _pair_options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--target", metavar="DIR", type=Path, help="target model, Hugging Face layout")
    made.add_argument("--draft", metavar="DIR", type=Path, help="EAGLE-3 draft of that target")
    made.add_argument("--prompts", metavar="FILE", type=Path, help="prompts, one JSON object a line")
    made.add_argument("--out", metavar="DIR", type=Path, help="run folder; an unfinished one is resumed")


def _nightly(made: argparse.ArgumentParser) -> None:
    made.add_argument("config", metavar="CONFIG.toml", type=Path, nargs="?", help="default: the packaged nightly.toml")
    _pair_options(made)
    made.add_argument("--require-gpu", action="store_true", help="exit 3 when there is no GPU")
    made.add_argument(
        "--strict-undecided",
        action="store_true",
        help="exit 1 when a number is certainly slower, 4 when one is unsure or missing",
    )
    made.add_argument("--dry-run", action="store_true", help="show the jobs and the time; start nothing")
    made.add_argument(
        "-p", metavar="[NOTEBOOK.]NAME=VALUE", dest="settings", action="append", default=[],
        help="a parameter, for every notebook that has it, or for one",
    )  # fmt: skip
    made.add_argument("--part", metavar="I/N", help="only the jobs of this part; the last part judges the night")
    made.add_argument("--pack", metavar="OUT.tar", type=Path, help="write the run folder to one archive at the end")
    made.add_argument("--resume-from", metavar="IN.tar", type=Path, action="append", default=[],
                      help="begin from a packed run, or from several parts of it; --out must be new")  # fmt: skip


def _run(made: argparse.ArgumentParser) -> None:
    made.add_argument("notebook", metavar="NOTEBOOK", help="a name from `eagle3lab notebooks`, or a path")
    made.add_argument("-p", metavar="NAME=VALUE", dest="settings", action="append", default=[], help="a parameter")
    _pair_options(made)
    made.add_argument("--timeout-s", metavar="S", type=float, default=1800.0, help="limit for the whole notebook")


def _kernels(made: argparse.ArgumentParser) -> None:
    made.add_argument("--rows", metavar="FILE.jsonl", type=Path, help="benchmark rows; default: the newest committed")
    made.add_argument("--gates", action="store_true", help="judge the rows; exit 1 if a threshold failed, 3 if missing")
    made.add_argument("--draw", metavar="FILE.svg", type=Path, help="write the roofline of all kernels")
    made.add_argument(
        "--sanitize",
        metavar="OUT.jsonl",
        nargs="?",
        const="",
        help="run every card under compute-sanitizer on this GPU, rows appended to OUT; exit 1 if anything was found",
    )


def _do_nightly(given: argparse.Namespace) -> int:
    from lab.night.plan import NightOptions
    from lab.nightly import run_night

    return run_night(
        NightOptions(
            given.config,
            given.target,
            given.draft,
            given.prompts,
            given.out,
            given.require_gpu,
            given.strict_undecided,
            given.dry_run,
            given.part,
            given.pack,
            tuple(given.resume_from),
            tuple(given.settings),
        )
    )


def _do_run(given: argparse.Namespace) -> int:
    from lab.night.plan import NightOptions
    from lab.nightly import run_one

    options = NightOptions(target=given.target, draft=given.draft, prompts=given.prompts, out=given.out)
    return run_one(given.notebook, given.settings, options, given.timeout_s)


def _do_notebooks(_: argparse.Namespace) -> int:
    from lab.night.parameters import listing

    print(listing())
    return EXIT_PASSED


def _do_report(given: argparse.Namespace) -> int:
    from lab.page.report import render

    print(render(given.run_dir))
    return EXIT_PASSED


def _do_compare(given: argparse.Namespace) -> int:
    from lab.rows.comparison import comparison

    text, any_slower = comparison(given.before, given.after, markdown=given.markdown)
    print(text)
    return EXIT_GATE_FAILED if any_slower else EXIT_PASSED


def _do_doctor(_: argparse.Namespace) -> int:
    from lab.doctor import conclusion, examine, exit_code

    checks = examine()
    print("\n".join(check.line() for check in checks))
    print(conclusion(checks))
    return exit_code(checks)


def _do_kernels(given: argparse.Namespace) -> int:
    if given.sanitize is not None:
        from lab.probes.sanitizer.command import main as sanitize

        return sanitize(["--out", given.sanitize])

    from lab.probes.kernels.command import show

    return show(given.rows, gates=given.gates, draw=given.draw)
