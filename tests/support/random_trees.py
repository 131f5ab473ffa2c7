"""Random trees for property tests, and a slow walk up one."""

from __future__ import annotations

from hypothesis import strategies as st

from eagle3core.step.tree import FlatTree


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 14) -> FlatTree:
    """A tree of 1..max_nodes nodes, every shape possible."""
    n_nodes = draw(st.integers(1, max_nodes))
    return FlatTree((-1, *(draw(st.integers(0, node - 1)) for node in range(1, n_nodes))))


def ancestors(tree: FlatTree, node: int) -> list[int]:
    """Nodes from the root down to `node`."""
    line = []
    while node >= 0:
        line.append(node)
        node = tree.parents[node]
    return line[::-1]
