"""The kernels that runs of the gates need, found and compiled on a machine with no GPU, as those of proofs are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lab.probes.bench.source import HEADROOM
from lab.probes.gates.config import GatesConfig, RunKind
from lab.probes.gates.measure import scenario_of
from lab.probes.proofs.plans import SHIPPED, Plans, build
from lab.probes.proofs.subject import Setting


@dataclass(frozen=True)
class EnginePlans(Plans):
    """Engines by pair, whatever the part."""

    pair: str = SHIPPED
    engines: tuple[Setting, ...] = ()

    def settings(self, part: str) -> dict[str, list[Setting]]:
        """Engines that every part makes."""
        return {self.pair: list(self.engines)}


def plans_of(config: GatesConfig, kind: RunKind) -> EnginePlans:
    """The engines of one kind of run."""
    engines = [
        Setting(k, mode.batch, mode.context + scenario_of(config, mode, kind).tokens + HEADROOM)
        for mode in config.mode
        for k in (0, mode.spec)
    ]
    if config.pair == "shipped":
        return EnginePlans(geometry="nano", pair=SHIPPED, engines=tuple(engines))
    return EnginePlans(geometry=config.geometry, pair=config.geometry, engines=tuple(engines))


def build_kernels(config: GatesConfig, kind: RunKind, arch: str, out: Path, share: tuple[int, int]) -> int:
    """Compile what a run needs into a folder of cubins; how many were made."""
    return build(plans_of(config, kind), [kind], arch, out, share=share)
