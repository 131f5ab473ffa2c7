"""Named tensors of a checkpoint directory, read one at a time.

Safetensors files are mapped, not copied: a tensor takes memory of its own once it is cast or moved, and checks look at
pieces of it. So a model loads in about its own size, and no file is ever in memory beside it.
Every file is checked for existence and byte size before anything is read (docs/requirements.md R-18).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3core.checkpoint.headers import tensor_entries
from eagle3core.checkpoint.pickled import load_pickled
from eagle3core.checkpoint.settings import Settings
from eagle3core.errors import CheckpointError
from eagle3core.geometry import Decision

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Index and single file of each format, the one that is preferred first.
WEIGHT_FILES = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
BUFFERS = "rotary_emb.inv_freq"  # ends the names of what is computed from config.json, and stored by old exports
_AGAIN = "download or export the checkpoint again"
_CHECKED = 1 << 18  # values looked at together: what checking takes beside the tensor


class NamedTensors(ABC):
    """Tensors by name, as one container holds them: checked by their headers, read one at a time.

    Attributes:
        directory: the checkpoint, for messages.
        described_in: the file of its settings.
        decisions: how the container was read where it leaves room.
        of_taps: evidence for the taps it names, and what speaks against them where they are the usual ones.
    """

    described_in = "config.json"
    decisions: tuple[Decision, ...] = ()
    of_taps: tuple[str, str] = ("", "")

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Every stored tensor's name, sorted."""

    @abstractmethod
    def where(self, name: str) -> str:
        """File and name of a tensor, for messages."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The stored tensor's shape, as the file's header says it."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """The tensor as stored, on the CPU.

        Raises:
            CheckpointError: its bytes cannot be decoded.
        """

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor of another shape than the config promises, before any byte of it is read.

        Raises:
            CheckpointError: both shapes.
        """
        if self.shape(name) != shape:
            raise CheckpointError(
                f"{self.where(name)} has shape {list(self.shape(name))}",
                f"{list(shape)}, from {self.directory / self.described_in}",
                f"pair the weights with their own {self.described_in}, or download both again",
            )

    def read_weight(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        *,
        casts: bool = True,
    ) -> Tensor:
        """The tensor, checked and cast.

        Args:
            name: stored name.
            shape: what the config promises.
            dtype: compute dtype; None keeps the stored one.
            device: where the result lives.
            casts: False checks alone and returns the tensor as stored, mapped from its file.

        Raises:
            CheckpointError: wrong shape, a dtype that holds no plain floating-point weights, NaN or infinite values,
                also when they only appear by casting to a narrower range.
        """
        self.check_shape(name, shape)
        stored = self.read(name)
        if stored.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{self.where(name)} has dtype {_short(stored.dtype)}",
                f"one of {', '.join(map(_short, FLOAT_DTYPES))}; quantised weights are not built",
                "export the checkpoint unquantised",
            )
        wanted = dtype or stored.dtype
        require_finite(stored, stored.dtype, f"{self.where(name)} ({_short(stored.dtype)})", _AGAIN)
        if torch.finfo(wanted).max < torch.finfo(stored.dtype).max:
            require_finite(stored, wanted, f"{self.where(name)} cast to {_short(wanted)}", "run in bfloat16 or float32")
        return stored.to(dtype=wanted).to(device=device).contiguous() if casts else stored


class TensorFiles(NamedTensors):
    """The tensors of one directory: safetensors first, else `pytorch_model.bin`; single or sharded.

    Args:
        directory: the checkpoint.

    Raises:
        CheckpointError: no weight file, a missing shard, a truncated or unreadable file.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._pickled: dict[Path, dict[str, Tensor]] = {}
        self._opened: dict[Path, Any] = {}  # a file's header may be long, and is read when it is opened
        self._shape_of: dict[str, tuple[int, ...]] = {}
        self._file_of = self._find()

    @property
    def names(self) -> list[str]:
        """Every stored tensor's name, sorted."""
        return sorted(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def where(self, name: str) -> str:
        """File and name of a tensor, for messages."""
        return f"{self._file_of[name]}: tensor {name}"

    def shape(self, name: str) -> tuple[int, ...]:
        """The stored tensor's shape, as the file's header says it."""
        return self._shape_of[name]

    def read(self, name: str) -> Tensor:
        """The tensor as stored, on the CPU.

        Raises:
            CheckpointError: its bytes cannot be decoded.
        """
        path = self._file_of[name]
        if path.suffix == ".bin":
            return self._pickled[path][name]
        try:
            if path not in self._opened:
                self._opened[path] = safe_open(path, framework="pt", device="cpu")
            tensor: Tensor = self._opened[path].get_tensor(name)
        except (SafetensorError, OSError) as reason:
            raise CheckpointError(
                f"{self.where(name)} cannot be read: {reason}", "a readable tensor", _AGAIN
            ) from reason
        return tensor

    def _find(self) -> dict[str, Path]:
        for index, single in WEIGHT_FILES:
            whole = self.directory / single
            if (self.directory / index).is_file():
                return self._from_index(self.directory / index, whole)
            if whole.is_file():
                self._shape_of = self._shapes(whole)
                return dict.fromkeys(self._shape_of, whole)
        present = sorted(p.name for p in self.directory.iterdir())[:8]
        raise CheckpointError(
            f"{self.directory} holds no weights (found {', '.join(present) or 'nothing'})",
            f"one of {', '.join(name for pair in WEIGHT_FILES for name in pair)}",
            "finish the download; other file names must be renamed to these",
        )

    def _from_index(self, index: Path, whole: Path) -> dict[str, Path]:
        """The shards' tensors; `whole` is the file that holds all of them where there is no index.

        Readers differ where both are there, and drop what an index leaves out: neither is taken in silence.
        """
        weight_map = Settings.read(index).nested("weight_map")
        if weight_map is None:
            raise CheckpointError(f"{index} has no weight_map", "an object of tensor name to file name", _AGAIN)
        file_of = {name: self.directory / _shard(weight_map, name) for name in weight_map.values}
        shards = sorted(set(file_of.values()))
        if whole.is_file() and whole not in shards:
            raise CheckpointError(
                f"{self.directory} holds {whole.name} and the shards of {index.name}: two sets of weights",
                "one of them: some readers take the single file, others the shards",
                "remove the one that is not meant, or finish writing over it",
            )
        for shard in shards:
            promised = [name for name, path in file_of.items() if path == shard]
            if not shard.is_file():
                raise CheckpointError(
                    f"{shard} does not exist, but {index.name} puts {len(promised)} tensors there, first {promised[0]}",
                    "every shard of the index beside it",
                    _AGAIN,
                )
            held = self._shapes(shard)
            absent, more = sorted(set(promised) - set(held)), sorted(set(held) - set(file_of))
            if absent:
                raise CheckpointError(
                    f"{shard} lacks {len(absent)} tensors that {index.name} puts there, first {absent[0]}",
                    "shards and index of one export",
                    _AGAIN,
                )
            if left := [name for name in more if not name.endswith(BUFFERS)]:
                raise CheckpointError(
                    f"{shard} holds {len(left)} tensors that {index.name} does not name, first {left[0]}",
                    "an index of every tensor in its shards: one left out would be taken from elsewhere, or be missed",
                    _AGAIN,
                )
            # Not of all that it holds: a tensor that lies here too is read from the shard that the index names.
            self._shape_of |= {name: held[name] for name in promised}
        return file_of

    def _shapes(self, path: Path) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor in a file."""
        if path.suffix == ".bin":
            self._pickled[path] = load_pickled(path)
            return {name: tuple(tensor.shape) for name, tensor in self._pickled[path].items()}
        return {name: entry.shape for name, entry in tensor_entries(path).items()}


def _shard(weight_map: Settings, name: str) -> str:
    """The file of a tensor: a plain name beside the index.

    Raises:
        CheckpointError: no text, another folder, or another kind of file.
    """
    shard = weight_map.text(name)
    is_plain = shard.isprintable() and not set(shard) & {"/", "\\"} and len(shard.encode(errors="replace")) <= 255
    if not is_plain or not shard.endswith((".safetensors", ".bin")):
        raise weight_map.bad(name, shard, "the name of a .safetensors or .bin file beside the index", _AGAIN)
    return shard


def require_finite(tensor: Tensor, dtype: torch.dtype, where: str, remedy: str) -> None:
    """Refuse values that are not finite in `dtype`."""
    flat = tensor.reshape(-1)
    pieces = (flat[at : at + _CHECKED].to(dtype) for at in range(0, len(flat), _CHECKED))
    if all(bool(torch.isfinite(piece).all()) for piece in pieces):
        return
    tensor = tensor.to(dtype)
    bad = (~torch.isfinite(tensor)).nonzero()
    first = tuple(bad[0].tolist())
    raise CheckpointError(
        f"{where} holds {len(bad)} non-finite values of {tensor.numel()}, first {tensor[first].item()} at index "
        f"{list(first)}",
        "finite values only",
        remedy,
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
