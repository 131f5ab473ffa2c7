"""Every card under compute-sanitizer: python3 -m lab.probes.sanitizer.command --out rows.jsonl

memcheck watches each access to memory, racecheck each pair of accesses to shared memory; both see only our kernels.
First the planted bugs (`plants`) take the same path: a tool that misses its plant, or reports the same kernel
without it, has no say, and nothing is called clean. Then every card runs in a process of its own, several at once: its
tiny cases under every setting, each launched once. Kernels are compiled before the tools start.

Racecheck reports some right synchronisation too, which is shown on plants as well; cards with such kernels run under it
in another form (`form`), and are then `clean in form`, not clean.

`--build DIR --arch sm_90a` compiles on any machine; the run finds the kernels through EAGLE3_CUBINS.
Exit codes: 0 all clean or clean in form, 1 something found or failed, 3 not all could be run.

Source: Compute Sanitizer documentation, release 2025.3; limits derived here.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from eagle3core.errors import BackendUnavailable, InvariantViolated
from eagle3core.kernels import Card, Variant, cubins, launch, registry, tool
from lab.errors import EXIT_COULD_NOT_RUN, ExperimentError
from lab.options.kernels import SanitizeOptions
from lab.options.reader import run_program
from lab.probes.sanitizer.plants import PLANTS, WRITTEN, Pair, plants_of, written_on
from lab.probes.sanitizer.processes import NAMED, Run
from lab.probes.sanitizer.report import CLEAN, CLEAN_IN_FORM, FAILED, FOUND, INCOMPLETE, KIND, Outcome
from lab.probes.sanitizer.run import seen_by, variants
from lab.rows import environment
from lab.rows.maker import RowMaker
from lab.rows.store import RowWriter, utc_now

SANITIZER = "compute-sanitizer"
TOOLS = tuple(PLANTS)


def run(options: SanitizeOptions) -> int:
    """The command; returns its exit code."""
    try:
        return _sanitized(options) if options.build is None else _built(options, options.build)
    except BackendUnavailable as missing:
        print(missing, file=sys.stderr)
        return EXIT_COULD_NOT_RUN


def _built(options: SanitizeOptions, out: Path) -> int:
    wanted = _wanted(_cards(options), options.arch)
    with cubins.Compiling(wanted, options.arch, folder=out, n_processes=options.jobs) as under_way:
        made = under_way.wait().n_compiled
    print(f"{len(wanted)} kernels wanted, {made} compiled")
    return 0


def _cards(options: SanitizeOptions) -> list[Card]:
    known = registry()
    for name in options.ops:
        if name not in known:
            raise ExperimentError(f"no op card {name!r}", ", ".join(known), "correct the name")
    return [known[name] for name in options.ops or known]


def _wanted(cards: Sequence[Card], arch: str) -> list[Variant]:
    """Every kernel of the plants and of `cards`, as each tool gets it."""
    wanted = [card for card, _ in _planted(arch)] + list(cards)
    return variants([seen_by(name, card) for card in wanted for name in TOOLS], arch)


def _planted(arch: str) -> list[tuple[Card, str]]:
    """The plants with the tool each is for."""
    pairs = [(card, name) for name, found in plants_of(arch).items() for pair in found for card in pair]
    return pairs + [(card, "racecheck") for card in written_on(arch)]


def _sanitized(options: SanitizeOptions) -> int:
    """Prepares, tries the tools on the planted bugs, runs the cards, and concludes.

    Raises:
        BackendUnavailable: no GPU, no compute-sanitizer, or one that does not work on this machine.
    """
    cards, path, arch = _cards(options), located(), launch.device_arch()
    _prepare(cards, arch, options.jobs)
    tell = _teller(path, options.out)
    with tempfile.TemporaryDirectory() as scratch:
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        runs = Run(path, logs, time.monotonic() + options.limit_s, options.jobs)
        plants = runs.all_of(_planted(arch), tell)
        missed = missed_plants(plants, plants_of(arch))
        print("\n".join(missed) or "both tools find their planted bugs and pass the same kernels without them")
        print("\n".join(what_racecheck_misjudges(plants)), flush=True)
        found = [] if missed else runs.all_of([(card, name) for card in cards for name in TOOLS], tell)
    return _concluded(found, len(cards) * len(TOOLS), missed)


def located() -> str:
    """Path of compute-sanitizer.

    Raises:
        BackendUnavailable: it is not installed.
    """
    try:
        return tool(SANITIZER)
    except BackendUnavailable as missing:
        raise BackendUnavailable(
            f"{SANITIZER} was not found in CUDA_HOME/bin, PATH or /usr/local/cuda/bin",
            "the one of a CUDA 13 toolkit",
            "install the toolkit's package cuda-sanitizer, or set CUDA_HOME to a toolkit that has it",
        ) from missing


def _prepare(cards: Sequence[Card], arch: str, jobs: int) -> None:
    """Finds or compiles every kernel, so that nothing is compiled under a tool."""
    begun, wanted = time.monotonic(), _wanted(cards, arch)
    with cubins.Compiling(wanted, arch, n_processes=jobs) as under_way:
        print(f"{len(wanted)} kernels for {arch}, {under_way.n_missing} of them to be compiled first", flush=True)
        under_way.wait()
    for variant in wanted:
        _, about = cubins.cubin(variant, arch)
        if NAMED not in about["entry"]:
            raise InvariantViolated(
                f"{variant.name} is called {about['entry']} in its cubin, which the tools would skip",
                f"a name that holds {NAMED!r}", "keep kernel factories in modules of the package",
            )  # fmt: skip
    print(f"kernels at hand after {time.monotonic() - begun:.0f} s", flush=True)


def missed_plants(outcomes: Sequence[Outcome], plants: Mapping[str, Sequence[Pair]]) -> list[str]:
    """Why a tool may not judge, in words: it missed a plant, or took the same kernel without it for faulty.

    Raises:
        BackendUnavailable: a tool gave no verdict at all.
    """
    verdicts = {(outcome.tool, outcome.op): outcome for outcome in outcomes}
    words = []
    for name, (planted, undone) in ((name, pair) for name, pairs in plants.items() for pair in pairs):
        with_bug, without = verdicts[name, planted.name], verdicts[name, undone.name]
        for outcome in (with_bug, without):
            if outcome.summary is None:
                raise BackendUnavailable(
                    f"{name} does not work on this machine: {'; '.join(outcome.reasons)}",
                    "a driver and a container that let compute-sanitizer instrument kernels",
                    "see its log with --logs DIR, or run it on another machine",
                )
        if with_bug.verdict != FOUND:
            words.append(f"{name} missed the bug of {planted.name} ({with_bug.verdict}): nothing it says counts")
        if without.verdict not in (CLEAN, CLEAN_IN_FORM):
            words.append(f"{name} is not content with {undone.name} ({without.verdict}): nothing it says counts")
    return words


def what_racecheck_misjudges(outcomes: Sequence[Outcome]) -> list[str]:
    """What racecheck makes of right kernels as they are written, in words."""
    written = [outcome for outcome in outcomes if outcome.op in {card.name for card in WRITTEN}]
    return [
        f"racecheck cannot follow {outcome.op}: it is right, and has {outcome.summary.hazards} hazards reported"
        if outcome.verdict == FOUND and outcome.summary
        else f"racecheck follows {outcome.op} ({outcome.verdict}): no other form is needed for what it does"
        for outcome in written
    ]


def _teller(path: str, out: Path | None) -> Callable[[Outcome], None]:
    """Prints an outcome and appends its row to `out`, if a file is named, at once: a run may be stopped at any time."""
    words = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    version = next((line for line in words if line.startswith("Version")), None)
    machine = environment.collect()
    machine = machine.model_copy(update={"packages": {**machine.packages, SANITIZER: version}})
    gpu = machine.gpus[0].name if machine.gpus else None
    maker = RowMaker(f"sanitizer-{utc_now()}", KIND, machine.fingerprint, shared={"gpu": gpu})
    writer = RowWriter(out) if out else None
    if writer:
        writer.write(maker.machine(machine))

    def tell(outcome: Outcome) -> None:
        print(outcome.line(), flush=True)
        if writer:
            writer.write(maker.measured(KIND, outcome.op, outcome.values(), {"tool": outcome.tool}))

    return tell


def _concluded(found: Sequence[Outcome], wanted: int, missed: Sequence[str]) -> int:
    verdicts = (CLEAN, CLEAN_IN_FORM, FOUND, FAILED, INCOMPLETE)
    counts = {verdict: sum(o.verdict == verdict for o in found) for verdict in verdicts}
    kernels = sum(outcome.launches for outcome in found)
    print(f"{counts[CLEAN]} of {wanted} runs clean, {counts[CLEAN_IN_FORM]} clean in another form, {kernels} kernels, "
          f"{counts[FOUND]} found something, {counts[FAILED]} failed, "
          f"{wanted - len(found) + counts[INCOMPLETE]} incomplete", flush=True)  # fmt: skip
    if missed or counts[FOUND] or counts[FAILED]:
        return 1
    return 0 if counts[CLEAN] + counts[CLEAN_IN_FORM] == wanted else 3


if __name__ == "__main__":
    run_program(SanitizeOptions, run)
