"""Whether a point fits on the device, before anything of it is allocated (docs/requirements.md R-64).

Counted are weights, caches of every engine that is alive at once, and the peers' own copies; on a GPU each point must
leave `RESERVE_BYTES` for contexts, graphs, workspaces and logits.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

import torch

from eagle3core.config import EngineConfig
from eagle3core.geometry import DraftGeometry, TargetGeometry
from eagle3core.speculative import CacheDtype, SpeculativeConfig, WeightFormat
from eagle3core.step import blocks_for
from lab.probes.bench.floors import cached_itemsize, draft_weight_bytes, token_bytes, weight_bytes

RESERVE_BYTES = 3 * 2**30
GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """Bytes by purpose.

    Attributes:
        weight_bytes: target and draft.
        kv_bytes: caches of all engines together.
        peer_bytes: the peers' row-major copy and caches.
        total_bytes: of the device.
    """

    weight_bytes: int
    kv_bytes: int
    peer_bytes: int
    total_bytes: int
    reserve_bytes: int

    @property
    def engine_fits(self) -> bool:
        """Without any peer."""
        return self.weight_bytes + self.kv_bytes + self.reserve_bytes <= self.total_bytes

    @property
    def peers_fit(self) -> bool:
        """Engine and peers together."""
        return self.engine_fits and (
            self.weight_bytes + self.kv_bytes + self.peer_bytes + self.reserve_bytes <= self.total_bytes
        )

    def __str__(self) -> str:
        parts = [self.weight_bytes, self.kv_bytes, self.peer_bytes, self.reserve_bytes, self.total_bytes]
        weights, kv, peers, reserve, total = (f"{part / GIB:.2f} GiB" for part in parts)
        return f"weights {weights}, caches {kv}, peers {peers}, reserve {reserve}; the device has {total}"


def plan(
    target: TargetGeometry,
    draft: DraftGeometry,
    *,
    ks: tuple[int, ...],
    batch: int,
    session_len: int,
    itemsize: int,
    n_peers: int,
    device: torch.device,
    draft_weights: WeightFormat = "as_stored",
    target_weights: WeightFormat = "as_stored",
    cache_dtype: CacheDtype = "as_computed",
    draft_cache_dtype: CacheDtype = "as_computed",
) -> Plan:
    """The plan of one point with an engine a depth in `ks` and `n_peers` peers, whose copies are as stored."""
    target_token = token_bytes(target.block, target.n_layers, itemsize)
    draft_token = token_bytes(draft.block, 1, itemsize)
    stored_token = token_bytes(target.block, target.n_layers, cached_itemsize(cache_dtype, itemsize))
    drafts_token = token_bytes(draft.block, 1, cached_itemsize(draft_cache_dtype, itemsize))
    kv = sum(batch * cached_tokens(k, session_len) * (stored_token + (drafts_token if k else 0)) for k in ks)
    weights = weight_bytes(target, itemsize, target_weights) + draft_weight_bytes(draft, itemsize, draft_weights)
    copies = weight_bytes(target, itemsize) + draft_weight_bytes(draft, itemsize)
    peers = copies + n_peers * batch * session_len * (target_token + draft_token) if n_peers else 0
    reserve = RESERVE_BYTES if device.type == "cuda" else 0
    return Plan(weights, kv, peers, device_bytes(device), reserve)


def cached_tokens(k: int, session_len: int) -> int:
    """Tokens of one slot's cache blocks."""
    decoding = SpeculativeConfig(model="planned", num_speculative_tokens=k).tokens_in_flight if k else 1
    block = EngineConfig().block_size
    return blocks_for(session_len + decoding, block) * block


def device_bytes(device: torch.device) -> int:
    """Memory of the device, used or not."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def used_bytes(device: torch.device) -> int:
    """Memory in use now: on a GPU by all its processes, on a CPU the most this one has held."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
