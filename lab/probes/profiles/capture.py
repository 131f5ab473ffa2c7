"""A capture of steps, whoever took it: ranges and calls on the host, kernels and copies on the GPU, microseconds."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.errors import ExperimentError
from lab.probes.proofs.gpu_trace import WINDOW, GpuTrace, Span, trace_of

PUBLIC = (
    "EagleModule::forward", "EAGLE_DRAFT_ATTENTION_FMHA", "EAGLE_DRAFT_FFN", "EAGLE_DRAFT_LM_HEAD", "EAGLE_TREE_MASKS",
    "BASE_DECODE_STEP", "EAGLE_ACCEPT", "EAGLE_TAIL_COMMIT", "EAGLE::KVCacheRewind",
)  # fmt: skip
STAGES = ("draft.", "target.", "tree.")  # what names of stages begin with
SINGLE_STAGES = ("accept", "commit", "rewind")
_LAYER = re.compile(r"^target\.\d+\.")


@dataclass(frozen=True)
class Capture:
    """Steps as a tool saw them.

    Attributes:
        tool: "torch", "nsys". ranges: NVTX ranges, in order of begin. ops: operations of torch on the host, outermost.
        trace: annotated steps as windows; calls, kernels and copies.
    """

    tool: str
    ranges: tuple[Span, ...]
    trace: GpuTrace
    ops: tuple[Span, ...] = field(default=())

    @property
    def has_kernels(self) -> bool:
        """Whether a GPU took part."""
        return bool(self.trace.kernels)


def is_range(name: str) -> bool:
    """Whether an annotation is a range of the engine."""
    return name in PUBLIC or name in SINGLE_STAGES or name.startswith(STAGES)


def class_of(name: str) -> str:
    """A range's name with the layers taken together: "target.attn" of "target.3.attn"."""
    return _LAYER.sub("target.", name)


def read_chrome_trace(path: Path) -> Capture:
    """The capture in a trace that `torch.profiler` exported, compressed or not.

    Raises:
        ExperimentError: it is no such trace.
    """
    try:
        text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text(encoding="utf-8")
        events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise ExperimentError(
            f"{path.name} is no trace: {type(error).__name__}: {error}",
            "JSON with traceEvents, as torch.profiler exports it",
            "name a file that `eagle3lab profile` wrote",
        ) from error  # fmt: skip
    return capture_of(events)


def capture_of(events: Sequence[dict[str, Any]]) -> Capture:
    """The capture of `traceEvents`."""
    complete = [event for event in events if event.get("ph") == "X"]
    ranges = [e for e in complete if e.get("cat") == "user_annotation" and is_range(str(e.get("name")))]
    ops = [e for e in complete if e.get("cat") == "cpu_op"]
    return Capture("torch", _spans(ranges), trace_of(complete), _outermost(_spans(ops)))


def _spans(events: Iterable[dict[str, Any]]) -> tuple[Span, ...]:
    made = [Span(str(e["name"]), float(e["ts"]), float(e["ts"]) + float(e.get("dur", 0))) for e in events]
    return tuple(sorted(made, key=lambda span: (span.start, -span.end)))


def _outermost(spans: Sequence[Span]) -> tuple[Span, ...]:
    kept, end = [], float("-inf")
    for span in spans:
        if span.start >= end:
            kept.append(span)
            end = span.end
    return tuple(kept)


def chrome_trace(capture: Capture) -> dict[str, Any]:
    """What Perfetto and Chrome's trace viewer draw: the host's lines above, the GPU's below.

    Categories are those of `torch.profiler`, so that it can be read again. Kernels that overlap lie on lines of their
    own, since Perfetto drops a span that overlaps another of its line without lying inside it. Processes and threads
    begin at 1 and no two threads share a number: 0 is the idle process there, and names go by the thread alone.
    """
    trace, events = capture.trace, []
    lines = [
        (1, "steps", "user_annotation", trace.windows), (1, "NVTX ranges", "user_annotation", capture.ranges),
        (1, "torch operations", "cpu_op", capture.ops), (1, "CUDA calls", "cuda_runtime", trace.calls),
        *((2, "kernels", "kernel", spans) for spans in apart(trace.kernels)),
        *((2, "copies", "gpu_memcpy", spans) for spans in apart(trace.copies)),
    ]  # fmt: skip
    for process, name in ((1, "host"), (2, "GPU")):
        events.append(_named("process_name", process, 100 * process, name))
    for line, (process, name, category, spans) in enumerate(lines):
        thread = 100 * process + line
        if spans:
            events.append(_named("thread_name", process, thread, name))
        for span in spans:
            args = {} if span.correlation is None else {"args": {"correlation": span.correlation}}
            events.append({
                "ph": "X", "cat": category, "name": span.name, "pid": process, "tid": thread, "ts": span.start,
                "dur": span.end - span.start, **args,
            })  # fmt: skip
    return {"displayTimeUnit": "ns", "otherData": {"tool": capture.tool, "step": WINDOW}, "traceEvents": events}


def apart(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans on as few lines as keep those of a line from overlapping, the first line first."""
    lines: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        line = next((line for line in lines if line[-1].end <= span.start), None)
        if line is None:
            lines.append([span])
        else:
            line.append(span)
    return lines


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
