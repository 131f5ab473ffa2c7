"""Libraries that the kernels are timed beside: by card, then by name, a function from a case and its inputs to a call.

A card that is not here has no library that does the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from eagle3core.kernels import Case, Tensors
from lab.probes.kernels.attention_peers import ATTENTION

Peer = Callable[[Case, Tensors], Callable[[], Any]]
_EPS = 1e-5  # of the norm; no time depends on it


def peers_of(op: str) -> Mapping[str, Peer]:
    """The libraries to time beside the card `op`, by name; none for most."""
    return PEERS.get(op, {})


def _linear(case: Case, inputs: Tensors) -> Callable[[], Tensor]:
    return lambda: F.linear(inputs["x"], inputs["w"])


def _argmax(case: Case, inputs: Tensors) -> Callable[[], Tensor]:
    return lambda: inputs["logits"].argmax(dim=-1)


def _rms_norm(case: Case, inputs: Tensors) -> Callable[[], Tensor]:
    x, gain, shape = inputs["x"], inputs["gain"], (case["width"],)
    if not case["adds"]:
        return lambda: F.rms_norm(x, shape, gain, _EPS)
    return lambda: F.rms_norm(x + inputs["residual"], shape, gain, _EPS)


PEERS: Mapping[str, Mapping[str, Peer]] = {
    "argmax": {"torch.argmax": _argmax},
    "attention": ATTENTION,
    "gemm": {"F.linear": _linear},
    "rms_norm": {"F.rms_norm": _rms_norm},
}
