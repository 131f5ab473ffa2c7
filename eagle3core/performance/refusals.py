"""What performance mode takes no request with: settings under which its promises mean nothing.

Source: docs/requirements.md R-113.
"""

from __future__ import annotations

from eagle3core.acceptance import AcceptanceRule
from eagle3core.config import GenerationConfig
from eagle3core.errors import ConfigError
from eagle3core.performance.mode import VARIABLE, is_on


def check_asked(generation: GenerationConfig, rule: AcceptanceRule | None) -> None:
    """Refuse a request, in performance mode, whose tokens are not those of greedy decoding, or are copied on the way.

    Args:
        rule: by which the engine accepts drafts; None: where they are the target's own choice.

    Raises:
        ConfigError: a temperature, log-probabilities, or a rule.
    """
    if not is_on():
        return
    if rule is not None:
        raise ConfigError(
            f"acceptance is {rule.label} in performance mode",
            "drafts that are the target's own choice: its tokens are what performance mode promises",
            f"leave SpeculativeConfig.acceptance out, or unset {VARIABLE}",
        )
    if generation.temperature:
        raise ConfigError(
            f"temperature is {generation.temperature} in performance mode",
            "0: what performance mode promises is of greedy decoding",
            f"leave temperature out, or unset {VARIABLE}",
        )
    if generation.n_top is not None:
        raise ConfigError(
            f"logprobs is {generation.logprobs} in performance mode",
            "False: they are copied to the host in every step, which performance mode promises not to do",
            f"leave logprobs out, or unset {VARIABLE}",
        )
