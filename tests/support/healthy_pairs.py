"""Pairs with nothing to mend: what no doctor may find fault with."""

from __future__ import annotations

from pathlib import Path

from lab.options.training import TrainOptions
from lab.pairs import shipped_pair
from lab.pairs.named import named_pair
from lab.pairs.on_disk import Pair, pair_on_disk
from lab.pairs.planted.disk import write_pair
from lab.pairs.planted.pair import PlantedPair
from lab.training.command import train

NANO_SEEDS = (1, 2, 3)
# Fewest with which three seeds beat look-ups and a bigram table; about two minutes of one quiet core a pair.
NANO_STEPS = {"target_steps": 500, "draft_steps": 150}
HEALTHY = ("shipped", *(f"nano {seed}" for seed in NANO_SEEDS), "planted", "random")


def healthy_pair(name: str, folder: Path) -> Pair:
    """The pair of that name of `HEALTHY`, made in `folder` where it is not at hand.

    "random" has a target and a head of random weights, in a published layout: nothing in it is read amiss, and the head
    is worth nothing, so lamps of training may be red of it and lamps of reading may not.
    """
    if name == "shipped":
        return shipped_pair()
    if name == "planted":
        return write_pair(folder / "planted", PlantedPair("nano", share=0.8))
    if name == "random":
        return named_pair("random")
    seed = int(name.removeprefix("nano "))
    made = train(TrainOptions(size="nano", out=folder / f"nano{seed}", seed=seed, bar=False, **NANO_STEPS))
    return pair_on_disk(made.target, made.draft, made.prompts)
