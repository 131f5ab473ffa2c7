"""Tensors of MXFP4 as they are stored, checked before anything is computed with them."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3core.checkpoint.tensors import NamedTensors
from eagle3core.errors import CheckpointError
from eagle3core.kernels.experts.mxfp4 import MOST_SCALE


def read_packed_bytes(files: NamedTensors, name: str, shape: tuple[int, ...]) -> Tensor:
    """Blocks or scales of MXFP4, uint8, as they lie in their file.

    Raises:
        CheckpointError: another shape or dtype, or a scale with which values are no numbers.
    """
    files.check_shape(name, shape)
    stored = files.read(name)
    if stored.dtype != torch.uint8:
        raise CheckpointError(
            f"{files.where(name)} has dtype {str(stored.dtype).removeprefix('torch.')}",
            "uint8, as MXFP4 is stored",
            "download the checkpoint again, or use one of plain weights without quantization_config",
        )
    if name.endswith("_scales") and int(stored.max()) > MOST_SCALE:
        raise CheckpointError(
            f"{files.where(name)} holds the scale {int(stored.max())}",
            f"at most {MOST_SCALE}: values would be beyond what float32 holds, or no numbers",
            "download the checkpoint again",
        )
    return stored
