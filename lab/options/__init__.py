"""What may be typed: a pydantic model of options for every command, and the command line made from it.

Promise: nothing here is slow to import (no torch, numba, pandas, matplotlib, transformers, nothing of the engine), so
that `--help` and a refusal come at once. Every room of the lab may import this one; it imports `lab.errors` only. A new
option is a field with `option(...)`; a new command is a model here and a line of the table in `lab/cli.py`.

`fields` says what a field may say of itself, `values` holds the types that several commands share, `reader` turns
models into parsers and refusals; the other files are the models, one file for each kind of work.
"""
