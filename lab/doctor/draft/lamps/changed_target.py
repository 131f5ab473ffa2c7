"""Whether the target is the one that the head was trained with: not rotated, rounded or trained further since.

A rotation of the residual stream (QuaRot, arXiv 2404.00456; SpinQuant, arXiv 2405.16406) leaves all that the target
says as it was and turns every state that the head reads. A head that began as the target's rows still shows where they
lay, so the rotation can be found from the files alone; what rounding costs can only be told beside the target as it
was.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn import functional

from eagle3core.errors import Eagle3Error
from lab.doctor.draft.case import Case
from lab.doctor.draft.evidence import MOST_LEVELS, levels_a_slice, rotation_between, row_cosine
from lab.doctor.draft.forward import likelihoods, propose
from lab.doctor.draft.lamp import Finding, Repair
from lab.doctor.draft.measure import LARGE_SHARE, LEAST_SHARE, is_certain_gain, length_outside_loops, measure
from lab.doctor.draft.reading import Reading
from lab.doctor.draft.text import Text, read_text

LAMP = "target_changed"
ALIKE = 0.3  # mean cosine from which two tables are one, trained further; unlike ones of this width are below 0.1


def look_at_target(case: Case) -> Finding:
    """Beside the reference target where there is one; else by what the head's own tables remember of it."""
    if not case.prompts:
        return Finding(LAMP, "unknown", "no prompts: what a changed target costs is told by what is accepted")
    if case.reference_target is not None:
        return _beside_reference(case)
    signs = signs_of_change(case)
    turned = unturned(case)
    if turned is not None:
        reading, cosine = turned
        after = case.measured(reading)
        if is_certain_gain(case.base, after) and after.length > case.before:
            said = f"one rotation turns the head's rows into the target's (cosine {cosine:.2f}, before it none){signs}"
            change = "serve the target that was not rotated, or turn fc and the embedding of the head with it"
            return Finding(LAMP, "red", said, Repair(change, case.before, after.length), weight=1.0, mended=reading)
    alike = [row_cosine(own, targets) for own, targets in _remembered(case)]
    if signs:
        return Finding(LAMP, "unknown", f"what it costs is told by --reference-target DIR alone{signs}")
    if alike and max(alike) > ALIKE:
        return Finding(LAMP, "green", f"the head's rows still lie along the target's (cosine {max(alike):.2f})")
    return Finding(
        LAMP, "unknown", "a target that was trained further looks like any other: --reference-target DIR would tell"
    )


def signs_of_change(case: Case) -> str:
    """What the target's files say of quantisation and rotation, in words that follow a sentence; empty if nothing."""
    config, weights, signs = case.target_config, case.target_files.weights, list[str]()
    gains = [tensor for name, tensor in weights.items() if name.endswith("norm.weight") and "_norm.w" not in name]
    if gains and all(bool((gain == 1).all()) for gain in gains):
        signs.append("every norm gain of the target is 1, as rotating tools leave them")
    if config.get("quantization_config") is not None:
        signs.append("the target's config.json has a quantization_config")
    matrices = [tensor for name, tensor in weights.items() if name.endswith("_proj.weight") and tensor.dim() == 2]
    if matrices and max(levels_a_slice(matrix) for matrix in matrices[:8]) <= MOST_LEVELS + 1:
        signs.append("the target's weights hold 4 bits each")
    return f"; {', and '.join(signs)}" if signs else ""


def unturned(case: Case) -> tuple[Reading, float] | None:
    """The head turned with the target, and the cosine of its rows to the target's then; None where no rotation fits."""
    reading = case.reading
    variant, block = reading.geometry.variant, reading.geometry.block
    width = reading.geometry.target_hidden_size
    if reading.is_eagle1 or variant.reads_last or variant.fusion_norm != "none" or block.hidden_size != width:
        return None
    for own, targets in _remembered(case):
        if len(own) < 2 * width or row_cosine(own, targets) > ALIKE:
            continue
        turn, cosine = rotation_between(own, targets)
        if cosine > ALIKE:
            return _turned(case, turn.to(case.torch_device)), cosine
    return None


def _remembered(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Tables of the head that were copies of the target's once, beside the target's, row for row.

    Norms before output heads are multiplied in: tools that rotate fold them.
    """
    weights, reading = case.target_files.weights, case.reading
    embedding, ids = weights["model.embed_tokens.weight"], reading.draft_to_target
    head = weights.get("lm_head.weight", embedding)
    pairs = [(reading.weights.get("embed_tokens.weight"), embedding.float())]
    if "norm.weight" in reading.weights and "lm_head.weight" in reading.weights:
        own = reading.weights["lm_head.weight"] * reading.weights["norm.weight"]
        pairs.append((own, (head if ids is None else head[ids.cpu()]).float() * weights["model.norm.weight"].float()))
    return [(own.cpu(), targets) for own, targets in pairs if own is not None and own.shape == targets.shape]


def _turned(case: Case, turn: Tensor) -> Reading:
    """The head with states and embeddings of the target turned back before it reads them."""
    reading, weights = case.reading, case.reading.weights
    fc = weights["fc.weight"]
    parts = fc.view(len(fc), -1, len(turn)) @ turn  # a tap x @ turn then gives what x gave
    changed = {"fc.weight": parts.reshape(fc.shape).contiguous()}
    if not reading.geometry.has_embedding:
        table = case.target_files.weights["model.embed_tokens.weight"].float().to(turn.device)
        changed["embed_tokens.weight"] = table @ turn.T
    return replace(
        reading, geometry=replace(reading.geometry, has_embedding=True), weights={**weights, **changed}
    )  # fmt: skip


def _beside_reference(case: Case) -> Finding:
    """Acceptance with the reference target, and how far its states are from those that the head is given."""
    assert case.reference_target is not None, "asked where there is one"
    reference = replace(case, target=case.reference_target, reference_target=None)
    try:
        geometry = reference.target_files.geometry
        if (geometry.block.hidden_size, geometry.n_layers) != (
            case.target_files.geometry.block.hidden_size, case.target_files.geometry.n_layers
        ):  # fmt: skip
            return Finding(LAMP, "unknown", "the reference target has another width or depth than the target")
        over_same = read_text(case.reference_target, case.prompts, case.text.answers, case.torch_device)
        after = reference.before
    except Eagle3Error as refused:
        return Finding(LAMP, "unknown", f"the reference target cannot be run: {refused.what}")
    drafted = propose(case.reading, over_same, case.k), likelihoods(case.reading, over_same, case.k)
    given_states = measure(*drafted, over_same)
    words, values = _taps_apart(case, over_same)
    said = f"{words}; with the reference's states {given_states.length:.2f} tokens a step over the same text"
    gain = after - case.before
    change = f"serve the target that the head was trained with: {case.reference_target}"
    if is_certain_gain(case.base, given_states) and gain > LEAST_SHARE * case.before:
        return Finding(LAMP, "red", said, Repair(change, case.before, after), weight=1.0, values=values)
    said = f"{said}, {after:.2f} over its own; now {case.before:.2f}"
    if gain <= LARGE_SHARE * case.before:
        return Finding(LAMP, "green", said, values=values)
    # The states are near enough, and the text is another: a spoiled target may write what the head foretells less.
    own, its = length_outside_loops(case.base, case.text), length_outside_loops(reference.base, reference.text)
    said += f"; outside loops {its.words} tokens a step over the reference's own text, {own.words} over this target's"
    if its.is_above(own):
        return Finding(LAMP, "red", said, Repair(change, case.before, after), weight=0.7, values=values)
    return Finding(LAMP, "unknown", f"{said}: {len(case.prompts)} prompts are too little text to tell them apart")


def _taps_apart(case: Case, reference: Text) -> tuple[str, tuple[tuple[str, list[float]], ...]]:
    """Mean cosine and ratio of sizes, tap by tap, of the states over one text."""
    taps = case.reading.geometry.taps
    given, were = case.text.boundaries[list(taps)], reference.boundaries[list(taps)]
    cosines = functional.cosine_similarity(given, were, dim=-1).mean(dim=-1).tolist()
    sizes = (given.square().mean(dim=(1, 2)) / were.square().mean(dim=(1, 2))).sqrt().tolist()
    listed = ", ".join(
        f"{tap}: {cosine:.2f} and {size:.2f}" for tap, cosine, size in zip(taps, cosines, sizes, strict=True)
    )
    return (
        f"cosine to the reference's states and ratio of sizes at tap {listed}",
        (("tap_cosines", cosines), ("tap_size_ratios", sizes)),
    )
