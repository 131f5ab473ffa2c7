"""What a sweep times: one regime for each key of the tuned file, its shapes, and the settings that compete there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eagle3core.errors import ConfigError
from eagle3core.kernels import Card, Case, tuned
from eagle3core.kernels.attention import CARD as ATTENTION
from eagle3core.kernels.attention import Shape, choose_plan, order_of, plan_key, shape_over
from eagle3core.kernels.gemm import CARD as GEMM
from eagle3core.kernels.gemm import tiling_for
from eagle3core.step import Product, read_shapes
from lab.errors import ExperimentError

CARDS: dict[str, Card] = {card.name: card for card in (GEMM, ATTENTION)}
TAIL = 2  # settings beside the default for a regime that is not among the first
SHAPES = 2  # numbers of rows that stand for a regime: those of the most launches
NARROW = 64  # rows up to which a block holds all of a regime's, however many there are
MAKE_SHAPES = "`eagle3lab sweep shapes --out FILE`, or EAGLE3_GEMM_SHAPE_LOG=FILE with any run on a GPU"


@dataclass(frozen=True)
class Regime:
    """One key and what competes for it.

    Attributes:
        cases: shapes of the card that stand for the regime; a setting has to serve all of them.
        settings: complete sets of order-neutral parameters, the present default first.
        tags: which products of an engine these are. count: their launches.
    """

    op: str
    key: tuned.Key
    cases: tuple[Case, ...]
    settings: tuple[tuned.Setting, ...]
    tags: tuple[str, ...] = ()
    count: int = 0

    @property
    def name(self) -> str:
        """Names it in rows."""
        return self.key.text

    @property
    def default(self) -> tuned.Setting:
        """What is used now."""
        return self.settings[0]


def load_shapes(path: Path) -> dict[Product, int]:
    """The products of a shape log.

    Raises:
        ExperimentError: it is none.
    """
    try:
        found = read_shapes(path)
    except ConfigError as error:
        raise ExperimentError(error.what, error.allowed, f"make one: {MAKE_SHAPES}") from error
    if not found:
        raise ExperimentError(f"{path.name} holds no product", "at least one", f"make it again: {MAKE_SHAPES}")
    return found


def gemm_regimes(arch: str, shapes: Mapping[Product, int], top: int) -> list[Regime]:
    """Regimes of logged products, by the time their weights' bytes take; the first `top` with every setting.

    The others get an entry too, from `TAIL` neighbours of the default: in performance mode every product needs one.
    """
    groups: dict[tuned.GemmKey, list[Product]] = {}
    for product in shapes:
        groups.setdefault(product.key, []).append(product)

    def weight(key: tuned.GemmKey) -> int:
        return sum(shapes[product] for product in groups[key]) * key.weight_rows * key.k

    ranked = sorted(groups, key=lambda key: (-weight(key), key))
    return [_gemm_regime(arch, key, groups[key], shapes, whole=i < top) for i, key in enumerate(ranked)]


def _gemm_regime(
    arch: str, key: tuned.GemmKey, products: Sequence[Product], shapes: Mapping[Product, int], *, whole: bool
) -> Regime:  # fmt: skip
    by_rows = Counter[int]()
    for one in products:
        by_rows[one.m] += shapes[one]
    hottest = sorted(by_rows, key=lambda m: (-by_rows[m], -m))[:SHAPES]
    chosen = [max((one for one in products if one.m == m), key=lambda one: (shapes[one], one.tag))
              for m in sorted(hottest)]  # fmt: skip
    if NARROW < chosen[-1].m < key.rows:  # blocks that divide fewer rows evenly may leave most of one empty there
        chosen.append(replace(chosen[-1], m=key.rows))
    most = chosen[-1].m
    default = asdict(tiling_for(arch, most, key))
    settings = settings_beside(default, CARDS["gemm"].sweep(arch, chosen[-1].case))
    return Regime(
        "gemm", key, tuple(one.case for one in chosen), settings if whole else nearest(settings, TAIL),
        tuple(sorted({one.tag for one in products})), sum(shapes[one] for one in products),
    )  # fmt: skip


def nearest(settings: Sequence[tuned.Setting], n: int) -> tuple[tuned.Setting, ...]:
    """The first setting and the `n` others that differ from it in the fewest parameters."""
    first, *others = settings
    others.sort(key=lambda one: sum(one[name] != first[name] for name in first))
    return (first, *others[:n])


def settings_beside(default: tuned.Setting, others: Sequence[tuned.Setting]) -> tuple[tuned.Setting, ...]:
    """All settings, the default first and once."""
    return (default, *(dict(one) for one in others if dict(one) != dict(default)))


@dataclass(frozen=True)
class AttentionGrid:
    """Shapes of attention to sweep.

    Attributes:
        heads: query heads and key heads by head size.
        points: batch and keys. tokens: queries a sequence.
        order: (splits, streams), or None for the architecture's own. fp8: keys and values are in e4m3.
    """

    heads: Mapping[int, tuple[int, int]]
    points: tuple[tuple[int, int], ...] = ((1, 32768), (4, 16384))
    tokens: tuple[int, ...] = (1, 4, 8, 16, 64)
    order: tuple[int, int] | None = None
    dtype: str = "bf16"
    fp8: bool = False

    def cases(self, dim: int) -> list[Case]:
        """Cases of the attention card, for one head size."""
        heads, kv_heads = self.heads[dim]
        order: dict[str, Any] = {"order": self.order} if self.order else {}
        cache: dict[str, Any] = {"fp8": True} if self.fp8 else {}
        return [
            {"dtype": self.dtype, "dim": dim, "heads": heads, "kv_heads": kv_heads, "batch": batch, "kv": kv,
             "tokens": n, **order, **cache} for batch, kv in self.points for n in self.tokens
        ]  # fmt: skip


HEADS = {128: (32, 8), 64: (64, 8)}
TINY = AttentionGrid({64: (2, 1)}, points=((1, 96),), tokens=(1,), order=(2, 2))  # what a CPU can emulate


def attention_regimes(arch: str, grid: AttentionGrid) -> list[Regime]:
    """The regimes of the grid's shapes; of several a setting has to serve all."""
    regimes: dict[tuned.AttentionKey, list[Case]] = {}
    for case in (case for dim in grid.heads for case in grid.cases(dim)):
        key = plan_key(shape_of(arch, case), case["tokens"], case["batch"], case["kv_heads"], case["kv"])
        regimes.setdefault(key, []).append(case)
    return [_attention_regime(arch, key, cases) for key, cases in regimes.items()]


def _attention_regime(arch: str, key: tuned.AttentionKey, cases: Sequence[Case]) -> Regime:
    most = max(cases, key=lambda case: (case["tokens"], case["kv"]))  # whose kernel, and room, the regime's need
    plan = choose_plan(arch, shape_of(arch, most), most["tokens"], most["batch"], most["kv_heads"], most["kv"])
    default = {name: value for name, value in asdict(plan).items() if name in tuned.NEUTRAL["attention"]}
    return Regime("attention", key, tuple(cases), settings_beside(default, ATTENTION.sweep(arch, most)))


def shape_of(arch: str, case: Case) -> Shape:
    """One head's work, with the order of its sums."""
    order = case.get("order") or order_of(arch, case["kv_heads"], case["dim"])
    group = case["heads"] // case["kv_heads"]
    return shape_over(arch, bool(case.get("fp8")), case["dtype"], case["dim"], group, order)
