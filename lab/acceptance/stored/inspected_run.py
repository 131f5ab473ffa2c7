"""`eagle3lab inspect run`: what the drafts of a stored run gave, request by request, and what others would have given.

Reads logs of acceptance where the run kept some (`-p keep_log=true`), else the rows of its notebooks, which hold sums
over all requests. Nothing is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lab.acceptance.stored.logged import Account, Counts, account_of_log, account_of_row, read_log
from lab.acceptance.stored.what_if import Guess, guesses
from lab.errors import EXIT_PASSED, ExperimentError
from lab.options.acceptance import InspectRunOptions
from lab.rows.store import JOBS_FOLDER, read_run

LOGS = "acceptance*.jsonl"
COLUMNS = ("steps", "cut", "tokens a step", "drafted", "accepted", "bonus")
KEEP = "eagle3lab run 31_acceptance -p keep_log=true"


def run(options: InspectRunOptions) -> int:
    """Print it; the exit code."""
    print("\n".join(lines_of(options)))
    return EXIT_PASSED


def lines_of(options: InspectRunOptions) -> list[str]:
    """What is said of a run.

    Raises:
        ExperimentError: a folder without a log and without rows of acceptance, a damaged log, or as `guesses`.
        ConfigError: choices that cannot be used.
        NotComparable, RunFailed: rows that cannot be read.
    """
    logs = find_logs(options.run_dir)
    if logs:
        accounts = [account_of_log(_name(path, options.run_dir), read_log(path)) for path in logs]
        parts = [_of_log(account, options.requests) for account in accounts]
    else:
        accounts = _stored(options.run_dir)
        parts = [_of_rows(options.run_dir.name, accounts)]
        # The deepest chain says most of others.
        accounts = sorted(accounts, key=lambda account: (account.paths is not None, account.depth))[-1:]
    if options.what_if:
        parts += [_what_if(account, guesses(account, options.what_if, options.costs)) for account in accounts]
    return "\n\n".join("\n".join(part) for part in parts).split("\n")


def find_logs(place: Path) -> list[Path]:
    """The log itself, or those of a run folder or of one of its jobs."""
    if place.is_file():
        return [place]
    return sorted([*place.glob(LOGS), *place.glob(f"{JOBS_FOLDER}/*/{LOGS}")])


def _stored(run_dir: Path) -> list[Account]:
    accounts = [account for row in read_run(run_dir) if (account := account_of_row(row)) is not None]
    if not accounts:
        why = "" if run_dir.is_dir() else ", which does not exist"
        raise ExperimentError(
            f"{run_dir.name!r}{why} holds neither a log nor a row of acceptance",
            "a run folder of 31_acceptance or 32_trees, or a file that EngineConfig(acceptance_log=...) wrote",
            f"make one: {KEEP}",
        )  # fmt: skip
    return accounts


def _name(path: Path, place: Path) -> str:
    return path.name if path == place else path.relative_to(place).as_posix()


def _of_log(account: Account, most: int) -> list[str]:
    """Requests with the lowest lengths, then all."""
    ordered = sorted(account.requests, key=lambda counts: (counts.length is None, counts.length or 0.0))
    listed = ordered[:most]
    rest = len(ordered) - len(listed)
    head = f"{account.name}: {_n(len(account.requests), 'request')}, {_n(account.all.n_steps, 'complete step')}"
    more = [f"  ({rest} more with higher lengths: --requests {len(ordered)})"] if rest else []
    return [head, "", *_table("request", [*listed, account.all], account.depth), *more, "", *_words(account)]


def _of_rows(name: str, accounts: Sequence[Account]) -> list[str]:
    """A line for each shape of drafts."""
    depth = max(account.depth for account in accounts)
    deepest = max(accounts, key=lambda account: account.depth)
    head = f"{name}: sums over all requests; each request's own need a log: {KEEP}"
    return [head, "", *_table("drafts", [account.all for account in accounts], depth), "", *_words(deepest)]


def _table(first: str, counts: Sequence[Counts], depth: int) -> list[str]:
    """Numbers of complete steps, with how many steps accepted 0, 1, ... drafts."""
    names = [first, *COLUMNS, *(str(a) for a in range(depth + 1))]
    lines = _aligned([names, *(_cells(each, depth) for each in counts)])
    return [*lines, f"  (the columns 0 to {depth}: steps that accepted so many drafts)"]


def _cells(counts: Counts, depth: int) -> list[str]:
    length = "-" if counts.length is None else f"{counts.length:.2f}"
    numbers = (counts.n_steps, counts.n_cut, length, counts.n_drafted, counts.n_accepted, counts.n_steps)
    bars = [*counts.histogram, *[0] * (depth + 1 - len(counts.histogram))]
    return [counts.name, *map(str, numbers), *map(str, bars)]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]


def _words(account: Account) -> list[str]:
    """What the line of all means, and where drafts were lost."""
    counts = account.all
    if counts.length is None:
        return ["No step was complete, so there is no acceptance length."]
    accepted = counts.length - 1
    lines = [
        f"{account.name}: a step commits {counts.length:.2f} tokens, {accepted:.2f} accepted drafts and the bonus."
    ]
    if counts.n_cut:
        lines.append(f"{_n(counts.n_cut, 'step')} cut short by a stop or a limit: counted in the column cut alone.")
    if account.losses:
        parts = "; ".join(f"{cause} {value:.2f}" for cause, value in account.losses.items())
        lines.append(
            f"{sum(account.losses.values()):.2f} drafts of a path are lost a step, by the first miss: {parts}."
        )
    elif counts.n_accepted < counts.n_steps * account.depth:
        lines.append("Where drafts were lost is not known: the run kept no ranks (collect_draft_ranks).")
    return lines


def _what_if(account: Account, shapes: Sequence[Guess]) -> list[str]:
    has_costs = shapes[0].cost is not None
    names = ["drafts", "nodes", "tokens a step", *(["cost of a step", "speed-up"] if has_costs else []), ""]
    rows = [names]
    for guess in shapes:
        least = "at least " if guess.n_unknown else ""
        timed = [f"{guess.cost:.3f}", f"{least}{guess.speed_up:.2f}"] if guess.cost and guess.speed_up else []
        note = f"{guess.n_unknown} of its nodes were never drafted here" if guess.n_unknown else ""
        rows.append([guess.name, str(guess.n_nodes), f"{least}{guess.length:.2f}", *timed, note])
    lines = [f"what if other drafts had been made in the {account.all.n_steps} steps of {account.name}"]
    lines += [line.rstrip() for line in _aligned(rows)]
    lines.append(
        "An estimate: each node adds the share of steps in which the target went its way, while other drafts\n"
        "would have begun their steps at other tokens."
    )
    if has_costs:
        lines.append("Costs and speed-ups are over a plain step.")
    return lines


def _n(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
