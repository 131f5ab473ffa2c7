"""Small real notebooks and configurations for tests of the lab."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PLACE = 'run_dir: str = ""\njob: str = ""'
START = "from lab.night import experiment\nexp = experiment.start(globals(), notebook='small')"
PASS = "exp.gate('holds', True, value=1, threshold=1)\nexp.finish();"
RAISE = "raise ValueError('the reason it gave')"
FAIL = "exp.gate('breaks', False, value=1, threshold=2)\nexp.finish();"
KILL = "import os, signal\nexp.write('small', 'before the end', {'n': 1})\nos.kill(os.getpid(), signal.SIGKILL)"


def write_notebook(path: Path, *cells: str, parameters: str = "") -> Path:
    """A notebook whose first cell, tagged `parameters`, holds the two place parameters and `parameters`."""
    sources = [f"{PLACE}\n{parameters}".strip(), *cells]
    content = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {},
        "cells": [
            {
                "cell_type": "code",
                "id": f"cell-{index}",
                "metadata": {"tags": ["parameters"]} if index == 0 else {},
                "outputs": [],
                "execution_count": None,
                "source": source,
            }
            for index, source in enumerate(sources)
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def write_config(path: Path, *notebooks: Path, extra: str = "", **options: Any) -> Path:
    """A configuration with one job a notebook."""
    lines = [
        f'[[job]]\nnotebook = "{notebook}"\n' + "".join(f"{k} = {json.dumps(v)}\n" for k, v in options.items())
        for notebook in notebooks
    ]
    path.write_text("\n".join(lines) + extra, encoding="utf-8")
    return path
