"""A replayer that records the stages which programs never form beside those they do."""

from __future__ import annotations

from eagle3core.step.program import Program
from eagle3core.step.replay import EagerReplayer, Staged, offer
from eagle3core.trace import Trace
from lab.parity.derived import derived, passes_of


class DerivedToo(EagerReplayer):
    """Offers a trace the stages that programs never form as well, once the stage they are read from has run."""

    def staged(self, program: Program) -> Staged:
        return lambda trace: self._play(program, trace)

    def _play(self, program: Program, trace: Trace) -> None:
        for stage, at in zip(program, passes_of(program), strict=True):
            super().staged((stage,))(trace)
            for name, tap in derived(stage, at):
                offer(trace, name, tap)
