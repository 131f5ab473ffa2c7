"""What a target's pass over a tree would cost with other attention, from rows: its other kernels' time stays.

A pass was taken apart by `eagle3lab prove trees`; the time of its attention is taken out and another's put in, once a
layer. What an attention takes by itself it need not take in a step: ours, by itself, stands beside for that.
Source: derived here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lab.pairs.planted import find_geometry
from lab.rows.store import Row, nested

BOUND = "attention_bound"
_TREE = re.compile(r"[a-z]+-(\d+)/")
_ATTENTION = "kernel_us.target.attn/attention_"


@dataclass(frozen=True)
class Bound:
    """Attention of one shape, us: ours, the best without a mask, the same in unmerged pieces, and what hardware allows.

    Attributes:
        unmasked, unmerged: of the fastest call; None where none ran. names: of these two.
        floor: the longer of what reading takes and what tensor cores take.
    """

    n_keys: int
    n_nodes: int
    ours: float
    unmasked: float | None
    unmerged: float | None
    floor: float
    names: tuple[str, str]

    def attentions(self) -> dict[str, float]:
        """Time of every attention that may stand in place of ours, us a layer, ours by itself first."""
        named = {"ours by itself": self.ours, f"no mask ({self.names[0]})": self.unmasked,
                 f"no mask, unmerged ({self.names[1]})": self.unmerged, "floor of bytes and products": self.floor,
                 "no attention": 0.0}  # fmt: skip
        return {name: us for name, us in named.items() if us is not None}


@dataclass(frozen=True)
class Pass:
    """A target's pass over a tree, us, as it was taken apart.

    Attributes:
        attention: of all layers together. plain_step: the plain step of the same context. most: of a plain step that
            the pass may take.
    """

    tree: str
    context: int
    n_nodes: int
    n_layers: int
    target: float
    attention: float
    plain_step: float
    most: float

    def ratio_with(self, attention_us: float) -> float:
        """The pass over a plain step if attention took `attention_us` a layer."""
        return (self.target - self.attention + self.n_layers * attention_us) / self.plain_step

    @property
    def ratio(self) -> float:
        """The pass over a plain step, as measured."""
        return self.target / self.plain_step


def read_bounds(rows: Iterable[Row]) -> list[Bound]:
    """The measured shapes; of several of one shape the last."""
    found = {}
    for row in rows:
        if row.kind == BOUND and row.status == "measured" and "time_us" in row.values:
            bound = _bound(row)
            found[bound.n_keys, bound.n_nodes] = bound
    return list(found.values())


def _bound(row: Row) -> Bound:
    values, shape = nested(row.values), nested(row.parameters)["shape"]
    whole, pieces = values.get("unmasked_us", {}), values.get("unmerged_us", {})
    best, best_pieces = (min(each, key=each.__getitem__, default="") for each in (whole, pieces))
    floor = max(values["floor_us"], values["compute_floor_us"])
    return Bound(
        shape["kv"], shape["tokens"], values["time_us"], whole.get(best), pieces.get(best_pieces), floor,
        (best, best_pieces),
    )  # fmt: skip


def read_passes(rows: Iterable[Row]) -> list[Pass]:
    """The passes over trees that were taken apart; of several of one name the last."""
    found = {}
    for row in rows:
        tree, values = _TREE.match(str(row.parameters.get("tree", ""))), row.values
        if row.kind != "proof" or not row.name.startswith("trees/") or tree is None or "target_us" not in values:
            continue
        geometry = find_geometry(str(row.parameters["pair"]).split()[-1])
        attention = sum(row.number(name) or 0.0 for name in values if name.startswith(_ATTENTION))
        found[row.name] = Pass(
            str(row.parameters["tree"]), int(str(row.parameters["context"])), int(tree[1]), geometry.target.n_layers,
            _of(row, "target_us"), attention, _of(row, "plain_step_us"), _of(row, "most_target_over_plain"),
        )  # fmt: skip
    return list(found.values())


def _of(row: Row, name: str) -> float:
    value = row.number(name)
    assert value is not None, f"a row of {row.name} has {name}"
    return value


def lines(bounds: Sequence[Bound], passes: Sequence[Pass]) -> list[str]:
    """For people: attention of every shape, then every pass over a plain step with each attention in place of ours."""
    told = ["attention a layer, us:"]
    for bound in bounds:
        others = ", ".join(f"{name} {us:.1f}" for name, us in bound.attentions().items() if us)
        told.append(f"  {bound.n_nodes} rows, {bound.n_keys} keys: {others}")
    for bound in bounds:
        for each in passes:
            if (each.context, each.n_nodes) != (bound.n_keys, bound.n_nodes):
                continue
            told.append(f"{each.tree} at {each.context}: {each.ratio:.3f} of a plain step, at most {each.most} allowed")
            told += [f"  {each.ratio_with(us):.3f} with {name}" for name, us in bound.attentions().items()]
    return told if bounds else ["no row of attention's bounds was measured"]
