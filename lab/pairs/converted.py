"""`eagle3lab convert`: a draft head from one published format to another."""

from __future__ import annotations

import torch

from eagle3core.checkpoint import FEATURES, convert_draft, described
from lab.errors import EXIT_PASSED, ExperimentError
from lab.options.exchange import ConvertOptions


def run(options: ConvertOptions) -> int:
    """Converts, and says what was decided and where each tensor went.

    Raises:
        ExperimentError: a name after --drop that is no feature's.
    """
    unknown = [name for name in options.drop if name not in FEATURES]
    if unknown:
        raise ExperimentError(f"--drop names {unknown[0]!r}", ", ".join(FEATURES), "name what the refusal lists")
    dtype = None if options.dtype == "keep" else getattr(torch, options.dtype)
    conversion = convert_draft(
        options.source, options.out, options.to, target=options.target or None, dtype=dtype, drop=options.drop,
        norm_output=options.norm_output,
    )  # fmt: skip
    print("\n".join(described(conversion)))
    print(f"wrote {conversion.out}, read back and equal")
    return EXIT_PASSED
