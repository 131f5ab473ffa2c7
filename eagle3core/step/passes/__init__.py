"""Passes of the models as stages of calls: `emitter` makes the calls of one architecture, `target` puts them together.

May import the cards, the weights and the state's buffers; a step's parts and those of a pass over prompts import it. A
newcomer may add a part of a layer to `Emitter`, and what a pass of the target leaves out to `target_stages`.
"""

from eagle3core.step.passes.emitter import DRAFT, MOST_LEFT_INNER, TREE, Emitter, Rows
from eagle3core.step.passes.target import LayerInput, TargetPass, rest_of_last_layer, target_stages

__all__ = [
    "DRAFT",
    "MOST_LEFT_INNER",
    "TREE",
    "Emitter",
    "LayerInput",
    "Rows",
    "TargetPass",
    "rest_of_last_layer",
    "target_stages",
]
