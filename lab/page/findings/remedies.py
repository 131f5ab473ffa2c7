"""What to do about a gate that failed or could not be judged, and about a rule's warning: one table.

A line is found by the name of the gate, or of the rule; the first that matches counts, so narrow patterns come first.
The anchor is a heading of docs/runbook.md, which the page shows beneath its sections.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from lab.rows.gates import bare_name

ACCEPTANCE = "3-acceptance-is-low-output-is-right"
TOKENS = "4-truncated-or-repeated-text-or-memory-that-grows"
SLOW = "5-it-is-slow"
STAGES = "6-a-stage-disagrees-with-the-reference"
KERNELS = "7-a-kernel-or-a-setting-misses-its-bound"
DISTURBED = "8-the-run-was-disturbed"
MOVED = "9-slower-than-the-night-before"
MACHINE = "10-the-machine-lacks-a-part"
PROMISES = "performance-mode"
NOT_DONE = "a-notebook-failed"
OWN_GATE = "a-gate-failed"


@dataclass(frozen=True)
class Remedy:
    """One line of the table.

    Attributes:
        pattern: of names of gates and rules, with `*` and `?`.
        text: what to do first, a sentence.
        anchor: heading of the runbook that says more.
    """

    pattern: str
    text: str
    anchor: str


REMEDIES = (
    # Rules that warn without a gate.
    Remedy(
        "unfinished job",
        "Read the error text, mend its cause, and run the same command with the same `--out`: only what did "
        "not finish runs again.",
        NOT_DONE,
    ),
    Remedy(
        "disturbed run",
        "Measure again on an idle machine; until then compare ratios within rounds, not times.",
        DISTURBED,
    ),
    Remedy(
        "slow draft",
        "Switch speculation off for this pair or take a smaller depth, until the draft accepts more or "
        "its step costs less.",
        SLOW,
    ),
    Remedy(
        "refused drafts",
        "Look for a known cause before any training: `eagle3lab doctor draft DRAFT --target TARGET`.",
        ACCEPTANCE,
    ),
    Remedy(
        "head not working",
        "A head that beats no look-up is not short of training: `eagle3lab doctor draft DRAFT --target TARGET` looks "
        "for what is wrong with it.",
        ACCEPTANCE,
    ),
    Remedy(
        "moved numbers",
        "See what else differs between the two nights, then compare the two commits in turns: `eagle3lab ab`.",
        MOVED,
    ),
    Remedy("rows not had", "Each reason says what was lacking; put it there, or leave it out of the night.", NOT_DONE),
    # Right or wrong.
    Remedy(
        "stage parity",
        "Mend the stage named first: those after it are wrong because it is. Its `repro.py`, linked in the job's "
        "section, runs that stage alone.",
        STAGES,
    ),
    Remedy("no token bugs", "Find the first position that differs; any class but equal or near-tie is a bug.", TOKENS),
    Remedy("near-ties are rare", "Compare in float64: what still differs there is a bug and no rounding.", TOKENS),
    Remedy("tokens of plain decoding", "A tree changed the text: find the first differing position.", TOKENS),
    Remedy("tokens of every scenario", "Wrong tokens make every speed worthless: find the first position.", TOKENS),
    Remedy("prompts with other tokens, *", "A pass read a prompt wrongly: stage parity names the stage.", STAGES),
    Remedy("bits of every size of pass*", "Another size of pass orders sums otherwise: it may not be used.", STAGES),
    Remedy(
        "*no chain inside a tree reaches further",
        "The tree's mask or its walk is wrong: look at the tree's buffers with `eagle3lab inspect tree`.",
        ACCEPTANCE,
    ),
    Remedy(
        "acceptance against Hugging Face",
        "The draft decides otherwise than the reference's would: stage parity names where.",
        ACCEPTANCE,
    ),
    Remedy(
        "no known cause of low acceptance",
        "Make the change of the first red lamp, then look again: later lamps may only follow from it.",
        ACCEPTANCE,
    ),
    Remedy(
        "golden acceptance lengths",
        "If the draft was changed on purpose, keep the new lengths with `eagle3lab golden`; "
        "else find what changed it: stage parity first, then `eagle3lab doctor draft DRAFT --target TARGET`.",
        ACCEPTANCE,
    ),
    # Promises of performance mode, and tokens, as the performance gates count them.
    Remedy("*requests with wrong tokens", "Wrong tokens make every speed worthless: find the first position.", TOKENS),
    Remedy("*requests unlike the baseline's", "A draft changed the text: find the first differing position.", TOKENS),
    Remedy(
        "*single token steps", "Speculation was off, or drafted less than asked for: the engine says why.", PROMISES
    ),
    Remedy("*gemm fallbacks", "Plain torch computed on the GPU: find the product that has no kernel.", PROMISES),
    Remedy("*untuned products", "Tune the products that the file of this GPU lacks.", PROMISES),
    Remedy("*debug switches", "Switch off what logs or copies inside a step.", PROMISES),
    Remedy("*faults", "A step reported a broken invariant: its message names it.", PROMISES),
    Remedy(
        "*guessed layouts", "Results lacked an axis, or a row's tokens did not add up: the message names it.", PROMISES
    ),
    # Speed.
    Remedy(
        "acceptance length at spec-*",
        "Find what the tokens are lost to (vocabulary, a near rank, or deeper); "
        "`eagle3lab doctor draft DRAFT --target TARGET` looks for known causes.",
        ACCEPTANCE,
    ),
    Remedy(
        "*spec: acceptance length",
        "Acceptance is planned here, so less than planned is a bug and no bad luck.",
        ACCEPTANCE,
    ),
    Remedy(
        "share of the floor, *",
        "See which products of that batch run without a tuned setting, and time settings of theirs: `eagle3lab sweep`.",
        SLOW,
    ),
    Remedy(
        "first token, * x *, ms",
        "See `stage_ms` of the row for the stage that takes most of a pass, then time settings of its products: "
        "`eagle3lab sweep gemm`.",
        SLOW,
    ),
    Remedy(
        "rate of many short prompts",
        "Look how many passes they took: short prompts share passes as far as a pass has spans for them.",
        SLOW,
    ),
    Remedy(
        "first token*",
        "Compile kernels beforehand with `eagle3lab warm`; the waterfall of `43_start` names what else takes long.",
        SLOW,
    ),
    Remedy(
        "*speed-up*", "See which part binds: bytes, time above them, or acceptance; the gate's line names it.", SLOW
    ),
    Remedy("*step over plain step*", "Look at the waterfall for the stage that costs most above its bytes.", SLOW),
    Remedy(
        "*time of a step over the baseline's",
        "Look at the waterfall for the stage that costs most above its bytes.",
        SLOW,
    ),
    Remedy("*tokens a second over *", "Compare step with step: acceptance or the step's own time has changed.", SLOW),
    Remedy("*: tokens a second", "See whether bytes allow it (`eagle3lab gates feasible`), then its stages.", SLOW),
    Remedy("*share of its byte floor", "Find the stage furthest above its bytes; the gate's line names it.", SLOW),
    Remedy("*time of *'s step", "Compare stage by stage with the peer; the gate's line names the stage.", SLOW),
    Remedy("*time of *'s spec-? step", "Compare stage by stage with the peer; the gate's line names the stage.", SLOW),
    Remedy("*steps decoded", "The run was too short: more tokens, or requests that ended early.", SLOW),
    Remedy("thresholds of spec-*", "No point had a baseline beside its drafts: measure depth 0 as well.", NOT_DONE),
    Remedy("micro runs green in a row", "Mend the first red run; a full run waits for enough green ones.", SLOW),
    Remedy("micro gates", "Nothing was judged: the reason says what is lacking.", NOT_DONE),
    Remedy("full gates", "Nothing was judged: the reason says what is lacking.", NOT_DONE),
    Remedy(
        "ranges wait for nothing", "Find the call that waits or copies inside a range, in the table of ranges.", SLOW
    ),
    # Kernels and settings.
    Remedy(
        "*numbers and bits proven on the GPU",
        "A kernel is wrong: its speed says nothing until its proof holds.",
        KERNELS,
    ),
    Remedy(
        "every setting gives the default's bits", "A setting changed the order of sums: it may not be chosen.", KERNELS
    ),
    Remedy("every choice is within *", "Sweep again and keep the best found setting.", KERNELS),
    Remedy(
        "experts of * rows: *",
        "Time other cuts of the experts' maps beside the default: `python3 -m lab.probes.kernels.bench --ops experts "
        "--settings`.",
        KERNELS,
    ),
    Remedy("gemm *", "Sweep the product's settings on this GPU, then look at its occupancy.", KERNELS),
    Remedy("attention *", "Sweep the plan of attention on this GPU, then look at its occupancy.", KERNELS),
    Remedy(
        "*: time over * x (bytes + passes), worst shape",
        "A small kernel takes longer than its bytes and passes ask "
        "for: look at its passes and its launch, at the shape named.",
        KERNELS,
    ),
    # The machine.
    Remedy("every notebook is led to", "Name it beside a symptom: `SYMPTOMS` in lab/page/start_here.py.", NOT_DONE),
    Remedy("the lab can run here", "`eagle3lab doctor` names the part that is missing and what to install.", MACHINE),
)
# A gate that somebody's own configuration or notebook set: only who set it knows more.
OTHERS = Remedy("*", "Read the section of its job; who set this gate knows what it guards.", OWN_GATE)


def remedy_of(name: str) -> Remedy:
    """The remedy of a gate, or of a rule that warns, by its name."""
    bare = bare_name(name)
    return next((remedy for remedy in REMEDIES if fnmatchcase(bare, remedy.pattern)), OTHERS)
