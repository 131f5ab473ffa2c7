"""Draft decisions where ordinary prompts do not lead: every chain level, long prompts, and slots that are filled again.

A bug that only shows there leaves acceptance over ordinary prompts as it is, or raises it. So prompts of very unequal
lengths, one of them of more than one prefill chunk, are continued a few tokens at the greatest depth, more of them than
there are slots; and every draft decision is made again by Hugging Face's modules. Ranks are judged, not a length.
"""

from __future__ import annotations

from pathlib import Path

from lab.acceptance.measure import measure_acceptance
from lab.acceptance.reference import ReferenceReport, check_acceptance
from lab.pairs.prompts import prompts_from_ids
from lab.parity.inputs import stage_prompt_ids
from lab.parity.recording import SLOTS

N_PROMPTS, MOST_TOKENS = 5, 1024


def check_uneven(
    target: str | Path,
    draft: str | Path,
    prompts: str = "",
    k: int = 8,
    *,
    max_new_tokens: int = 64,
    dtype: str = "float32",
    device: str = "auto",
    fault: str | None = None,
    chat_template: str = "",
    norm_output: str = "",
) -> ReferenceReport:
    """Engine against reference on prompts of `lab.parity.inputs.STAGE_LENGTHS` at depth `k`.

    Args:
        target, draft: checkpoint directories.
        prompts: a file whose texts the prompts are made of; empty takes the shipped pair's.
        max_new_tokens: tokens that each prompt is continued by.
        dtype, device: of the engine.
        fault: name of a bug to plant in the engine (`lab.parity.faults`).
        chat_template: as for `lab.pairs.prompts.load_prompt_set`.
        norm_output: as of `PairUnderTest`.

    Raises:
        ExperimentError: as `measure_acceptance`.
    """
    limits = {"n_prompts": N_PROMPTS, "max_tokens": MOST_TOKENS}
    ids = stage_prompt_ids(Path(target), prompts, **limits, chat_template=chat_template).ids
    uneven, pair = prompts_from_ids(ids), (target, draft)
    report = measure_acceptance(
        *pair, uneven, (k,), max_new_tokens=max_new_tokens, dtype=dtype, device=device, batch=SLOTS, ignore_eos=True,
        fault=fault, norm_output=norm_output,
    )  # fmt: skip
    return check_acceptance(
        *pair, uneven, report.at(k).responses, k, dtype=dtype, device=device, norm_output=norm_output
    )
