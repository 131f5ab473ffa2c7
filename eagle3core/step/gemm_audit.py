"""The matrix products of an engine's programs by tag: shapes to tune, and how many of them were tuned.

Found in the programs once they are built, so that nothing is counted inside a step. With the environment variable
EAGLE3_GEMM_SHAPE_LOG the shapes are added to that file whenever an engine is made, for `eagle3lab sweep gemm`.
Source: docs/requirements.md R-99, R-102, R-104.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from eagle3core.errors import ConfigError
from eagle3core.kernels import tuned
from eagle3core.kernels.card import Launch
from eagle3core.kernels.gemm.fp8.tiling import fp8_key, of_fp8_key
from eagle3core.step.program import Program, Stage

log = logging.getLogger("eagle3core")

SHAPE_LOG_VARIABLE = "EAGLE3_GEMM_SHAPE_LOG"
SCHEMA = 1

# By the model of a stage and the epilogue of its product; a residual's stage says which of two it is.
_TAGS = {
    "target": {"qkv": "BASE_QKV", "swiglu": "BASE_FFN_GATE_UP", "head": "BASE_LM_HEAD"},
    "draft": {
        "store": "EAGLE3_FC", "qkv": "EAGLE3_QKV", "swiglu": "EAGLE3_FFN_GATE_UP", "head": "EAGLE3_LM_HEAD",
    },
}  # fmt: skip
_RESIDUALS = {"attn": "O", "mlp": "FFN_DOWN"}
_SMALL = "_SMALLVOC"  # of a draft's head that knows fewer tokens than the target's


@dataclass(frozen=True)
class Product:
    """One matrix product of a program.

    Attributes:
        tag: which map of which model, e.g. "EAGLE3_FFN_GATE_UP".
        m, n, k: rows of x, rows of W, columns of both. layout: of W, "packed" or "rows".
        dtype: of x, as tuned files name it: "bf16_fp8" where W is in e4m3, "bf16_fp8_blocks" with scales of blocks.
        kind, norm, bias, q_heads, kv_heads, head_dim, block: its epilogue, as a case of the GEMM card has it.
    """

    tag: str
    m: int
    n: int
    k: int
    dtype: str
    layout: str
    kind: str
    norm: bool = False
    bias: bool = False
    q_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    block: int = 0

    @property
    def text(self) -> str:
        """For errors."""
        return f"{self.tag} {self.m}x{self.n}x{self.k} {self.dtype} {self.layout}"

    @property
    def key(self) -> tuned.GemmKey:
        """What its tiling is tuned for."""
        return tuned.GemmKey(self.dtype, tuned.rows_regime(self.m), self.n, self.k, self.layout == "packed")

    @property
    def case(self) -> dict[str, Any]:
        """The case of the GEMM card that times it."""
        columns = self.n // 2 if self.kind == "swiglu" else self.n
        dtype, fp8 = of_fp8_key(self.dtype)
        made = {"kind": self.kind, "m": self.m, "k": self.k, "dtype": dtype, "packed": self.layout == "packed"}
        made |= {"fp8": fp8} if fp8 else {}
        made |= {"norm": True} if self.norm else {}
        made |= {"bias": True} if self.bias else {}
        if self.kind != "qkv":
            return {**made, "n": columns}
        heads = {name: getattr(self, name) for name in ("q_heads", "kv_heads", "head_dim", "block")}
        return {**made, **heads}


@dataclass(frozen=True)
class GemmAudit:
    """The products of an engine.

    Attributes:
        counts: launches of each in all programs.
        tuned: those whose tiling came from a tuned file.
        is_required: whether this machine's kind of GPU has a tuned file, so that it should know every product.
    """

    counts: Mapping[Product, int]
    tuned: frozenset[Product]
    is_required: bool

    @property
    def hits(self) -> int:
        """Launches that a tuned file knows."""
        return sum(n for product, n in self.counts.items() if product in self.tuned)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def misses(self) -> list[Product]:
        """Products that the file should know and does not; none where there is no file."""
        return [product for product in self.counts if product not in self.tuned] if self.is_required else []

    @property
    def untuned_words(self) -> str:
        """That some products run by guessed tilings, for people; empty where none does, or no file is there."""
        if not self.misses:
            return ""
        names = ", ".join(sorted({product.tag for product in self.misses}))
        share = f"{len(self.misses)} of {len(self.counts)} matrix products"
        return f"{share} are not in the tuned file and run by the rule's tilings: {names}"

    def by_tag(self) -> dict[str, tuple[int, int]]:
        """(hits, launches) of every tag."""
        total, hits = Counter[str](), Counter[str]()
        for product, n in self.counts.items():
            total[product.tag] += n
            hits[product.tag] += n * (product in self.tuned)
        return {tag: (hits[tag], total[tag]) for tag in sorted(total)}


def audit(arch: str | None, programs: Sequence[Program]) -> GemmAudit:
    """The products of an engine's programs; added to the shape log if one is asked for; none without kernels.

    Those that a tuned file should know and does not are told in the log.
    """
    if arch is None:
        return GemmAudit({}, frozenset(), is_required=False)
    counts = Counter(product for program in programs for product in products_of(program))
    counts = _with_small_heads(counts)
    known = frozenset(product for product in counts if tuned.find(arch, "gemm", product.key) is not None)
    required = tuned.gpu_kind(arch) is not None and tuned.active(arch) is not None
    shape_log = os.environ.get(SHAPE_LOG_VARIABLE)
    if shape_log:
        write_shapes(Path(shape_log), counts)
    found = GemmAudit(counts, known, required)
    if found.untuned_words:
        log.warning("[EAGLE] %s", found.untuned_words)
    return found


def products_of(program: Program) -> Iterator[Product]:
    """Every matrix product of a program, in order."""
    for stage in program:
        for launch in stage.launches:
            if "epilogue" in launch.variant.constants:
                yield _product(stage, launch)


def _product(stage: Stage, launch: Launch) -> Product:
    constants = launch.variant.constants
    epilogue = constants["epilogue"]
    given = launch.operands
    model = stage.name.partition(".")[0]
    known = _TAGS.get(model, {})
    if epilogue.kind == "residual":
        family = "BASE" if model == "target" else "EAGLE3"
        tag = f"{family}_{_RESIDUALS.get(stage.name.rpartition('.')[2], 'RESIDUAL')}"
    else:
        # Where heads are normed before rotation, the map of q, k and v only stores.
        is_stored = epilogue.kind == "store" and stage.name.rpartition(".")[2] in ("attn", "qkv")
        tag = known.get("qkv" if is_stored else epilogue.kind, f"{stage.name}.{epilogue.kind}")
    is_qkv = epilogue.kind == "qkv"
    dtype = constants["dtype"]
    if constants.get("fp8"):
        dtype = fp8_key(dtype, bool(constants.get("blocks")))
    return Product(
        tag, given["rows"], 16 * given["tiles"], given["k"], dtype,
        "packed" if constants.get("packed", True) else "rows", epilogue.kind, epilogue.quads > 0, epilogue.has_bias,
        given["q_heads"] if is_qkv else 0, given["kv_heads"] if is_qkv else 0, epilogue.head_dim, epilogue.block,
    )  # fmt: skip


def _with_small_heads(counts: Counter[Product]) -> Counter[Product]:
    """Heads of drafts that know fewer tokens than the target, tagged so."""
    base = max((product.n for product in counts if product.tag == "BASE_LM_HEAD"), default=0)
    made: Counter[Product] = Counter()
    for product, n in counts.items():
        if product.tag == "EAGLE3_LM_HEAD" and product.n < base:
            product = Product(**{**asdict(product), "tag": product.tag + _SMALL})
        made[product] += n
    return made


# ---- the shape log


def write_shapes(path: Path, counts: Mapping[Product, int]) -> None:
    """Adds counts to a shape log, which is made if it is not there."""
    together = Counter(read_shapes(path) if path.exists() else {})
    together.update(counts)
    rows = [{**asdict(product), "count": n} for product, n in sorted(together.items(), key=lambda one: str(one[0]))]
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(json.dumps({"schema": SCHEMA, "shapes": rows}, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def read_shapes(path: Path) -> dict[Product, int]:
    """Products and their counts in a shape log.

    Raises:
        ConfigError: it is none, or cannot be read.
    """
    names = {one.name for one in fields(Product)}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {
            Product(**{name: value for name, value in row.items() if name in names}): int(row["count"])
            for row in content["shapes"]
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path.name} holds no shapes of products: {type(error).__name__}: {error}",
            "a shape log that an engine wrote",
            f"remove it, or set {SHAPE_LOG_VARIABLE} to another path when engines are made",
        ) from error
