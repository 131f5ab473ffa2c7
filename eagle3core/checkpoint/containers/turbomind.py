"""A head as a TurboMind directory: `config.yaml`, and a file of plain 16-bit values for each tensor.

A file has no header, so what it holds is told by the config alone, and each file's size is checked to the byte
(docs/requirements.md R-16 to R-20). Matrices are stored as the converter writes them: `eagle_fc`, `w_qkv`, `w2` and
`output` transposed, gate, up and the maps called `eagle3.*` as they are. `wo` is never read: that converter makes it
from the target's own layer. Source: the EAGLE-3 converter of a public fork of github.com/InternLM/lmdeploy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3core.checkpoint.settings import Settings
from eagle3core.checkpoint.taps import TAP_KEY
from eagle3core.checkpoint.tensors import NamedTensors
from eagle3core.errors import CheckpointError
from eagle3core.geometry import Decision
from eagle3core.stored_yaml import MOST_BYTES, parse_yaml

SETTINGS_FILE, SECTION, MAP_FILE = "config.yaml", "model_config", "draft_id_to_target_id.weight"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FUSED = "layers.0.attention.w_qkv.weight"
_AGAIN = "convert the head again"
# Keys of `model_config` that say how wide a head is, all needed, and keys of TurboMind's that may stand beside them.
NEEDED = ("hidden_units", "vocab_size", "head_num", "size_per_head", "inter_size")
OPTIONAL = {
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "max_position_embeddings": "max_position_embeddings",
}
CAPTURED, _THIN = "eagle_capture_layers", "eagle_ffn_thin_factor"
_KNOWN = {
    "eagle_mode", "eagle_q_size", "eagle_kv_size", "eagle_qkv_in_dim", "eagle_qkv_in_factor", "eagle_fc_in_dim",
    "eagle_fc_in_factor", "eagle_base_hidden", "eagle_draft_hidden", "eagle_kv_factor", "eagle_num_capture_layers",
    "eagle_weight_dtype", CAPTURED,
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A file: the shape of what it holds, whether it is the transposed one, and the columns that are this tensor's."""

    file: str
    shape: tuple[int, ...]
    transposed: bool = False
    columns: tuple[int, int] | None = None


@dataclass(frozen=True)
class Widths:
    """Sizes of a head: widths of the draft and of its target, number of taps, widths of q and of k, and the rest."""

    hidden: int
    target: int
    taps: int
    query: int
    key: int
    inner: int
    vocab: int
    draft_vocab: int


def stored_files(widths: Widths, *, fused: bool = False) -> dict[str, Stored]:
    """Every file of a head by SafeAILab name; `fused`: q, k and v out of `w_qkv`."""
    hidden, query, key, inner = widths.hidden, widths.query, widths.key, widths.inner
    rows = {"q": (0, query), "k": (query, query + key), "v": (query + key, query + 2 * key)}
    fused_shape = (2 * hidden, query + 2 * key)
    maps = {
        f"midlayer.self_attn.{name}_proj.weight": Stored(FUSED, fused_shape, True, columns)
        if fused
        else Stored(f"eagle3.{name}_proj.weight", (columns[1] - columns[0], 2 * hidden))
        for name, columns in rows.items()
    }
    return {
        "embed_tokens.weight": Stored("tok_embeddings.weight", (widths.vocab, hidden)),
        "fc.weight": Stored("eagle_fc.weight", (widths.taps * widths.target, hidden), True),
        "midlayer.input_layernorm.weight": Stored("layers.0.attention_norm.weight", (hidden,)),
        "midlayer.hidden_norm.weight": Stored("layers.0.hidden_norm.weight", (hidden,)),
        "midlayer.post_attention_layernorm.weight": Stored("layers.0.ffn_norm.weight", (hidden,)),
        **maps,
        "midlayer.self_attn.o_proj.weight": Stored("eagle3.o_proj.weight", (hidden, query)),
        "midlayer.mlp.gate_proj.weight": Stored("layers.0.feed_forward.w1.weight", (inner, hidden)),
        "midlayer.mlp.up_proj.weight": Stored("layers.0.feed_forward.w3.weight", (inner, hidden)),
        "midlayer.mlp.down_proj.weight": Stored("layers.0.feed_forward.w2.weight", (inner, hidden), True),
        "norm.weight": Stored("norm.weight", (hidden,)),
        "lm_head.weight": Stored("output.weight", (hidden, widths.draft_vocab), True),
    }


class TurboMindTensors(NamedTensors):
    """The tensors of one directory under SafeAILab names.

    Raises:
        CheckpointError: a file that is missing or of another size than the config gives it.
    """

    described_in = SETTINGS_FILE

    def __init__(self, directory: Path, widths: Widths, dtype: torch.dtype) -> None:
        super().__init__(directory)
        self._dtype, self._n_map = dtype, widths.draft_vocab
        fused = not (directory / "eagle3.q_proj.weight").is_file()
        self._stored = stored_files(widths, fused=fused)
        for name in ("embed_tokens.weight", "lm_head.weight"):  # without the file, the target's is shared
            if not (directory / self._stored[name].file).is_file():
                del self._stored[name]
        for stored in self._stored.values():
            self._require_size(stored.file, math.prod(stored.shape) * dtype.itemsize)
        if (directory / FUSED).is_file():  # beside the single maps it is not read, but a cut one shows a cut copy
            self._require_size(FUSED, 2 * widths.hidden * (widths.query + 2 * widths.key) * dtype.itemsize)
        self._map = self._map_dtype()

    @property
    def names(self) -> list[str]:
        """As of the base."""
        return sorted([*self._stored, *(["d2t"] if self._map is not None else [])])

    def where(self, name: str) -> str:
        """As of the base."""
        return f"{self.directory / (MAP_FILE if name == 'd2t' else self._stored[name].file)}: tensor {name}"

    def shape(self, name: str) -> tuple[int, ...]:
        """As of the base."""
        if name == "d2t":
            return (self._n_map,)
        stored = self._stored[name]
        shape = stored.shape[::-1] if stored.transposed else stored.shape
        return shape if stored.columns is None else (stored.columns[1] - stored.columns[0], *shape[1:])

    def read(self, name: str) -> Tensor:
        """As of the base."""
        if name == "d2t" and self._map is not None:
            return self._values(MAP_FILE, (self._n_map,), self._map)
        stored = self._stored[name]
        tensor = self._values(stored.file, stored.shape, self._dtype)
        tensor = tensor.t() if stored.transposed else tensor
        return tensor if stored.columns is None else tensor[slice(*stored.columns)]

    def _values(self, file: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        n = math.prod(shape)
        return torch.from_file(str(self.directory / file), shared=False, size=n, dtype=dtype).view(shape)

    def _require_size(self, file: str, n_bytes: int) -> None:
        path = self.directory / file
        if not path.is_file():
            raise CheckpointError(
                f"{path} does not exist",
                f"a file of {n_bytes} bytes, as {SETTINGS_FILE} describes it; attention/wo is not read in the place of "
                "eagle3.o_proj: the converter makes it from the target's own layer",
                _AGAIN,
            )
        if path.stat().st_size != n_bytes:
            raise CheckpointError(
                f"{path} is {path.stat().st_size} bytes long",
                f"{n_bytes} bytes, as {SETTINGS_FILE} describes it",
                _AGAIN,
            )

    def _map_dtype(self) -> torch.dtype | None:
        """Of the map's file: by its size; None where there is none or an empty one."""
        path = self.directory / MAP_FILE
        n_bytes = path.stat().st_size if path.is_file() else 0
        widths = {4 * self._n_map: torch.int32, 8 * self._n_map: torch.int64}
        if n_bytes and n_bytes not in widths:
            raise CheckpointError(
                f"{path} is {n_bytes} bytes long", f"{' or '.join(map(str, widths))} bytes, one offset a row", _AGAIN
            )
        return widths.get(n_bytes) if n_bytes else None


def open_turbomind(directory: Path) -> tuple[Settings, TurboMindTensors]:
    """Config in the published keys, and tensors.

    Raises:
        CheckpointError: no sizes, sizes that contradict each other, or no EAGLE-3 head.
    """
    raw = _read_yaml(directory / SETTINGS_FILE)
    _refuse_unknown(raw)
    widths, heads, head_dim, taps = _widths(raw)
    kind = raw.text("eagle_weight_dtype", "bf16")
    if kind not in DTYPES:
        raise raw.bad("eagle_weight_dtype", kind, "bf16 or fp16", _AGAIN)
    tensors = TurboMindTensors(directory, widths, DTYPES[kind])
    config: dict[str, Any] = {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": widths.hidden, "intermediate_size": widths.inner,
        "num_attention_heads": heads, "num_key_value_heads": widths.key // head_dim, "head_dim": head_dim,
        "num_hidden_layers": 1, "vocab_size": widths.vocab, "draft_vocab_size": widths.draft_vocab,
        "target_hidden_size": widths.target,
    }  # fmt: skip
    config |= {ours: raw.values[theirs] for theirs, ours in OPTIONAL.items() if theirs in raw}
    if taps:
        config |= {TAP_KEY: list(taps), f"{TAP_KEY[:-4]}_convention": "output"}
        tensors.of_taps = (f"{CAPTURED} of {SETTINGS_FILE} numbers outputs", "")
    tensors.decisions = tuple(_doubts(raw, tensors))
    return Settings(config, f"{directory / SETTINGS_FILE} (keys as config.json has them)"), tensors


def _refuse_unknown(raw: Settings) -> None:
    for name, value in raw.values.items():
        if name == _THIN and value == 1:
            continue
        if name.startswith("eagle_") and name not in _KNOWN and value not in (None, False, 0, "", []):
            raise raw.bad(
                name, value, f"a key that is read or only repeats others: {', '.join(sorted(_KNOWN))}",
                "what it means is not known here, and ignoring it might be wrong",
            )  # fmt: skip


def _doubts(raw: Settings, tensors: TurboMindTensors) -> list[Decision]:
    """What such a directory leaves open."""
    said = []
    if "rope_theta" not in raw or "norm_eps" not in raw:
        said.append(
            Decision("rotary base and epsilon", "10000 and 1e-6 where none is said",
                     f"{SETTINGS_FILE} need not say them", "the values that the head was trained with")
        )  # fmt: skip
    if "lm_head.weight" in tensors:
        said.append(
            Decision("head", "output.weight as stored", "it has the size",
                     "rows of the target's head, or random ones: a converter is known that writes these")
        )  # fmt: skip
    return said


def _widths(raw: Settings) -> tuple[Widths, int, int, tuple[int, ...]]:
    """Sizes that fit one another; heads, size of a head, and captured layers."""
    mode = raw.text("eagle_mode", "eagle3" if "eagle_qkv_in_dim" in raw else "")
    if mode != "eagle3":
        raise raw.bad("eagle_mode", mode, "'eagle3': the older layout of EAGLE-1 heads is not built")
    sizes = {key: raw.count(key) for key in NEEDED}
    hidden = raw.count("eagle_draft_hidden", sizes["hidden_units"])
    query, head_dim = sizes["head_num"] * sizes["size_per_head"], sizes["size_per_head"]
    taps = raw.ids(CAPTURED)
    n_taps = len(taps) or 3
    fused = raw.count("eagle_fc_in_dim", n_taps * hidden)
    key = raw.count("eagle_kv_size", query)
    for name, value in (("eagle_q_size", query), ("eagle_qkv_in_dim", 2 * hidden), ("hidden_units", hidden)):
        if raw.count(name, value) != value:
            raise raw.bad(name, raw.values[name], f"{value}, as the other sizes say", _AGAIN)
    if fused % n_taps:
        raise raw.bad("eagle_fc_in_dim", fused, f"a multiple of the {n_taps} captured layers", _AGAIN)
    if key % head_dim or key > query:
        raise raw.bad("eagle_kv_size", key, f"a multiple of size_per_head, {head_dim}, up to {query}", _AGAIN)
    vocab = sizes["vocab_size"]
    drafted = raw.count("draft_vocab_size", vocab)
    if drafted > vocab:
        raise raw.bad("draft_vocab_size", drafted, f"at most vocab_size, {vocab}", _AGAIN)
    widths = Widths(hidden, fused // n_taps, n_taps, query, key, sizes["inter_size"], vocab, drafted)
    return widths, sizes["head_num"], head_dim, taps


def _read_yaml(path: Path) -> Settings:
    """`model_config` of the file.

    Raises:
        CheckpointError: the file is not within the limits of `parse_yaml`, or has no such section.
    """
    with path.open("rb") as file:
        content = parse_yaml(file.read(MOST_BYTES + 1), str(path))
    allowed = f"a mapping with the section {SECTION}"
    section = content.get(SECTION) if isinstance(content, dict) else None
    if not isinstance(section, dict) or not all(isinstance(key, str) for key in section):
        raise CheckpointError(f"{path} holds no section {SECTION}", allowed, _AGAIN)
    return Settings(section, f"{path}: {SECTION}")
