"""What usually is wrong where a stage is the first to disagree: bugs that EAGLE code bases have really had.

A stage that is first has right inputs and a wrong result, so its name narrows the search to what that stage does.
Source: the bugs of `lab/parity/faults`, each found at the stage that it spoils (a test holds the two together).
"""

from __future__ import annotations

from fnmatch import fnmatchcase

# (stage, kind of pass, cause); the first line that matches both counts.
CAUSES = (
    ("target.embed", "*", "rows of the token table are shifted, or the table is another vocabulary's"),
    ("target.*attn", "*", "the norm's epsilon, the rotary base or its scaling, or this layer's q, k and v"),
    ("target.*router", "*", "rows of the router are shifted, or it reads another norm"),
    ("target.*experts", "*", "a row does not go to the experts of its largest logits"),
    ("target.*mlp", "*", "gate and up are swapped, or this layer's feed-forward, or its experts, have other weights"),
    ("target.taps", "*", "the draft reads other layers: one off, or counted as outputs instead of inputs"),
    ("target.norm", "*", "the gain or the epsilon of the final norm"),
    ("target.head", "*", "rows of the head are shifted, or it is tied where it should not be"),
    ("accept*", "*", "acceptance takes another token than the target's best"),
    ("draft.taps", "*", "the draft's features are of another row or another request"),
    ("draft.tokens", "chain*", "draft ids are used as target ids: d2t is missing"),
    ("draft.tokens", "*", "an entry has its own position's token where it needs the next one's"),
    ("draft.positions", "*", "the draft counts positions from another start: of its chunk, its level or its sequence"),
    ("draft.fc", "*", "the taps reach fc in another order, or fc has other weights"),
    ("draft.concat", "*", "hidden state and embedding are joined in the wrong order"),
    ("draft.qkv", "after*", "the cache keeps entries of drafted tokens after they were accepted or refused"),
    ("draft.qkv", "*", "keys and values are swapped, or a slot keeps those of an earlier request"),
    ("draft.rope", "chain*", "a chained step rotates by another position than its own"),
    ("draft.rope", "*", "the draft's rotary base or scaling is another one"),
    ("draft.attn", "*", "the scores' scale, the mask, or how many keys a request reads"),
    ("draft.mlp", "*", "the feed-forward reads the residual before its norm"),
    ("draft.feedback_in", "*", "a chained step reads the state of another request"),
    ("draft.feedback", "*", "the state handed to the next level is normed where it should not be, or skips its norm"),
    ("draft.norm", "*", "the gain or the epsilon of the draft's final norm"),
    ("draft.head", "*", "rows of the draft's head are shifted, or its vocabulary is another one"),
)  # fmt: skip


def cause_of(stage: str, kind: str) -> str:
    """The usual cause where that stage of that kind of pass is the first to disagree; empty where none is known."""
    return next((cause for at, of, cause in CAUSES if fnmatchcase(stage, at) and fnmatchcase(kind, of)), "")
