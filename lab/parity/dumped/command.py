"""`eagle3lab inspect states`: another engine's hidden states against ours; the exit code says whether they agree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lab.ending import tell_summary
from lab.errors import EXIT_GATE_FAILED, EXIT_PASSED, ExperimentError, NotComparable
from lab.options.exchange import InspectStatesOptions
from lab.pairs.named import NAMES
from lab.parity import inputs
from lab.parity.dumped.boundaries import RECORDED, boundaries_along
from lab.parity.dumped.files import Dump, read_dump
from lab.parity.dumped.recorded import is_recorded, recorded_report
from lab.parity.dumped.report import DumpCell, DumpReport, claims_of, report_of
from lab.parity.head_files import read_taps
from lab.parity.recording import PairUnderTest
from lab.parity.repro import RunAgain, write_repros
from lab.rows.environment import collect
from lab.rows.maker import RowMaker
from lab.rows.store import RowWriter

KIND = "dumped states"


def run(options: InspectStatesOptions) -> int:
    """Reads the dumps, computes the same tokens, prints a line a layer; 0 if all agree, 1 if any diverges.

    A file of recorded stages is compared by itself: it has draft stages and steps too.
    """
    if is_recorded(options.dumps[0]):
        return _run_recorded(options)
    beside = "" if options.target in ("", *NAMES) else options.target  # a target alone is no pair
    target, _ = inputs.chosen_pair(options.target, options.draft or beside)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    dumps = [read_dump(path, int(config["hidden_size"])) for path in options.dumps]
    if options.prompts:
        _check_prompts(dumps, target, options)
    pair = PairUnderTest(target, target, options.dtype or _dtype(dumps), options.device)
    n_layers = int(config["num_hidden_layers"])
    claims = [claims_of(dump, _taps(dump, options, n_layers), n_layers) for dump in dumps]
    tokens = [dump.tokens for dump in dumps]
    report = report_of(dumps, claims, boundaries_along(pair, tokens), pair.dtype)
    print("\n".join([*lines_of(report), report.verdict]))
    if options.repro is not None:
        _say_repros(write_repros(report.evidence, RunAgain(pair, tokens, RECORDED), options.repro))
    if options.out is not None:
        _write(options.out, report)
    first = report.first_divergent
    ending = {"command": "inspect states", "n": len(report.cells), "first": first and first.judged.stage}
    tell_summary(ending)
    return EXIT_PASSED if report.passed else EXIT_GATE_FAILED


def _run_recorded(options: InspectStatesOptions) -> int:
    path, *others = options.dumps
    if others or options.prompts:
        raise ExperimentError(
            f"{path.name} holds recorded stages, and {'--prompts' if options.prompts else others[0].name} is beside it",
            "one such file, which holds its own prompts", "give them one by one",
        )  # fmt: skip
    report = recorded_report(path, options)
    table = report.table()[["kind", "stage", "status", "max_abs", "tolerance", "cosine"]]
    print(table.to_string(index=False, float_format=lambda value: f"{value:.4g}"))
    print(report.verdict)
    if options.out is not None:
        maker = RowMaker("inspect", "inspect states", collect().fingerprint)
        with RowWriter(options.out) as writer:
            for values in report.table().astype(object).to_dict("records"):
                name = f"{path.stem}/{values['kind']}/{values['stage']}"
                writer.write(maker.measured("parity", name, values, {"dtype": report.dtype}))
    if options.repro is not None and report.again is not None:
        _say_repros(write_repros(report.evidence, report.again, options.repro))
    first = report.first_divergent
    place = first and "/".join(part for part in (first.pass_name, first.stage) if part)
    tell_summary({"command": "inspect states", "n": len(report.cells), "first": place})
    return EXIT_PASSED if report.passed else EXIT_GATE_FAILED


def _say_repros(scripts: Sequence[Path]) -> None:
    for script in scripts:
        print(f"run again: python {script}")


def lines_of(report: DumpReport) -> list[str]:
    """A table: a line a layer."""
    heads = ("dump", "state", "stage", "best", "", "relative", "allowed", "cosine", "largest", "allowed")
    cells = [heads, *(_columns(cell) for cell in report.cells)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _columns(cell: DumpCell) -> tuple[str, ...]:
    judged = cell.judged
    numbers = (cell.relative, cell.relative_allowed, judged.cosine, judged.max_abs, judged.tolerance)
    words = ["-" if value is None else f"{value:.4g}" for value in numbers]
    stage = judged.stage if cell.claimed else f"{judged.stage}?"  # nobody said so
    kind = "pass" if cell.passed else f"FAIL {cell.kind}"
    return (cell.dump, cell.state, stage, cell.best, kind, *words)


def _dtype(dumps: Sequence[Dump]) -> str:
    names = sorted({dump.dtype for dump in dumps})
    if len(names) > 1:
        raise ExperimentError(
            f"the dumps hold {' and '.join(names)}", "dumps of one dtype", "name the one that was computed in: --dtype"
        )
    return names[0]


def _taps(dump: Dump, options: InspectStatesOptions, n_layers: int) -> tuple[int, ...] | None:
    """Boundaries that are said to be in a dump: of the ids that were typed, or of the draft they were dumped for."""
    if options.capture_layers:
        # vLLM and speculators number what a layer reads, SpecForge what it leaves.
        convention = options.capture_convention or ("output" if dump.form == "SpecForge" else "input")
        return tuple(layer + (convention == "output") for layer in options.capture_layers)
    if not options.draft:
        return None
    config = json.loads((Path(options.draft) / "config.json").read_text(encoding="utf-8"))
    return read_taps(config, n_layers)


def _check_prompts(dumps: Sequence[Dump], target: Path, options: InspectStatesOptions) -> None:
    """That every dump begins with one of the prompts' ids, or is one's beginning.

    Raises:
        NotComparable: a dump of other tokens.
    """
    most = max(len(dump.tokens) for dump in dumps)
    known = inputs.prompt_ids(target, options.prompts, n_prompts=options.n_prompts, max_tokens=max(2, most)).ids
    for dump in dumps:
        same = [_n_same(dump.tokens, ids) for ids in known]
        if not any(n == min(len(dump.tokens), len(ids)) for n, ids in zip(same, known, strict=True)):
            n = max(same)
            raise NotComparable(
                f"{dump.name} holds token {dump.tokens[n]} at position {n}, which no prompt of {options.prompts} has",
                "states of these prompts, of the same tokenizer and template",
                "dump them with the prompts' own ids, or leave out --prompts to go along the dumped ids",
            )


def _n_same(tokens: Sequence[int], ids: Sequence[int]) -> int:
    pairs = zip(tokens, ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(ids)))


def _write(path: Path, report: DumpReport) -> None:
    maker = RowMaker("inspect", "inspect states", collect().fingerprint)
    with RowWriter(path) as writer:
        for cell in report.cells:
            name = f"{Path(cell.dump).stem}/{cell.state}"
            writer.write(maker.measured(KIND, name, cell.row_values(), {"dtype": report.dtype}))
