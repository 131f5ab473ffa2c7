"""Each op against another formulation of the same mathematics, by the 2x rule."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from precision import WIDER, allowed_error, largest_error
from torch import Tensor

from eagle3core.kernels.attention.reference import paged_attention_reference, visible_keys
from eagle3core.kernels.layer.rms_norm import rms_norm_reference
from eagle3core.step.tree import FlatTree, chain_tree

pytestmark = pytest.mark.reference

BLOCK = 5
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
TREES = [chain_tree(0), chain_tree(6), FlatTree((-1, 0, 0, 1, 1, 2, 5, 5, 0))]


class Case(NamedTuple):
    """One attention problem: paged for ours, contiguous for the other."""

    q: Tensor  # [B, T, H, D]
    k: Tensor  # [B, S, K, D]
    v: Tensor
    k_blocks: Tensor
    v_blocks: Tensor
    tables: Tensor
    prefix_lens: Tensor
    tree_mask: Tensor
    allowed: Tensor  # [B, T, S] bool


def attention_case(tree: FlatTree, n_heads: int, n_kv: int, dtype: torch.dtype, poison: float = 0.0) -> Case:
    """Three sequences of odd lengths, one of them empty, in shuffled blocks; everything unused holds `poison`."""
    prefix, n_new, head_dim = [11, 0, 23], tree.n_nodes, 6
    longest = max(prefix) + n_new
    q = torch.randn(3, n_new, n_heads, head_dim).to(dtype)
    k, v = (torch.randn(3, longest, n_kv, head_dim).to(dtype) for _ in "kv")
    per_row = -(-longest // BLOCK)
    k_blocks, v_blocks = (torch.full((3 * per_row + 2, n_kv, BLOCK, head_dim), poison, dtype=dtype) for _ in "kv")
    tables = torch.full((3, per_row + 1), -1, dtype=torch.int32)
    free = torch.randperm(len(k_blocks)).tolist()
    allowed = torch.zeros(3, n_new, longest, dtype=torch.bool)
    for b, length in enumerate(prefix):
        for token in range(length + n_new):
            if token % BLOCK == 0:
                tables[b, token // BLOCK] = free.pop()
            block = int(tables[b, token // BLOCK])
            k_blocks[block, :, token % BLOCK] = k[b, token]
            v_blocks[block, :, token % BLOCK] = v[b, token]
        for node in range(n_new):
            seen = node
            allowed[b, node, :length] = True
            while seen >= 0:
                allowed[b, node, length + seen] = True
                seen = tree.parents[seen]
    mask = tree.mask.expand(3, -1, -1)
    return Case(q, k, v, k_blocks, v_blocks, tables, torch.tensor(prefix), mask, allowed)


def ours(case: Case) -> Tensor:
    """The op under test."""
    return paged_attention_reference(
        case.q, case.k_blocks, case.v_blocks, case.tables, case.prefix_lens, case.tree_mask
    )


def torch_attention(case: Case, dtype: torch.dtype) -> Tensor:
    """Torch's own attention over contiguous keys with the mask written out."""
    q, k, v = (tensor.to(dtype).transpose(1, 2) for tensor in (case.q, case.k, case.v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=case.allowed[:, None], enable_gqa=True)
    return mixed.transpose(1, 2)


@pytest.mark.parametrize("tree", TREES, ids=["root", "chain", "tree"])
@pytest.mark.parametrize(("n_heads", "n_kv"), [(4, 4), (4, 1), (8, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_attention_is_attention_with_the_mask_written_out(
    tree: FlatTree, n_heads: int, n_kv: int, dtype: torch.dtype
) -> None:
    case = attention_case(tree, n_heads, n_kv, dtype)
    truth = torch_attention(case, WIDER[dtype])
    result = ours(case)
    assert result.dtype == dtype
    assert largest_error(result, truth) <= allowed_error(torch_attention(case, dtype), truth)


@pytest.mark.parametrize("garbage", [1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_unused_cache_rows_hold_cannot_be_seen(dtype: torch.dtype, garbage: float) -> None:
    torch.manual_seed(5)
    clean = ours(attention_case(TREES[2], 4, 2, dtype))
    torch.manual_seed(5)
    assert torch.equal(ours(attention_case(TREES[2], 4, 2, dtype, poison=garbage)), clean)


def test_a_node_sees_the_prefix_its_ancestors_and_itself_alone() -> None:
    case = attention_case(TREES[2], 4, 2, torch.float32)
    n_keys = case.allowed.shape[2]
    assert torch.equal(visible_keys(case.prefix_lens, case.tree_mask, n_keys), case.allowed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_torchs_own(dtype: torch.dtype) -> None:
    x, weight = (3 * torch.randn(7, 5, 48)).to(dtype), torch.randn(48).to(dtype)
    wide = WIDER[dtype]
    truth = F.rms_norm(x.to(wide), (48,), weight.to(wide), 1e-5)
    assert largest_error(rms_norm_reference(x, weight, 1e-5), truth) <= allowed_error(
        F.rms_norm(x, (48,), weight, 1e-5), truth
    )


def test_rms_norm_keeps_tiny_rows_finite_by_its_epsilon() -> None:
    x = torch.full((2, 8), 1e-20, dtype=torch.bfloat16)
    normed = rms_norm_reference(torch.cat([x, torch.zeros_like(x)]), torch.ones(8, dtype=torch.bfloat16), 1e-5)
    assert bool(normed.isfinite().all())
    assert float(normed[2:].abs().max()) == 0.0
