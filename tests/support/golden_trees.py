"""The tree that the official EAGLE-3 code grew on the golden pair, and ours on the same weights, level by level."""

from __future__ import annotations

import numpy as np
import torch
from places import GOLDEN
from tiny_engines import tree_runner
from torch import Tensor
from tree_arrays import paths_of

from eagle3core.kernels.tree.mask_words import unpack_words
from eagle3core.step.admission import SlotRequest
from eagle3core.step.run import DeviceRunner
from eagle3core.step.tree import FlatTree, GrownTree
from eagle3core.trace import RecordingTrace

TOLERANCE = 1e-5
TOP_K, FORWARDS, NODES = 4, 4, 26  # as recorded: `depth` counts the passes after the first
Golden = dict[str, Tensor]


class Round:
    """One step: what its program left behind."""

    def __init__(self, runner: DeviceRunner, trace: RecordingTrace) -> None:
        tree = runner.state.tree
        assert tree is not None
        self.tensors = dict(trace.tensors)
        self.tokens, self.parents = tree.selection.tokens[0].clone(), tree.selection.parents[0].clone()
        self.positions, self.mask = tree.masks.positions[0].clone(), unpack_words(tree.masks.mask[0], NODES)
        self.paths = tree.masks.paths[0].clone()


def official_tree() -> Golden:
    """The recorded tensors."""
    with np.load(GOLDEN / "official_tree.npz") as archive:
        return {key: torch.from_numpy(archive[key]) for key in archive.files}


def golden_runner() -> DeviceRunner:
    """A runner over the golden pair for the tree that was recorded."""
    tree = GrownTree(TOP_K, FORWARDS + 1, NODES)
    return tree_runner(GOLDEN / "target", tree, draft=GOLDEN / "draft", dtype=torch.float32)


def rounds_of(runner: DeviceRunner, official: Golden) -> list[Round]:
    """Two steps after the recorded prompt, whose tokens are the recorded ones."""
    runner.admit(0, SlotRequest(0, official["prompt_ids"].tolist(), 12, ()), RecordingTrace())
    outcomes, found = runner.collect(everything=True), []
    for step in (0, 1):
        trace = RecordingTrace()
        runner.enqueue(1, step, trace)
        outcomes += runner.collect(everything=True)
        found.append(Round(runner, trace))
    tokens = [token for outcome in outcomes for row in outcome.rows for token in row.tokens]
    assert tokens == official["tokens_ea"][: len(tokens)].tolist()
    return found


def check_tree(official: Golden, found: Round, at: int) -> None:
    """Tokens, positions, mask and paths of round number `at`."""
    key = f"r{at}/tree"
    n_prompt = len(official["prompt_ids"]) + at
    assert found.tokens.tolist() == official[f"{key}/tokens"].flatten().tolist()
    assert (found.positions - n_prompt).tolist() == official[f"{key}/pos"].tolist()
    assert torch.equal(found.mask, official[f"{key}/mask"][0, 0].bool())
    leaves = official[f"{key}/retrieve"]
    assert found.paths[: len(leaves), : leaves.shape[1]].tolist() == leaves.tolist()
    assert (found.paths[len(leaves) :] == -1).all()
    assert paths_of(FlatTree(tuple(found.parents.tolist()))).tolist() == leaves.tolist()


def check_level(official: Golden, found: Round, at: int, level: int) -> None:
    """What a level's pass read and gave in round number `at`."""
    key, ours = f"r{at}/s{level}", found.tensors
    scope = f"level{level}"
    assert ours[f"{scope}/draft.tokens"].tolist() == official[f"{key}/ids"].flatten().tolist()
    vocabulary = official[f"{key}/lm_head/out"].shape[-1]
    pairs = {
        "state fed": (ours[f"{scope}/draft.fc"], official[f"{key}/in_hidden"]),
        "layer": (ours[f"{scope}/draft.feedback"], official[f"{key}/midlayer/out"]),
        "head": (ours[f"{scope}/draft.head"][:, :vocabulary], official[f"{key}/lm_head/out"]),
    }
    for what, (mine, theirs) in pairs.items():
        error = float((mine - theirs.reshape(mine.shape)).abs().max())
        assert error <= TOLERANCE, f"{what} of {key}: largest difference {error:.3g}"
