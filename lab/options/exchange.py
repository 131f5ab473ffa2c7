"""Options of what is exchanged with other systems: recorded stages, and acceptance that they reported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, model_validator

from lab.errors import ExperimentError
from lab.options.fields import Options, option
from lab.options.values import MOST_DRAFTS, DeviceName, ExistingFile, of_text, read_counts, refused

FormatName = Literal["safeailab", "specforge", "modelopt", "speculators", "turbomind", "gguf"]
TapDtypeName = Literal["float64", "float32", "bfloat16", "float16"]


def _safetensors(path: Path) -> Path:
    if path.suffix != ".safetensors":
        raise refused(path.name, "a name ending in .safetensors")
    return path


SIZES = "different whole numbers of 2 or more, separated by commas"


def _distinct(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(sizes)) < len(sizes) or min(sizes) < 2:
        raise refused(",".join(map(str, sizes)), SIZES)
    return sizes


class TapsOptions(Options):
    """Write every stage of the engine to a file."""

    target: str = option("", "directory of the target; default: the shipped pair", metavar="DIR")
    draft: str = option("", "directory of the draft; default: the shipped pair", metavar="DIR")
    out: Annotated[Path, AfterValidator(_safetensors)] = option(..., "the file to write", metavar="NAME.safetensors")
    prompts: str = option("", "prompt file (JSON lines); default: the shipped pair's", metavar="FILE")
    chat_template: str = option("", "Jinja, or a file of it, for a target whose tokenizer has none", metavar="FILE")
    n_prompts: int = option(5, "how many of them", ge=1)
    max_prompt_tokens: int = option(1024, "longer prompts are cut", ge=2)
    spec_k: int = option(3, "drafts a step", ge=1, le=MOST_DRAFTS)
    steps: int = option(3, "speculative steps kept", ge=1)
    dtype: TapDtypeName = option("float32", "of the engine")
    device: DeviceName = option("auto", "where it runs")
    capture_layers: tuple[int, ...] = option((), "explicit tap ids", shape="several")
    capture_convention: Literal["input", "output"] | None = option(None, "what those ids number")


class ConvertOptions(Options):
    """Write a draft head in another published format; what that cannot hold is listed, and lost only with --drop."""

    source: Path = option(..., "directory of the head", flag="", metavar="SOURCE")
    out: Path = option(..., "directory to write, which must not exist", flag="", metavar="OUT")
    to: FormatName = option(..., "the format")
    target: str = option("", "directory of its target, for what the head's files leave open", metavar="DIR")
    dtype: Literal["keep", "bfloat16", "float16", "float32"] = option("keep", "of the tensors written")
    drop: tuple[str, ...] = option((), "features that may be lost, as the refusal names them", shape="several")
    norm_output: Literal["feedback", "head"] | None = option(None, "what that key means at the top of a flat file")


class DraftVocabOptions(Options):
    """Cut a draft head to the tokens that occur most often, counted with the target's tokenizer (FR-Spec).

    End tokens and the special tokens of a chat's turns are always kept.
    """

    target: str = option(..., "directory of the target, with its tokenizer", metavar="DIR")
    draft: Path = option(..., "directory of the head, in any layout", metavar="DIR")
    size: Annotated[tuple[int, ...], AfterValidator(_distinct), of_text(read_counts)] = option(
        ..., "tokens to keep; several sizes write a directory each", metavar="N[,N..]", allowed=SIZES
    )
    out: Path = option(..., "directory to write, which must not exist; of several sizes their parent", metavar="DIR")
    text: tuple[str, ...] = option((), "files of plain text; - is the standard input", metavar="FILE", shape="several")
    prompts: tuple[str, ...] = option(
        (), "prompt sets to count; --text then ranks the rest", metavar="FILE", shape="several"
    )
    answers: int = option(0, "count the target's own answers to --prompts instead, so many tokens each", ge=0)
    counts: Path | None = option(None, "write the list of frequencies too", metavar="FILE.json")
    to: FormatName | Literal["auto"] = option("auto", "the format; auto: the first flat one that holds all of the head")
    drop: tuple[str, ...] = option((), "features that may be lost, as the refusal names them", shape="several")
    norm_output: Literal["feedback", "head"] | None = option(None, "what that key means at the top of a flat file")
    chat_template: str = option("", "Jinja, or a file of it, for a target whose tokenizer has none", metavar="FILE")
    dtype: TapDtypeName = option("bfloat16", "of the engine that answers")
    device: DeviceName = option("auto", "where it runs")

    @model_validator(mode="after")
    def _has_something_to_count(self) -> DraftVocabOptions:
        if not self.text and not self.prompts:
            raise ExperimentError(
                "neither --text nor --prompts", "text, prompt sets, or both", "name what is like the text to be drafted"
            )
        if self.answers and not self.prompts:
            raise ExperimentError("--answers without --prompts", "both", "name the prompts that are to be answered")
        return self


class InspectStatesOptions(Options):
    """Hold hidden states that another engine dumped against this engine's on the same tokens. Exit 1: some differ."""

    dumps: tuple[ExistingFile, ...] = option(
        ..., "what vLLM, speculators or SpecForge wrote of a request", flag="", metavar="DUMP", shape="several"
    )
    target: str = option("", "directory of the target; default: the shipped pair's", metavar="DIR")
    draft: str = option("", "directory of the draft whose layers were dumped", metavar="DIR")
    capture_layers: tuple[int, ...] = option((), "ids of the dumped layers, in the dump's order", shape="several")
    capture_convention: Literal["input", "output"] | None = option(
        None, "what those ids number; default: what the system that wrote the dump numbers"
    )
    dtype: Literal["", "float64", "float32", "bfloat16", "float16"] = option(
        "", "that the other engine computed in; default: the dump's"
    )
    device: DeviceName = option("auto", "where this engine runs")
    prompts: str = option("", "prompt file whose ids the dumps must hold", metavar="FILE")
    n_prompts: int = option(64, "how many of its prompts", ge=1)
    repro: Path | None = option(None, "write repro.py for the first layer that diverges", metavar="DIR")
    out: Path | None = option(None, "append rows to this file", metavar="FILE.jsonl")


class ImportOptions(Options):
    """Read the acceptance that another system reported."""

    file: Path = option(..., "what vLLM, SGLang or TensorRT-LLM saved or their /metrics say", flag="", metavar="FILE")
    out: Path | None = option(None, "append rows to this file", metavar="FILE.jsonl")
    name: str = option("", "of the rows (default: the file's)")
    against: ExistingFile | None = option(None, "our rows on the same prompts", metavar="ROWS.jsonl")
    row: str = option("", "which of them, e.g. spec-3 (default: the last with an acceptance)")


class ExportOptions(Options):
    """Write stored rows for other tools: one table, a line a value, or a data set of FlashInfer-Bench."""

    paths: tuple[Path, ...] = option(..., "run folders, or files of rows", flag="", metavar="DIR|FILE", shape="several")
    out: Path = option(..., "the file to write; a folder for flashinfer-bench", metavar="NAME.parquet|NAME.csv|DIR")
    form: Literal["table", "flashinfer-bench"] = option("table", "timed kernels alone in the latter", flag="--as")

    @model_validator(mode="after")
    def _named_for_its_form(self) -> ExportOptions:
        if self.form == "table" and self.out.suffix not in (".parquet", ".csv"):
            raise refused(self.out.name, "--out with a name ending in .parquet or .csv")
        return self


class UpgradeOptions(Options):
    """Carry stored rows of older forms over to today's; shows only, unless --write."""

    paths: tuple[Path, ...] = option(
        ..., "files of rows, or folders of them", flag="", metavar="FILE|DIR", shape="several"
    )
    write: bool = option(False, "write the files; without it nothing is changed")
