"""Options of `eagle3lab inspect bits`: two ways to decode the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from lab.options.fields import Options, option
from lab.options.values import DeviceName, refused


def _svg(value: Path) -> Path:
    if value.suffix != ".svg":
        raise refused(f"{value.name!r}", "a name that ends in .svg")
    return value


class InspectBitsOptions(Options):
    """Where the bits of two runs part: the first position, stage and layer, or that none do. Exit 1: some do."""

    one: str = option("plain", "what the first run drafts: plain, chain-K, choices, dynamic-NODES/DEPTH/TOP_K, or a "
                      "file that --save wrote", metavar="SHAPE|FILE")  # fmt: skip
    other: str = option("chain-3", "the same of the second", metavar="SHAPE|FILE")
    one_batch: int = option(1, "requests that the first run decodes together", ge=1, le=64)
    other_batch: int = option(1, "the same of the second", ge=1, le=64)
    one_chunk: int = option(512, "tokens of a prompt that the first run reads at once", ge=8, le=4096)
    other_chunk: int = option(512, "the same of the second", ge=8, le=4096)
    target: str = option("", "directory of the target; default: the shipped pair", metavar="DIR")
    draft: str = option("", "directory of the draft; default: the shipped pair", metavar="DIR")
    prompts: str = option("", "prompt file (JSON lines); default: the shipped pair's", metavar="FILE")
    chat_template: str = option("", "Jinja, or a file of it, for a target whose tokenizer has none", metavar="FILE")
    n_prompts: int = option(4, "how many of them", ge=1)
    max_prompt_tokens: int = option(256, "longer prompts keep their last ones", ge=2)
    max_new_tokens: int = option(32, "tokens a prompt", ge=2)
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = option("float32", "of both runs")
    device: DeviceName = option("auto", "where they run")
    save: Path | None = option(None, "write the second run's hashes, for another commit or machine", metavar="FILE")
    figure: Annotated[Path | None, AfterValidator(lambda v: v and _svg(v))] = option(
        None, "draw the prompt that parts first, or the first one", metavar="NAME.svg"
    )
