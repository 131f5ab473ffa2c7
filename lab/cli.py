"""The commands: one table. What was typed is checked by a model of options; then one function runs with them.

Only the chosen function's module is imported, and only once its options are right, so that `--help` and a refusal need
neither torch nor a plotting library. Errors become three lines and an exit code.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lab.ending import ended
from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED
from lab.options.acceptance import GoldenOptions, InspectRunOptions
from lab.options.bench import BenchOptions, PlantedOptions, ScenariosOptions, StartOptions
from lab.options.bits import InspectBitsOptions
from lab.options.doctor import DraftDoctorOptions
from lab.options.examples import CHAPTERS, EXAMPLES
from lab.options.exchange import (
    ConvertOptions,
    DraftVocabOptions,
    ExportOptions,
    ImportOptions,
    InspectStatesOptions,
    TapsOptions,
    UpgradeOptions,
)
from lab.options.fields import Options
from lab.options.fuzz import FuzzOptions
from lab.options.kernels import KernelsOptions, WarmOptions
from lab.options.night import (
    CompareOptions,
    DoctorOptions,
    NightOptions,
    NoOptions,
    NotebooksOptions,
    ReportOptions,
    RunOptions,
)
from lab.options.proofs import GatesCheckOptions, GatesFeasibleOptions, GatesRunOptions, ProveOptions
from lab.options.reader import EXIT_CODES, Parser, add_options, described, read_values
from lab.options.serve import ServeOptions
from lab.options.speed import AbOptions, ProfileOptions, SpeedOptions
from lab.options.sweeps import FmhaOptions, GemmOptions, ShapesOptions, StepOptions
from lab.options.training import TrainOptions
from lab.options.trees import InspectTreeOptions


@dataclass(frozen=True)
class Command:
    """One line of the table.

    Attributes:
        name: the word or words that are typed. help: what it does, in a line.
        options: the model of what may be typed after the name.
        function: `module:name`, inside `lab`, of what runs with these options and gives the exit code.
    """

    name: str
    help: str
    options: type[Options]
    function: str

    def run(self, options: Options) -> int:
        """Imports the function and calls it."""
        module, _, name = self.function.partition(":")
        function: Callable[[Options], int] = getattr(importlib.import_module(f"lab.{module}"), name)
        return function(options)


COMMANDS = (
    Command("nightly", "run every notebook of a configuration and write a report", NightOptions, "nightly:run_night"),
    Command("run", "run one notebook with checked parameters and write a report", RunOptions, "nightly:run_one"),
    Command("notebooks", "list the notebooks and their parameters", NotebooksOptions, "cli:show_notebooks"),
    Command("report", "draw a run's report again from its stored rows", ReportOptions, "cli:show_report"),
    Command("compare", "compare two runs of one machine", CompareOptions, "cli:show_comparison"),
    Command("doctor", "say what this machine can run, or why a pair does not load", DoctorOptions, "cli:show_machine"),
    Command("doctor draft", "say why a draft head accepts so little", DraftDoctorOptions, "doctor.draft.command:run"),
    Command("warm", "compile an engine's kernels before it starts", WarmOptions, "probes.start.warm:run"),
    Command("kernels", "list the GPU kernels and their thresholds", KernelsOptions, "probes.kernels.command:run"),
    Command("bench", "time decoding beside other engines", BenchOptions, "probes.bench.command:run"),
    Command("startup", "time the first request of a process", StartOptions, "probes.start.command:run"),
    Command("scenarios", "run the bench over named suites", ScenariosOptions, "probes.bench.suite:run"),
    Command("ab", "compare two commits or settings, measured in turns", AbOptions, "probes.ab.command:run"),
    Command("import", "compare another engine's acceptance", ImportOptions, "acceptance.reported.command:run"),
    Command("export", "write stored rows for other tools", ExportOptions, "cli:export"),
    Command("golden", "keep a run's acceptance lengths for later runs", GoldenOptions, "acceptance.golden.file:run"),
    Command("prove", "prove the GPU engine: bits, parity, memory", ProveOptions, "probes.proofs.command:run"),
    Command("speed", "time every depth and take its step apart", SpeedOptions, "probes.speed.command:run"),
    Command("sweep shapes", "log an engine's matrix products", ShapesOptions, "probes.sweeps.command:log_shapes"),
    Command("sweep gemm", "time settings of matrix products", GemmOptions, "probes.sweeps.command:sweep_gemm"),
    Command("sweep fmha", "time settings of attention", FmhaOptions, "probes.sweeps.command:sweep_fmha"),
    Command("sweep step", "time settings of products in a step", StepOptions, "probes.sweeps.step_command:run"),
    Command("gates micro", "short runs, which count", GatesRunOptions, "probes.gates.command:run_micro"),
    Command("gates full", "long runs, after enough green micro runs", GatesRunOptions, "probes.gates.command:run_full"),
    Command("gates check", "judge stored records", GatesCheckOptions, "probes.gates.command:check"),
    Command("gates feasible", "say what bytes allow", GatesFeasibleOptions, "probes.gates.feasible_command:run"),
    Command("fuzz", "hand damaged inputs to the public doors", FuzzOptions, "probes.fuzz.command:run"),
    Command("profile", "profile a step by range, or a stored capture", ProfileOptions, "probes.profiles.command:run"),
    Command("planted", "check a planted pair, or write it to disk", PlantedOptions, "probes.bench.dial:run"),
    Command("train", "train a small (target, draft) pair from scratch", TrainOptions, "training.command:run"),
    Command("inspect tree", "show a draft tree and its buffers", InspectTreeOptions, "acceptance.inspected_tree:run"),
    Command("inspect run", "show what a run's drafts gave", InspectRunOptions, "acceptance.stored.inspected_run:run"),
    Command("inspect bits", "say where the bits of two runs part", InspectBitsOptions, "probes.bits.command:run"),
    Command("inspect states", "compare another engine's states", InspectStatesOptions, "parity.dumped.command:run"),
    Command("rows upgrade", "carry stored rows over to today's form", UpgradeOptions, "rows.carried.upgrade:run"),
    Command("serve", "answer OpenAI's completions and chats over HTTP", ServeOptions, "serve.command:run"),
    Command("convert", "write a draft head in another format", ConvertOptions, "pairs.converted:run"),
    Command("draft-vocab", "cut a draft head to the most frequent tokens", DraftVocabOptions, "vocabulary.command:run"),
    Command("taps", "write the engine's recorded stages to a file", TapsOptions, "parity.taps:run"),
)  # fmt: skip
GROUPS = {
    "sweep": "time order-neutral settings of the kernels and keep the best",
    "rows": "look after stored rows",
    "inspect": "show what settings mean, and where two runs differ",
    "gates": "judge speed: micro runs, and full ones after three green",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit code."""
    before = signal.signal(signal.SIGTERM, _stopped)
    try:
        code = ended(lambda: run(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output has left, as `| head` does; what is left in the buffer has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_COULD_NOT_RUN
    finally:
        signal.signal(signal.SIGTERM, before)


def run(arguments: Sequence[str]) -> int:
    """Runs one command, for callers that want its errors.

    Raises:
        LabError: what was typed cannot be used, or what the command raises.
    """
    command, options = parsed(arguments)
    return command.run(options)


def parsed(arguments: Sequence[str]) -> tuple[Command, Options]:
    """The command of a line with its options, checked; nothing is run.

    Raises:
        ExperimentError: no such command or option, or a value that is not allowed.
    """
    found, unknown = _parser().parse_known_args(arguments)
    given = vars(found)
    command, parser = given.pop("_command"), given.pop("_parser")
    if unknown:
        parser.refuse_unknown(unknown)
    return command, read_values(command.options, given, parser.prog)


class _Top(Parser):
    """`eagle3lab` alone: its help shows the commands in groups."""

    def format_help(self) -> str:
        told = {command.name: command.help for command in COMMANDS} | GROUPS
        lines = [*self.format_usage().splitlines(), "", str(self.description)]
        for title, names in CHAPTERS:
            lines += ["", f"{title}:", *(f"    {name:10} {told[name]}" for name in names)]
        return "\n".join([*lines, "", "`eagle3lab COMMAND --help` shows options and an example.", EXIT_CODES, ""])


def _parser() -> Parser:
    """The command line of `eagle3lab`."""
    top = _Top(prog="eagle3lab", description="Bring up, prove and tune EAGLE-3 speculative decoding.")
    commands = {"": top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)}
    parsers: dict[str, Parser] = {}  # of commands; one of them may be a group as well, and then runs without a member
    for command in COMMANDS:
        group, _, name = command.name.rpartition(" ")
        if group not in commands:
            made = parsers.get(group) or commands[""].add_parser(group, help=GROUPS[group], description=GROUPS[group])
            commands[group] = made.add_subparsers(
                title="commands", metavar="COMMAND", required=group not in parsers, parser_class=Parser
            )
        parsers[command.name] = _add_command(commands[group], name, command)
    return top


def _add_command(commands: argparse._SubParsersAction[Parser], name: str, command: Command) -> Parser:
    text = described(command.options) if command.options is not NoOptions else command.help
    epilog = f"Example: eagle3lab {EXAMPLES[command.name]}. {EXIT_CODES}"
    made = commands.add_parser(name, help=command.help, description=text, epilog=epilog)
    add_options(made, command.options)
    made.set_defaults(_command=command, _parser=made)  # no field begins with an underscore
    return made


def show_notebooks(options: NotebooksOptions) -> int:
    """Lists the notebooks and their parameters, or copies them."""
    if options.copies is not None:
        from lab.night.copies import copy_notebooks

        print("\n".join(copy_notebooks(options.copies)))
        return EXIT_PASSED
    from lab.night.parameters import listing

    print(listing())
    return EXIT_PASSED


def show_report(options: ReportOptions) -> int:
    """Draws a run's report again and names every file it wrote, the page first; needs no torch."""
    from lab.page.report import render_all

    print("\n".join(map(str, render_all(options.run_dir))))
    return EXIT_PASSED


def show_comparison(options: CompareOptions) -> int:
    """Compares two runs; 1 if anything is slower. The page is written even of runs whose numbers cannot be compared."""
    from lab.rows.comparison import comparison

    if options.html is not None:
        from lab.page.two_runs import render_two

        render_two(options.before, options.after, options.html)
        print(f"Page: {options.html}", file=sys.stderr)
    text, any_slower = comparison(options.before, options.after, markdown=options.markdown)
    print(text)
    return EXIT_GATE_FAILED if any_slower else EXIT_PASSED


def export(options: ExportOptions) -> int:
    """Writes rows as a table, or the timed kernels among them in FlashInfer-Bench's form."""
    if options.form == "table":
        from lab.rows.carried.export import run as write
    else:
        from lab.probes.flashinfer_bench.command import run as write
    return write(options)


def show_machine(options: DoctorOptions) -> int:
    """Says what this machine can run, 3 if `make lab` could not; or of a pair all that keeps it from being loaded."""
    from lab.doctor import conclusion, examine, examine_pair, exit_code

    if options.target is not None or options.draft is not None:
        return examine_pair(options.target, options.draft, method=options.method, norm_output=options.norm_output)

    checks = examine()
    print("\n".join(check.line() for check in checks))
    print(conclusion(checks))
    return exit_code(checks)


def _stopped(signal_number: int, frame: object) -> None:
    """A night told to stop by its scheduler ends its notebook and its kernel, as with Ctrl-C."""
    raise KeyboardInterrupt
