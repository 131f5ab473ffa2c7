"""Options of the server: which pair, where it listens, and the engine's settings under the engine's own names."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from lab.errors import ExperimentError
from lab.options.fields import Options, option
from lab.options.trees import DynamicSize, check_choices, read_dynamic
from lab.options.values import MOST_DRAFTS, CacheName, DeviceName, TargetWeightsName, WeightsName, of_text

ServeDtypeName = Literal["auto", "float64", "float32", "bfloat16", "float16"]
MethodName = Literal["eagle3", "eagle", "draft_target", "ngram", "suffix"]
HEAD_NAMES, LOOKUP_NAMES = ("eagle3", "eagle"), ("ngram", "suffix")
MOST_MIB = 1024
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class ServeOptions(Options):
    """Answer OpenAI's completions and chats over HTTP, by one engine; Ctrl-C or SIGTERM ends it.

    Nothing is asked of a client but that it reaches the address: keep it on this machine, or behind what checks.
    """

    target: str = option("", "directory of the target; default: the shipped pair", metavar="DIR")
    draft: str = option("", "directory of its draft; without one decoding is plain", metavar="DIR")
    host: str = option("127.0.0.1", "address to listen at")
    port: int = option(8000, "0 takes one that is free, and says which", ge=0, le=65535)
    name: str = option("", "of the model, as clients write it; default: the target's folder")
    method: MethodName = option(
        "eagle3", "a head (eagle: of EAGLE-1 and 2), a small model (draft_target), or a look-up without a draft"
    )
    spec_k: int = option(3, "drafts a step, 0 is plain decoding", ge=0, le=MOST_DRAFTS)
    choices: Annotated[str, AfterValidator(check_choices)] = option(
        "", "a fixed tree in place of --spec-k: a published name, or a file of choices", metavar="NAME|FILE"
    )
    dynamic: Annotated[DynamicSize | None, of_text(read_dynamic)] = option(
        None, "a dynamic tree in place of --spec-k", metavar="NODES/DEPTH/TOP_K",
        allowed="NODES/DEPTH/TOP_K, e.g. 60/7/10",
    )  # fmt: skip
    draft_weights: WeightsName = option("as_stored", "of the draft's maps; fp8 drafts faster, and a little otherwise")
    cache_dtype: CacheName = option("as_computed", "of the target's keys and values; fp8 takes half the bytes")
    draft_cache_dtype: CacheName = option("as_computed", "of the draft's keys and values")
    target_weights: TargetWeightsName = option("as_stored", "of the target's maps: fp8 quantises what is not yet")
    session_len: int = option(2048, "tokens of a prompt with its answer", ge=2)
    max_batch_size: int = option(8, "slots: requests decoded together", ge=1)
    max_waiting: int = option(256, "requests that may wait for a slot; the next are answered 429", ge=0)
    max_body_mib: int = option(4, "longest body of a request", ge=1, le=MOST_MIB)
    block_size: int = option(64, "tokens of a cache block", ge=1)
    prefill_chunk: int = option(512, "tokens of a prompt that one pass reads", ge=1)
    prefill_share: Share = option(0.5, "share of the work that reading prompts may take", allowed="above 0, up to 1")
    cache_max_entry_count: Share = option(
        0.75, "share of the free memory that the caches may take", allowed="above 0, up to 1"
    )
    cache_blocks: Annotated[int, Field(ge=1)] | None = option(
        None, "of both caches; default: every slot's longest session, or what fits", metavar="N",
        allowed="a whole number of at least 1",
    )  # fmt: skip
    channels: bool = option(
        True, "answers of a target that writes channels (gpt-oss) are taken apart; --no-channels gives them as text"
    )
    prefix_cache: bool = option(False, "keep full blocks of ended requests, and read no token in them again")
    dtype: ServeDtypeName = option("auto", "of weights and cache; auto: the checkpoint's")
    device: DeviceName = option("auto", "where it runs")

    @model_validator(mode="after")
    def _is_one_way_of_drafting(self) -> Self:
        if self.choices and self.dynamic is not None:
            raise ExperimentError("both --choices and --dynamic", "one of the two", "leave one of them out")
        if self.draft and not self.target:
            raise ExperimentError("--draft without --target", "both, --target alone, or neither", "name the target")
        if self.method not in HEAD_NAMES and (self.choices or self.dynamic is not None):
            raise ExperimentError(
                f"--method {self.method} with a tree", "a chain of --spec-k tokens", "leave --choices and --dynamic out"
            )
        lacks_draft = self.method in ("eagle", "draft_target") and not self.draft
        if lacks_draft or (self.method in LOOKUP_NAMES and self.draft):
            raise ExperimentError(
                f"--method {self.method} {'with' if self.draft else 'without'} --draft",
                "a draft for eagle and draft_target, none for a look-up", "correct --method or --draft",
            )  # fmt: skip
        if self.target and not self.draft and (self.choices or self.dynamic is not None):
            raise ExperimentError("a tree without --draft", "trees that a draft grows", "name the draft's directory")
        return self
