"""Parity with Hugging Face: stage by stage (`stages`) and token by token (`tokens`).

`recording` drives the engine once, `replay` computes what it should have recorded from Hugging Face's modules along the
same tokens, `tolerance` says how far apart the two may be.
"""

from lab.parity.stages import StageReport, run_stage_parity
from lab.parity.tokens import TokenReport, run_token_parity

__all__ = ["StageReport", "TokenReport", "run_stage_parity", "run_token_parity"]
