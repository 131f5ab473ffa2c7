"""The tensors of a planted pair, made one by one, by name.

Target: `lm_head` row f(t) holds the embeddings of the tokens t that lead to it; the layers are random and add up to
less than half the embedding's norm, so logit f(t) stands far above all others whatever the context. Of a target with
experts, `expert_weights` says what is planted beside that.

Draft: its attention looks at itself, since every query head is its key head's scaled copy, so the attention's output is
r(t) = U V norm(e[t]) + a term that takes the component in U of the hidden state away again. What was said about earlier
tokens of a chain is thereby erased, and the head's rows, r(t) for the row proposed after t, see the newest token alone.
fc and the feed-forward are random and small against r(t).

Source: derived here; layout of the head as in EAGLE-3, arXiv 2503.01840, section 3.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from eagle3core.checkpoint import draft_shapes, target_shapes
from eagle3core.geometry import BlockGeometry
from eagle3core.kernels.layer import rms_norm_reference
from lab.errors import ExperimentError
from lab.pairs.planted.expert_weights import (
    code_width,
    random_blocks,
    random_scales,
    router_rows,
    spare_codes,
    with_codes,
)
from lab.pairs.planted.geometries import PlantedGeometry
from lab.pairs.planted.tokens import TokenMap

GAIN_SPREAD = 0.1  # of the norms' gains around 1
LAYER_SHARE = 0.45  # of the embedding's norm: what all layers of the target add, at most about
OWN_SCORE = 10.0  # own key's score is this times |k|^2 / sqrt(D) of unit-variance keys: e^20 and more over 64K others
QUERY_NOISE = 0.1
FUSED_RMS = 0.5  # of fc's output, where r(t) has 1
FORWARD_RMS = 0.12  # of the draft's feed-forward
GATED_RMS = 0.6  # of silu(g) * u for standard normal g and u
LOGIT_SCALE = 60.0  # the right logit of the target, about
CHUNK_ROWS = 4096  # rows of a table made at once: bounds the temporaries of a whole-vocabulary step

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DRAFT = "draft."
_ADDS_TO_STREAM = ("o_proj", "down_proj")


class PlantedWeights(Mapping[str, Tensor]):
    """Every tensor of one half of the pair, made when it is asked for and not kept.

    Args:
        geometry: shapes of the pair.
        tokens: the map to plant.
        seed: of every random number; a tensor depends on the seed and its name alone.
        dtype, device: of the tensors. Bits are those of the device's generator: a CPU and a GPU make different weights
            of the same kind.
        side: "target" (Hugging Face names) or "draft" (SafeAILab names, no `d2t`).
    """

    def __init__(
        self,
        geometry: PlantedGeometry,
        tokens: TokenMap,
        *,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        side: str,
    ) -> None:
        self.geometry, self.tokens, self.seed, self.dtype, self.device = geometry, tokens, seed, dtype, device
        shapes = target_shapes(geometry.target) if side == "target" else draft_shapes(geometry.draft)
        self.shapes = dict(shapes)
        self._is_draft = side == "draft"
        self._table: weakref.ref[Tensor] | None = None
        self._bases: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        return self.tensor(name)

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name, in full.

        Raises:
            ExperimentError: the pair has no such tensor.
        """
        if name not in self.shapes:
            raise ExperimentError(
                f"a planted {'draft' if self._is_draft else 'target'} has no tensor {name!r}",
                ", ".join(list(self.shapes)[:4]) + ", ...",
                "ask for a name of `shapes`",
            )
        made = self._of_draft(name) if self._is_draft else self._of_target(name)
        assert tuple(made.shape) == self.shapes[name], f"{name} was made as {tuple(made.shape)}"
        return made

    def table(self) -> Tensor:
        """The token table `[V, E]` that both halves share, made once while anybody holds it."""
        held = self._table() if self._table is not None else None
        if held is None:
            shape = (self.geometry.target.vocab_size, self.geometry.target.block.hidden_size)
            held = self._normal(_EMBEDDING, shape, 1.0)
            if self.geometry.target.block.experts is not None:
                codes = self._normal("codes", (shape[0], code_width(shape[1])), 1.0)
                with_codes(held, codes, self.tokens.code_holder.to(self.device))
            self._table = weakref.ref(held)
        return held

    def share_table(self, table: Tensor) -> None:
        """Use this token table, made by the other half."""
        self._table = weakref.ref(table)

    # -- target

    def _of_target(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if name == _EMBEDDING:
            return self.table()
        if name == _HEAD:
            return self._target_head()
        if name.endswith("norm.weight"):
            return self._gain(name, shape)
        made = self._of_experts(name, shape)
        if made is not None:
            return made
        if name.endswith(("router.weight", "mlp.gate.weight")):
            return router_rows(self._normal(name, shape, 1.0))
        spread = self._depth(name) / math.sqrt(shape[1])
        return self._sparing(name, self._normal(name, shape, spread))

    def _depth(self, name: str) -> float:
        """GPT-2's rule: what enters the stream shrinks with the root of how many add to it (two a layer)."""
        adds = any(part in name for part in _ADDS_TO_STREAM)
        return LAYER_SHARE / math.sqrt(2 * self.geometry.target.n_layers) if adds else 1.0

    def _of_experts(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Biases, sinks and what has 4 bits; None of other tensors."""
        if name.endswith("router.bias"):  # what is added to logits would make them depend on the context's length
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        if name.endswith("sinks"):
            return self._normal(name, shape, 1.0)
        if name.endswith("bias"):
            return self._sparing(name, self._normal(name, shape, 0.1 * LAYER_SHARE * self._depth(name)))
        if name.endswith("_blocks"):
            return self._sparing(name, random_blocks(shape, self._random(name)))
        if name.endswith("_scales"):
            reads = 32 * shape[-1]
            return random_scales(shape, self._depth(name) / math.sqrt(reads), self._random(name))
        return None

    def _sparing(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor, without what it would add to codes."""
        block = self.geometry.target.block
        if block.experts is None or not any(part in name for part in _ADDS_TO_STREAM):
            return tensor
        return spare_codes(tensor, 1 if "experts.down_proj" in name else 0, code_width(block.hidden_size))

    def _target_head(self) -> Tensor:
        """Rows of tokens with predecessors hold their embeddings; the others are random, equally long."""
        table, hidden = self.table(), self.geometry.target.block.hidden_size
        predecessors = self.tokens.predecessors.to(self.device)
        scale = LOGIT_SCALE / hidden
        # The dense noise, and random rows as long as the others where nothing is planted.
        head = self._normal(_HEAD, self.shapes[_HEAD], scale * math.sqrt(predecessors.shape[1]))
        rows = self.tokens.draft_to_target.to(self.device)
        for start in range(0, len(rows), CHUNK_ROWS):
            part, before = rows[start : start + CHUNK_ROWS], predecessors[start : start + CHUNK_ROWS]
            planted = 0.05 * head[part].float()
            for column in before.T:
                planted += scale * table[column.clamp_min(0)].float() * (column >= 0)[:, None]
            head[part] = planted.to(self.dtype)
        return head

    # -- draft

    def _of_draft(self, name: str) -> Tensor:
        shape, short = self.shapes[name], name.removeprefix("midlayer.").removesuffix(".weight")
        if name == "lm_head.weight":
            return self._draft_head()
        if name.endswith("norm.weight"):
            return self._gain(name, shape)
        if short == "self_attn.k_proj":
            return self._normal(name, shape, OWN_SCORE**0.25 / math.sqrt(shape[1]))
        if short == "self_attn.q_proj":
            return self._queries(name)
        if short == "self_attn.v_proj":
            return self._values(name)
        if short == "self_attn.o_proj":
            return self._outputs(name)
        scale = {"fc": FUSED_RMS, "mlp.down_proj": FORWARD_RMS / GATED_RMS}.get(short, 1.0)
        return self._normal(name, shape, scale / math.sqrt(shape[1]))

    @property
    def _block(self) -> BlockGeometry:
        return self.geometry.draft.block

    @property
    def _stretch(self) -> float:
        """|r(t)| over |V norm(e)|: brings r(t) to the norm of an embedding."""
        return math.sqrt(self._block.hidden_size / self.geometry.value_width)

    def _queries(self, name: str) -> Tensor:
        """Every query head: its key head's rows, scaled, with a little noise."""
        block = self._block
        keys = self.tensor("midlayer.self_attn.k_proj.weight").view(block.n_kv_heads, block.head_dim, -1)
        queries = self._normal(name, self.shapes[name], QUERY_NOISE / math.sqrt(self.shapes[name][1]))
        per_group = queries.view(block.n_kv_heads, -1, block.head_dim, keys.shape[-1])
        per_group += OWN_SCORE**0.5 * keys[:, None]
        return queries

    def _values(self, name: str) -> Tensor:
        """Orthonormal readings of the embedding, beside what takes the hidden state's component in U away."""
        block, width = self._block, self.geometry.value_width
        # A typical hidden state: r(t), what fc or the first level left outside U, and the feed-forward's part.
        typical_rms = math.sqrt(1 + FUSED_RMS**2 * (1 - width / block.hidden_size) + 2 * FORWARD_RMS**2)
        gains = self.tensor("midlayer.hidden_norm.weight").float()
        erase = -typical_rms / self._stretch * self._basis("out").T / gains
        values = torch.cat([self._basis("in").T, erase], dim=1)
        values += self._normal(name, self.shapes[name], 0.05 / math.sqrt(self.shapes[name][1])).float()
        return values.to(self.dtype)

    def _outputs(self, name: str) -> Tensor:
        """U, shared out over the query heads of a group with noise that adds up to nothing over the group."""
        block = self._block
        n_group = block.n_heads // block.n_kv_heads
        noise = self._normal(name, self.shapes[name], 0.3 * self._stretch / n_group / math.sqrt(block.hidden_size))
        per_group = noise.float().view(block.hidden_size, block.n_kv_heads, n_group, block.head_dim)
        basis = self._basis("out").view(block.hidden_size, block.n_kv_heads, 1, block.head_dim)
        mixed = per_group - per_group.mean(dim=2, keepdim=True) + self._stretch / n_group * basis
        return mixed.reshape(self.shapes[name]).to(self.dtype)

    def _draft_head(self) -> Tensor:
        """Row `proposed[t]` is r(t), of unit-variance inputs' length 60."""
        block, table = self._block, self.table()
        gains = self.tensor("midlayer.input_layernorm.weight")
        ids, rows = self.tokens.draft_to_target.to(self.device), self.tokens.proposed.to(self.device)
        into, out = self._basis("in"), self._basis("out")
        head = torch.empty(self.shapes["lm_head.weight"], dtype=self.dtype, device=self.device)
        scale = LOGIT_SCALE / block.hidden_size * self._stretch
        for start in range(0, len(ids), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            embedded = rms_norm_reference(table[ids[part]], gains, block.rms_norm_eps).float()
            head[rows[part]] = (scale * (embedded @ into) @ out.T).to(self.dtype)
        return head

    def _basis(self, name: str) -> Tensor:
        """`[E, K * D]` fp32 orthonormal columns."""
        if name not in self._bases:
            shape = (self._block.hidden_size, self.geometry.value_width)
            random = torch.randn(shape, generator=self._random(f"basis.{name}"), device=self.device)
            self._bases[name] = torch.linalg.qr(random).Q
        return self._bases[name]

    # -- random numbers

    def _gain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._normal(name, shape, GAIN_SPREAD).add_(1.0)

    def _normal(self, name: str, shape: tuple[int, ...], spread: float) -> Tensor:
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        return made.normal_(0.0, spread, generator=self._random(name))

    def _random(self, name: str) -> torch.Generator:
        # The two halves have tensors of the same name, which must differ; the table is the only one they share.
        side = _DRAFT if self._is_draft and name != _EMBEDDING else ""
        digest = hashlib.sha256(f"{self.seed}:{side}{name}".encode()).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7], "big"))
