"""Other engines at the same work: plain torch over fused weights, and Hugging Face with a static cache.

Imports nothing of the bench but its clocks. A further peer is a file with a `StepLoop` here and a line in `bench.run`.
"""

from lab.probes.bench.peers.step_loop import Peer, PeerRound, StepLoop

__all__ = ["Peer", "PeerRound", "StepLoop"]
