"""Which drafted tokens count as accepted, where that is not the rule the engine has by itself: settings, each checked.

By itself a draft is accepted where it is the target's own choice, greedy or drawn, and tokens are the target's own.
Every other rule has a class and so a name of its own, and is there only for whoever writes that name. What the numbers
do is in `step.acceptance`; docs/requirements.md R-60, 1.X-21.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil, isfinite
from typing import ClassVar

from eagle3core.errors import ConfigError, shown


class AcceptanceRule(ABC):
    """A rule by which drafts are accepted.

    Attributes:
        of_one_depth: what it says that steps of several depths would make untrue; None: they may be mixed.
    """

    of_one_depth: ClassVar[str | None] = None

    @property
    @abstractmethod
    def label(self) -> str:
        """The rule in a few words, as records, metrics and pictures name it."""

    @abstractmethod
    def is_lossless(self, *, draws: bool) -> bool:
        """Whether tokens are the target's own, of a request that draws them or of a greedy one."""

    def lossy(self, *, draws: bool) -> str | None:
        """What a response says of its tokens: why they are not the target's own; None where they are."""
        return None if self.is_lossless(draws=draws) else f"acceptance {self.label}: tokens are not the target's own"

    def check(self, is_lookup: bool, method: str, tree_kind: str, depth: int) -> None:  # noqa: B027  # most fit all
        """Refuse draft settings that the rule contradicts.

        Raises:
            ConfigError: it does.
        """

    def check_request(self, most_drafts: int | None) -> None:  # noqa: B027  # most fit all
        """Refuse a request that uses so few drafts of a step that the rule does not hold; None: it uses all.

        Raises:
            ConfigError: it does not.
        """


@dataclass(frozen=True)
class RejectionAcceptance(AcceptanceRule):
    """Sampled drafts: of a request that draws its tokens, the draft draws too, each from its own distribution q.

    A draft is accepted with probability min(1, p/q); at the first that is not, the token is drawn from max(p - q, 0),
    behind the last from p. Tokens are distributed as the target's own. A chain of a head alone.
    """

    # A token is drawn by other numbers where a step ends than in its middle, and the depth would say where that is.
    of_one_depth = "a seed's tokens would depend on where each step ends"

    @property
    def label(self) -> str:
        """In a few words."""
        return "by rejection, min(1, p/q)"

    def is_lossless(self, *, draws: bool) -> bool:
        """Always: in distribution, of a greedy request in every token."""
        return True

    def check(self, is_lookup: bool, method: str, tree_kind: str, depth: int) -> None:
        """Nothing but a chain of a head."""
        if method not in ("eagle3", "eagle") or tree_kind != "chain":
            raise ConfigError(
                f"acceptance is {self.label} with method {method!r} and {_shape(tree_kind)}",
                "method 'eagle3' or 'eagle' and a chain: only there are drafts drawn",
                "leave acceptance out: drafts that equal the target's own draw are accepted, of any method and tree",
            )


@dataclass(frozen=True)
class RelaxedAcceptance(AcceptanceRule):
    """A draft is accepted if it is near enough to the target's best. Not lossless.

    Attributes:
        top_n: it is one of the target's so many likeliest tokens.
        delta: the logarithm of its probability is at most this far below the best's (natural, at least 0).
    """

    top_n: int
    delta: float

    def __post_init__(self) -> None:
        if not isinstance(self.top_n, int) or isinstance(self.top_n, bool) or self.top_n < 1:
            raise ConfigError(f"top_n is {shown(self.top_n)}", "an integer of at least 1", "set top_n to one, as 10")
        _require("delta", self.delta, least=0.0)

    @property
    def label(self) -> str:
        """In a few words."""
        return f"relaxed to the top {self.top_n} within {self.delta:g}"

    def is_lossless(self, *, draws: bool) -> bool:
        """Never."""
        return False


@dataclass(frozen=True)
class MedusaAcceptance(AcceptanceRule):
    """Medusa's typical acceptance: a draft is accepted if p(draft) > min(epsilon, delta * exp(-entropy)).

    Of requests that draw their tokens, p at their temperature; greedy ones are as without it. Not lossless.
    `GenerationConfig.posterior_threshold` is another rule: it truncates what is drawn from.

    Attributes:
        epsilon, delta: both in (0, 1); the defaults are Medusa's own.
    """

    epsilon: float = 0.3
    delta: float = 0.09

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            _require(name, getattr(self, name), least=0.0, below=1.0, is_open=True)

    @property
    def label(self) -> str:
        """In a few words."""
        return f"by Medusa's typical test, epsilon {self.epsilon:g}, delta {self.delta:g}"

    def is_lossless(self, *, draws: bool) -> bool:
        """Of greedy requests alone."""
        return not draws


@dataclass(frozen=True)
class ForcedAcceptance(AcceptanceRule):
    """So many tokens a step whatever the target holds: for measuring speed alone. The text means nothing.

    One of the two is given; of a fraction the whole part comes in every step, and one more with the rest's probability.

    Attributes:
        length: tokens a step with the bonus, 1 to depth + 1, as SGLang and vLLM count them.
        accepted_drafts: accepted drafts a step, 0 to depth, as TensorRT-LLM counts them.
    """

    of_one_depth = "a step of fewer drafts could not accept as many"

    length: float | None = None
    accepted_drafts: float | None = None

    def __post_init__(self) -> None:
        if (self.length is None) == (self.accepted_drafts is None):
            raise ConfigError(
                f"length is {shown(self.length)} with accepted_drafts {shown(self.accepted_drafts)}",
                "one of the two: length counts the bonus token, accepted_drafts does not",
                "leave the other out",
            )
        if self.length is not None:
            _require("length", self.length, least=1.0)
        else:
            _require("accepted_drafts", self.accepted_drafts, least=0.0)

    @property
    def drafts(self) -> float:
        """Accepted drafts of a step on average."""
        return float(self.accepted_drafts if self.length is None else self.length - 1)  # type: ignore[arg-type]

    @property
    def label(self) -> str:
        """In a few words."""
        return f"forced to {self.drafts + 1:g} tokens a step"

    def is_lossless(self, *, draws: bool) -> bool:
        """Never."""
        return False

    def check(self, is_lookup: bool, method: str, tree_kind: str, depth: int) -> None:
        """Drafts that are always there, and enough of them."""
        if is_lookup or tree_kind == "dynamic":
            raise ConfigError(
                f"acceptance is {self.label} with method {method!r} and {_shape(tree_kind)}",
                "drafts that are as deep in every step: of a head or a small model, a chain or a fixed tree",
                "leave acceptance out, or draft a chain or a fixed tree with method='eagle3'",
            )
        if self.drafts > depth:
            raise ConfigError(
                f"acceptance is {self.label} with {depth} drafts on the longest path",
                f"a length of 1 to {depth + 1}, which is 0 to {depth} accepted drafts",
                "lower it, or raise num_speculative_tokens",
            )

    def check_request(self, most_drafts: int | None) -> None:
        """As many drafts as are forced."""
        if most_drafts is not None and most_drafts < self.drafts:
            raise ConfigError(
                f"max_draft_tokens is {most_drafts} with acceptance {self.label}",
                f"at least {ceil(self.drafts)}, the accepted drafts of a step",
                "leave max_draft_tokens out",
            )


def _shape(tree_kind: str) -> str:
    return "a chain" if tree_kind == "chain" else f"a {tree_kind} tree"


def check_acceptance(
    rule: object, is_lookup: bool, method: str, tree_kind: str, depth: int, *, is_adaptive: bool = False
) -> None:
    """Refuse what is no rule, and draft settings that contradict it.

    Raises:
        ConfigError: one of these.
    """
    if rule is None:
        return
    if not isinstance(rule, AcceptanceRule):
        raise ConfigError(
            f"acceptance is {shown(rule)}",
            "None, or a rule: RejectionAcceptance, RelaxedAcceptance, MedusaAcceptance or ForcedAcceptance",
            "leave it out, or write for example acceptance=RejectionAcceptance()",
        )
    if is_adaptive and rule.of_one_depth is not None:
        raise ConfigError(
            f"adaptive is True with acceptance {rule.label}, where {rule.of_one_depth}",
            "acceptance None, RelaxedAcceptance or MedusaAcceptance beside adaptive",
            "leave adaptive out, or acceptance",
        )
    rule.check(is_lookup, method, tree_kind, depth)


def _require(name: str, value: object, *, least: float, below: float | None = None, is_open: bool = False) -> None:
    """That a value is a finite number from `least` on (`is_open`: above it), and below `below`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    allowed = f"a number {'above' if is_open else 'of at least'} {least:g}" + (
        f" and below {below:g}" if below is not None else ""
    )
    if not is_number or not _is_within(value, least, below, is_open):
        raise ConfigError(f"{name} is {shown(value)}", allowed, f"set {name} in that range")


def _is_within(value: object, least: float, below: float | None, is_open: bool) -> bool:
    assert isinstance(value, int | float), "asked of numbers alone"
    return (value > least if is_open else value >= least) and (below is None or value < below)
