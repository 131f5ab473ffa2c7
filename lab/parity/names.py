"""Names of recorded tensors: "<pass>/<stage>", read and sorted (docs/engine.md)."""

from __future__ import annotations

INTEGER_STAGES = (
    "prompt_ids",
    "first_token",
    "draft.tokens",
    "draft.positions",
    "tree.tokens",
    "tree.parents",
    "accept.tokens",
)


def step_of(name: str) -> int:
    """Speculative step of a recorded name; -1 for the prefill."""
    head = name.split("/", 1)[0]
    return int(head.removeprefix("step")) if head.startswith("step") else -1


def kind_of(pass_name: str) -> str:
    """A pass without its step number: "prefill", "extend", "after acceptance", "chain1", "verify", "step", "run".

    The extend pass of step 0 completes the prefill; later ones rewrite the draft's entries of accepted tokens.
    """
    step, _, rest = pass_name.partition("/")
    if not step.startswith("step"):
        return pass_name or "run"
    if rest == "extend":
        return "extend" if step == "step0" else "after acceptance"
    return rest or "step"


def split_name(name: str) -> tuple[str, str]:
    """Pass and stage of a recorded name, e.g. ("step0/chain1", "draft.fc")."""
    pass_name, _, stage = name.rpartition("/")
    return pass_name, stage


def is_integer_stage(stage: str) -> bool:
    """Whether a stage holds ids or positions, which must agree exactly."""
    return stage in INTEGER_STAGES or stage.endswith(".experts")
