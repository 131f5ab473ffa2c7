"""A notebook's parameters, read from its source without running it, and checked before any kernel starts.

papermill itself only warns about a name it does not know and goes on; a sweep then runs for hours with a width nobody
read. So names and types are checked here, by `ast`, against the one cell tagged `parameters`.
"""

from __future__ import annotations

import ast
import difflib
import io
import json
import math
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.errors import ExperimentError
from lab.night.domains import domain_of
from lab.rows import environment
from lab.rows.stored.files import MOST_LETTERS_OF_A_FOLDER, decoded, read_json
from lab.rows.stored.forms import NotebookForm, fault_of
from lab.rows.values import shortened

TAG = "parameters"
_TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool, "list": list, "dict": dict}
_LINE = f"one `name: type = literal  # unit` a line, type one of {', '.join(_TYPES)}"


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter: its name, the name of its JSON type, its default, and the comment beside it (unit, meaning)."""

    name: str
    type: str
    default: Any
    help: str


def notebooks_folder() -> Path:
    """Where the notebooks lie: in the checkout, else inside the installed package."""
    root = environment.checkout()
    return root / "notebooks" if root else Path(__file__).resolve().parents[1] / "_notebooks"


def find_notebook(name: str) -> Path:
    """The source of a notebook, given as a path or by its name with or without `.ipynb`.

    Raises:
        ExperimentError: there is none; the message lists those there are.
    """
    if len(name) > MOST_LETTERS_OF_A_FOLDER * 10 or "\0" in name or len(Path(name).name) > MOST_LETTERS_OF_A_FOLDER:
        raise ExperimentError(f"a notebook called {shortened(name)}", "a name, or a path", "shorten it")
    as_path = Path(name)
    if as_path.suffix == ".ipynb" and as_path.is_file():
        return as_path
    folder = notebooks_folder()
    path = folder / f"{name.removesuffix('.ipynb')}.ipynb"
    if path.is_file():
        return path
    known = sorted(found.stem for found in folder.glob("*.ipynb"))
    raise ExperimentError(
        f"no notebook {name!r}{_closest(name, known)}",
        ", ".join(known) or "none is installed",
        "name one of these, or give the path of an .ipynb file",
    )


def read_notebook(path: Path) -> dict[str, Any]:
    """The notebook's JSON.

    Raises:
        ExperimentError: the file is absent, not JSON, or not a version 4 notebook.
    """
    try:
        content: dict[str, Any] = read_json(path)
    except (OSError, ValueError) as error:
        raise ExperimentError(
            f"{path.name} cannot be read as a notebook: {error}", "a Jupyter notebook (.ipynb)", "check the path"
        ) from error
    why = fault_of(content, NotebookForm)
    if why:
        raise ExperimentError(
            f"{path.name} is not a version 4 notebook: {why}",
            "nbformat 4 with a list of cells",
            "save it again from JupyterLab",
        )
    return content


def read_parameters(notebook_path: Path) -> list[ParameterSpec]:
    """The parameters a notebook declares, in order.

    Raises:
        ExperimentError: not exactly one cell is tagged `parameters`, it is not Python, or a line in it is not
            `name: type = literal`.
    """
    cells = [cell for cell in read_notebook(notebook_path)["cells"] if TAG in cell.get("metadata", {}).get("tags", [])]
    if len(cells) != 1:
        raise ExperimentError(
            f"{notebook_path.name} has {len(cells)} cells tagged {TAG!r}",
            "exactly one",
            "tag the cell with the defaults",
        )
    source = cells[0]["source"]
    text = source if isinstance(source, str) else "".join(source)
    try:
        body, comments = ast.parse(text).body, _comments(text)
    except (SyntaxError, tokenize.TokenError, ValueError, RecursionError) as error:
        raise ExperimentError(
            f"{notebook_path.name}: the cell tagged {TAG!r} is not Python: {error}",
            _LINE,
            "move all else to a later cell",
        ) from error
    return [_spec(node, comments, notebook_path) for node in body if not _is_docstring(node)]


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _comments(text: str) -> dict[int, str]:
    """Trailing comment by line number."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.start[0]: token.string.lstrip("# ").strip() for token in tokens if token.type == tokenize.COMMENT}


def _spec(node: ast.stmt, comments: dict[int, str], path: Path) -> ParameterSpec:
    line = ast.unparse(node)
    try:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            name, default = node.target.id, ast.literal_eval(node.value)
            kind = ast.unparse(node.annotation).partition("[")[0]
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name, default = node.targets[0].id, ast.literal_eval(node.value)
            kind = type(default).__name__
        else:
            raise ValueError("not an assignment of one literal")
        if kind not in _TYPES:
            raise ValueError(f"type {kind}")
        if not _fits(kind, default):
            raise ValueError(f"default {shortened(default)} is not a {kind}")
        decoded(json.dumps(default))  # what JSON has no word for would reach no kernel
    except (ValueError, TypeError, RecursionError) as error:  # of literals as well, such as {[1]: 2}
        raise ExperimentError(
            f"{path.name}: the parameter line {line!r} cannot be used: {error}",
            _LINE,
            "move anything computed to a later cell",
        ) from error
    return ParameterSpec(name, kind, default, comments.get(node.end_lineno or node.lineno, ""))


def _fits(kind: str, value: object) -> bool:
    if kind == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, _TYPES[kind])


def check_parameters(specs: list[ParameterSpec], given: dict[str, Any]) -> dict[str, Any]:
    """Every parameter with its value: the given one where there is one, else the default.

    An int is accepted for a float and becomes one; nothing else is converted.

    Raises:
        ExperimentError: an unknown name (with the closest known one), a value of the wrong type, one that the
            parameter's comment does not allow (`lab.night.domains`), or a negative one.
    """
    known = {spec.name: spec for spec in specs}
    for name, value in given.items():
        if name not in known:
            raise ExperimentError(
                f"unknown parameter {name!r}{_closest(name, list(known))}",
                ", ".join(f"{spec.name}: {spec.type}" for spec in specs) or "this notebook has no parameters",
                "correct the name; nothing was started",
            )
        spec = known[name]
        if not _fits(spec.type, value):
            note = f" ({spec.help})" if spec.help else ""
            raise ExperimentError(
                f"parameter {name!r} is {shortened(value)}, a {type(value).__name__}",
                f"{spec.type}{note}, for example {spec.default!r}",
                "give a value of that type; nothing was started",
            )
        domain = domain_of(spec.help, spec.default)
        if domain is not None and not domain.holds(value):
            raise ExperimentError(
                f"parameter {name!r} is {shortened(value)}{_closest(str(value), list(domain.words))}",
                f"{domain.allowed}, for example {spec.default!r}",
                "give another value; nothing was started",
            )
        if spec.type in ("int", "float") and not 0 <= value < math.inf:
            raise ExperimentError(
                f"parameter {name!r} is {shortened(value)}",
                f"a finite number of at least 0{f' ({spec.help})' if spec.help else ''}, for example {spec.default!r}",
                "give another value; nothing was started",
            )
    resolved = {spec.name: given.get(spec.name, spec.default) for spec in specs}
    return {name: float(value) if known[name].type == "float" else value for name, value in resolved.items()}


def parse_value(spec: ParameterSpec, text: str) -> Any:
    """The value that the command-line text `text` stands for.

    Raises:
        ExperimentError: it is not of the parameter's type.
    """
    if spec.type == "str":
        return text
    try:
        value = decoded(text.lower() if spec.type == "bool" else text)
    except ValueError:
        value = text
    check_parameters([spec], {spec.name: value})
    return value


def _closest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def listing() -> str:
    """The packaged notebooks with their titles, then each with its parameters, for people."""
    paths = sorted(notebooks_folder().glob("*.ipynb"))
    if not paths:
        return "no notebooks are installed"
    wide = max(len(path.stem) for path in paths)
    titles = [f"  {path.stem:{wide}}  {title(path)}" for path in paths]
    blocks = ["\n".join([f"{len(paths)} notebooks; `eagle3lab run NAME -p PARAMETER=VALUE` runs one", *titles])]
    for path in paths:
        lines = [f"{path.stem}: {title(path)}"]
        for spec in read_parameters(path):
            if spec.name not in ("run_dir", "job"):
                lines.append(f"  {spec.name}: {spec.type} = {spec.default!r}{f'  # {spec.help}' if spec.help else ''}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def title(path: Path) -> str:
    """The first heading of a notebook."""
    for cell in read_notebook(path)["cells"]:
        source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
        if cell["cell_type"] == "markdown" and source.startswith("#"):
            return source.splitlines()[0].lstrip("# ").strip()
    return ""
