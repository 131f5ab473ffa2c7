"""`eagle3lab kernels`: the cards, the thresholds, or the roofline, from the registry and a file of benchmark rows."""

from __future__ import annotations

from pathlib import Path

from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED, ExperimentError
from lab.options.kernels import KernelsOptions, SanitizeOptions
from lab.probes.kernels import cards
from lab.probes.kernels.rows import WANTED, Bench, read_bench, reference_files
from lab.probes.sanitizer import command as sanitize


def run(options: KernelsOptions) -> int:
    """Prints what was asked for: cards, or thresholds (1 if one failed, 3 if none failed and one is missing)."""
    if options.sanitize is not None:
        return sanitize.run(SanitizeOptions(out=Path(options.sanitize) if options.sanitize else None))
    bench = chosen(options.rows)
    if options.draw is not None:
        return _draw(bench, options.draw)
    if not options.gates:
        print(cards.listing(bench))
        return EXIT_PASSED
    return _gates(bench)


def chosen(rows: Path | None) -> Bench | None:
    """The rows to show: those of `rows`, else of the newest committed file, else None."""
    if rows is not None:
        return read_bench(rows)
    known = reference_files()
    return read_bench(known[-1]) if known else None


def _gates(bench: Bench | None) -> int:
    found = cards.checks(bench)
    print(f"rows: {bench.line() if bench else f'missing: {cards.NO_ROWS}'}")
    print("\n".join(check.line() for check in found))
    musts = [check for check in found if check.is_must]
    failed = sum(check.holds is False for check in musts)
    missing = sum(check.holds is None for check in musts)
    print(f"{len(musts) - failed - missing} of {len(musts)} thresholds held, {failed} failed, {missing} missing")
    return EXIT_GATE_FAILED if failed else EXIT_COULD_NOT_RUN if missing else EXIT_PASSED


def _draw(bench: Bench | None, path: Path) -> int:
    from lab import figures
    from lab.probes.kernels import pictures

    if bench is None or not bench.cells:
        raise ExperimentError(
            "there is nothing to draw: no timed kernel", "a file of benchmark rows", f"measure on a GPU: {WANTED}"
        )
    import matplotlib as mpl

    mpl.use("agg")
    figures.use_style()
    path.write_text(figures.standalone(figures.to_svg(pictures.roofline(bench).fig, "roofline")), encoding="utf-8")
    print(f"{path.name}: {bench.line()}")
    return EXIT_PASSED
