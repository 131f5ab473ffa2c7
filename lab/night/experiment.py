"""What a notebook talks to: parameters checked, rows written, figures kept, gates judged, an outcome left behind.

    # second cell                                        # last cell
    exp = experiment.start(globals(), notebook="30_decode")      exp.finish()

In a night, `run_dir` and `job` arrive as parameters and everything lands in that job's folder. By hand in JupyterLab
both are empty, and results go to `reports/by-hand/<notebook>/<time>/`.
"""

from __future__ import annotations

import html
import json
import os
import warnings
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lab import figures, widgets
from lab.night.parameters import ParameterSpec, check_parameters, find_notebook, read_parameters
from lab.rows import environment
from lab.rows.maker import RowMaker
from lab.rows.runs import read_environment
from lab.rows.store import JOBS_FOLDER, ROWS_FILE, Row, RowWriter, Value, utc_now
from lab.rows.values import plain, plain_values

if TYPE_CHECKING:
    from lab.rows.clock import Timing

# Set by the runner, which may run a notebook that is not among the packaged ones.
SOURCE_VARIABLE = "EAGLE3LAB_NOTEBOOK"
# And where its results go: a folder of this attempt, which takes the job's place when the attempt has ended.
OUT_VARIABLE = "EAGLE3LAB_OUT"
OUTCOME_FILE = "outcome.json"
PROGRESS_FILE = "progress.jsonl"
FIGURES_FOLDER = "figures"
MEASURE_HERE = "To have rows of this machine, set measure = True in the cell of parameters."
BY_HAND = "by-hand"  # in place of a job's name
SENTENCE = "sentence"  # kind of the rows that explain a result in words


def start(given: dict[str, Any], *, notebook: str) -> Experiment:
    """Checks the notebook's parameters, opens its result folder, and prints both, with the machine.

    By hand the parameters stand in the cell above, and nothing of them is printed again.

    Args:
        given: the notebook's `globals()`, or a plain dictionary of parameters.
        notebook: the notebook's name without `.ipynb`.

    Raises:
        ExperimentError: a parameter has the wrong type, or the notebook is unknown.
    """
    source = Path(os.environ.get(SOURCE_VARIABLE) or find_notebook(notebook))
    specs = read_parameters(source)
    names = {spec.name for spec in specs}
    parameters = check_parameters(specs, {name: value for name, value in given.items() if name in names})
    run_dir, job = str(parameters.pop("run_dir", "")), str(parameters.pop("job", ""))
    by_hand = not run_dir
    if by_hand:
        job = BY_HAND
        out = _by_hand_folder(notebook)
        run = out.name
        record = environment.collect()
    else:
        out = Path(os.environ.get(OUT_VARIABLE) or Path(run_dir).resolve() / JOBS_FOLDER / job)
        run = Path(run_dir).resolve().name
        record = read_environment(Path(run_dir).resolve())
    figures.use_style()
    # tqdm says so once a kernel; the lab prints lines and has no bars.
    warnings.filterwarnings("ignore", message="IProgress not found")
    experiment = Experiment(notebook, run, job, out, parameters, record)
    if by_hand:
        experiment.write_machine()
        experiment.show_start()
    else:
        experiment.print_start(specs)
    return experiment


def _by_hand_folder(notebook: str) -> Path:
    root = environment.checkout() or Path.cwd()
    return root / "reports" / "by-hand" / notebook / datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")


class Experiment:
    """One notebook's open result folder.

    Attributes:
        parameters: the checked parameters as attributes (`run_dir` and `job` are taken out).
        out: the folder of this job's results.
        run, job, notebook: names that every row carries.
        environment: the machine's record.
        gates: the gates judged so far, each a dictionary of name, passed, value, threshold, detail.
    """

    def __init__(
        self,
        notebook: str,
        run: str,
        job: str,
        out: Path,
        parameters: dict[str, Any],
        record: environment.Environment,
    ) -> None:
        self.notebook, self.run, self.job, self.out = notebook, run, job, out
        self.parameters = SimpleNamespace(**parameters)
        self.environment = record
        self.gates: list[dict[str, Value]] = []
        self._n_figures = self._n_sentences = 0
        out.mkdir(parents=True, exist_ok=True)
        self._writer = RowWriter(out / ROWS_FILE)
        self._maker = RowMaker(run, job, record.fingerprint, notebook)

    @property
    def run_dir(self) -> Path:
        """The folder of the whole run; by hand, the notebook's own."""
        return self.out if self.is_by_hand else self.out.parent.parent

    @property
    def is_by_hand(self) -> bool:
        """Whether somebody opened the notebook and ran it, and no night did."""
        return self.job == BY_HAND

    def print_start(self, specs: list[ParameterSpec]) -> None:
        """Prints the resolved parameters with their help, then the machine."""
        print(f"{self.notebook}: run {self.run}, job {self.job}")
        help_of = {spec.name: spec.help for spec in specs}
        for name, value in vars(self.parameters).items():
            note = f"  # {help_of[name]}" if help_of.get(name) else ""
            print(f"  {name} = {value!r}{note}")
        for label, text in self.environment.lines():
            print(f"  {label}: {text}")

    def show_start(self) -> None:
        """Says in a line where results go and what runs them, and gives figures the colours of JupyterLab's theme."""
        machine = dict(self.environment.lines())
        figures.show(figures.notebook_style())
        print(f"results: reports/{BY_HAND}/{self.notebook}/{self.out.name}; GPU: {machine['GPU']}; {machine['CPU']}")

    def show_source(self, line: str, machine: str, *, measured: bool, remedy: str = MEASURE_HERE) -> None:
        """Says where rows come from; in a banner too where they were stored, and of no machine like this one.

        Args:
            line: the rows' file and what they are of. machine: the name of their GPU, or of their CPU.
            measured: by this notebook, just now. remedy: what to do to have rows of this machine.
        """
        self.say(line)
        own = [*(gpu.name for gpu in self.environment.gpus), self.environment.cpu]
        if not measured and machine not in own:
            here = " and ".join(name for name in own if name)
            text = f"These rows were measured on {machine}; this is {here}. {remedy}"
            figures.show(figures.banner("Not of this machine.", text))

    def write_machine(self) -> None:
        """Appends the machine's record as a row, for a folder that has no file of it."""
        self._writer.write(self._maker.machine(self.environment))

    def write(
        self,
        kind: str,
        name: str,
        values: dict[str, Any],
        *,
        timing: Timing | None = None,
        timer: str | None = None,
        warmup: int | None = None,
        repeats: int | None = None,
        **parameters: Any,
    ) -> None:
        """Appends one measured row.

        Args:
            kind: family of the row: "parity", "tokens", "decode", "acceptance", "ceiling", ...
            name: what was measured, e.g. a stage name.
            values: measured values, units as key suffix (see `lab.rows.store` for how spread is named).
            timing: a `lab.rows.clock.Timing` that fills timer, warm-up, repeats and the `time_us` values.
            parameters: the grid point, e.g. `dtype="bfloat16", spec_k=3`.

        Raises:
            RunFailed: the row could not be written; rows before it are safe.
            ExperimentError: a value is not a number, text, truth value, None or list of these.
        """
        stored = plain_values(values)
        if timing is not None:
            timer, warmup, repeats = timing.timer, timing.warmup, timing.repeats
            stored = {**timing.values(), **stored}
        where = plain_values(parameters)
        self._writer.write(self._maker.measured(kind, name, stored, where, timer=timer, warmup=warmup, repeats=repeats))

    def carry(self, row: Row, **more: Any) -> None:
        """Appends a row that a command of the lab made, as this notebook's; it keeps its machine, timer and moment.

        Args:
            more: parameters beside its own.
        """
        parameters = {**row.parameters, **plain_values(more)}
        place = {"run": self.run, "job": self.job, "notebook": self.notebook, "parameters": parameters}
        self._writer.write(row.model_copy(update=place))

    def missing(self, kind: str, name: str, reason: str, **parameters: Any) -> None:
        """Appends a row that says `name` was not measured, and why. Missing never counts as passed."""
        self._left_out(self._maker.missing(kind, name, reason, plain_values(parameters)))

    def not_asked(self, kind: str, name: str, reason: str, **parameters: Any) -> None:
        """Appends a row that says the parameters left `name` out: nothing is wrong, and nothing was proven either."""
        self._left_out(self._maker.not_asked(kind, name, reason, plain_values(parameters)))

    def _left_out(self, row: Row) -> None:
        self._writer.write(row)
        print(f"{row.status}: {row.name}: {row.reason}")

    def figure(self, name: str, drawing: figures.Drawing) -> None:
        """Shows a drawing with its alternative text, caption and table, and keeps all of it for the report.

        The figure is closed afterwards, so that a notebook's own echo does not draw it again.

        Raises:
            ExperimentError: the alternative text, caption or table is empty.
        """
        figures.show(self._keep(name, drawing).html())

    def explore(self, name: str, draw: Callable[..., figures.Drawing], controls: Mapping[str, widgets.Control]) -> None:
        """The figure that `draw` gives at the controls' first values; by hand with the controls, to draw others.

        Args:
            draw: a drawing from a value for each control, by name; pure. controls: as of `lab.widgets.show`.

        Raises:
            ExperimentError: as `figure`.
        """
        order = self._n_figures + 1
        first = self._keep(name, draw(**widgets.starts(controls))).html()

        def markup(**chosen: Any) -> str:
            return figures.Kept.of(draw(**chosen), name=name, prefix=self.job, order=order).html()

        widgets.show(markup, controls, live=self.is_by_hand, static=first)

    def _keep(self, name: str, drawing: figures.Drawing) -> figures.Kept:
        self._n_figures += 1
        kept = figures.Kept.of(drawing, name=name, prefix=self.job, order=self._n_figures)
        kept.save(self.out / FIGURES_FOLDER)
        return kept

    def gate(
        self,
        name: str,
        passed: bool | None,
        *,
        value: Value = None,
        threshold: Value = None,
        detail: str = "",
    ) -> None:
        """Records whether a threshold held; `passed=None` says it could not be judged, with `detail` as the reason."""
        verdict = None if passed is None else bool(passed)
        values: dict[str, Value] = {
            "passed": verdict,
            "value": plain("value", value),
            "threshold": plain("threshold", threshold),
            "detail": detail,
        }
        self.gates.append({"name": name, **values})
        if verdict is None:
            self.missing("gate", name, detail or "could not be judged")
            return
        print(
            f"gate {name}: {'passed' if verdict else 'FAILED'} (value {value}, threshold {threshold}) {detail}".rstrip()
        )
        self.write("gate", name, values)

    def say(self, text: str) -> None:
        """Prints a milestone and passes it to the progress line of the night."""
        print(text, flush=True)
        event = {"event": "say", "job": self.job, "text": text, "at": utc_now()}
        with (self.out / PROGRESS_FILE).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(event) + "\n")

    def explain(self, sentence: str) -> None:
        """Keeps a sentence that explains a result: the notebook and the page show it, the terminal does not."""
        self.write(SENTENCE, f"sentence {self._n_sentences + 1}", {"text": sentence})
        self._n_sentences += 1
        figures.show(f"<p>{html.escape(sentence)}</p>")

    def finish(self) -> None:
        """Writes the outcome and prints one line. A failed gate does not raise."""
        failed = [gate["name"] for gate in self.gates if gate["passed"] is False]
        unjudged = [gate["name"] for gate in self.gates if gate["passed"] is None]
        outcome = {"passed": not failed and not unjudged, "gates": self.gates, "n_rows": self._writer.n_rows}
        text = json.dumps(outcome, indent=2, default=str)
        (self.out / OUTCOME_FILE).write_text(text + "\n", encoding="utf-8")
        self._writer.close()
        if failed or unjudged:
            words = [f"failed: {name}" for name in failed] + [f"not judged: {name}" for name in unjudged]
            print(f"{self.notebook}: {'; '.join(words)}")
        else:
            print(f"{self.notebook}: {len(self.gates)} gates passed, {outcome['n_rows']} rows written")
