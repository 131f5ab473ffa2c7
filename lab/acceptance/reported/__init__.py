"""Acceptance that other systems report, as rows beside ours: `eagle3lab import`.

`forms` knows what vLLM, SGLang and TensorRT-LLM write and pools it, `files` finds it in a file, `positions` compares
counts of two systems position by position, `command` writes rows and holds them against ours. A further form is one
more reader in `forms.READERS`. Only `lab.cli` and tests import this.
"""
