"""eagle3core: an EAGLE-3 speculative-decoding engine.

pipeline(target_dir, speculative_config=SpeculativeConfig(model=draft_dir)) -> texts
Engine.from_pretrained(target_dir, EngineConfig(...)).generate(token ids, GenerationConfig(...)) -> responses
Engine.stream, Pipeline.stream, AsyncEngine(engine).stream -> tokens or text as they come
"""

from eagle3core.acceptance import ForcedAcceptance, MedusaAcceptance, RejectionAcceptance, RelaxedAcceptance
from eagle3core.alignment import check_engine_spec_alignment, to_engine_spec_dict, validate_eagle_runtime_config
from eagle3core.async_engine import AsyncEngine, AsyncTextStream
from eagle3core.batching import TextStream, TokenStream
from eagle3core.config import EngineConfig, GenerationConfig
from eagle3core.engine import Engine
from eagle3core.errors import (
    BackendUnavailable,
    CheckpointError,
    ConfigError,
    DecodeError,
    Eagle3Error,
    InvariantViolated,
    KernelLimit,
)
from eagle3core.loading import SpeculationState
from eagle3core.metrics import EagleMetricsSummary, RequestMetrics, SpecInfo, SpeculativeDecodingStats, StepRecord
from eagle3core.pipeline import Pipeline, pipeline
from eagle3core.request import RequestHandle, Response
from eagle3core.speculative import SpeculativeConfig
from eagle3core.step.outcome import TokenLogprob

__all__ = [
    "AsyncEngine",
    "AsyncTextStream",
    "BackendUnavailable",
    "CheckpointError",
    "ConfigError",
    "DecodeError",
    "Eagle3Error",
    "EagleMetricsSummary",
    "Engine",
    "EngineConfig",
    "ForcedAcceptance",
    "GenerationConfig",
    "InvariantViolated",
    "KernelLimit",
    "MedusaAcceptance",
    "Pipeline",
    "RejectionAcceptance",
    "RelaxedAcceptance",
    "RequestHandle",
    "RequestMetrics",
    "Response",
    "SpecInfo",
    "SpeculationState",
    "SpeculativeConfig",
    "SpeculativeDecodingStats",
    "StepRecord",
    "TextStream",
    "TokenLogprob",
    "TokenStream",
    "check_engine_spec_alignment",
    "pipeline",
    "to_engine_spec_dict",
    "validate_eagle_runtime_config",
]
