"""Options of the doctor for draft heads."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lab.options.fields import Options, option
from lab.options.values import Seconds


class DraftDoctorOptions(Options):
    """Say why a draft head accepts as little as it does, and what to change; exit 1 where something is to be mended."""

    draft: Path = option(..., "draft head of that target", flag="", metavar="DIR")
    target: Path = option(..., "target model, Hugging Face layout", metavar="DIR")
    prompts: Path | None = option(None, "prompts, one JSON object a line; default: the shipped pair's", metavar="FILE")
    spec_k: int = option(3, "drafts a step", flag="-k", metavar="K", ge=1, le=8)
    n_prompts: int = option(32, "prompts at most", metavar="N", ge=1, le=1000)
    max_prompt_tokens: int = option(256, "tokens; longer prompts keep their last ones", metavar="N", ge=2)
    max_new_tokens: int = option(64, "tokens a prompt", metavar="N", ge=4)
    fast: bool = option(False, "look at the files alone; run nothing")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where it runs; auto: a GPU, but for small targets")
    fault: str = option("", "bug to plant in the engine, to see the doctor find it", metavar="NAME")
    reference_target: Path | None = option(None, "the target it was trained with, beside one changed", metavar="DIR")
    claimed: float | None = option(None, "acceptance figure given for the head, of any definition", metavar="X", gt=0)
    method: Literal["auto", "eagle3", "eagle"] = option("auto", "of the settings; auto: what the head calls itself")
    norm_output: Literal["feedback", "head"] | None = option(None, "what that key means at the top of a flat file")
    speed_rows: Path | None = option(None, "rows of `eagle3lab speed` of a pair of this size", metavar="FILE.jsonl")
    limit_s: Seconds = option(600.0, "begin no lamp after this many seconds", metavar="S")
    processes: int = option(
        0, "lamps looked at side by side on a CPU; 0: as many as cores and memory allow", metavar="N", ge=0
    )
    out: Path | None = option(None, "append rows to this file", metavar="NAME.jsonl")
