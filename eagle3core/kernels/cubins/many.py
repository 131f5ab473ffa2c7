"""Many kernels at once: what of them is missing is compiled in processes side by side, the longest first."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from eagle3core.backend import processes_for
from eagle3core.kernels.card import Card, Variant
from eagle3core.kernels.compile import compiler_versions
from eagle3core.kernels.cubins.lookup import build, cubin, is_stored, kept_folder
from eagle3core.kernels.cubins.names import cache_name, cubin_name
from eagle3core.kernels.cubins.places import read_from
from eagle3core.kernels.cubins.pool import Pool
from eagle3core.kernels.cubins.progress import ProgressLine

log = logging.getLogger("eagle3core")

Job = tuple[Variant, str, Path, str]  # of `lookup.build`

# Memory that a process of the compiler takes beside what all share, bytes.
_PROCESS_BYTES = 400 << 20
# Processor seconds to compile kernels of a factory, about, on a server of 2023: what takes longest begins first.
_SECONDS = {
    "make_attention_rows": 3.6, "make_attention_streams": 2.4, "make_gemm_ring": 1.3,
    "make_gemm_group": 1.0,
}  # fmt: skip
_OTHER_SECONDS = 0.4
# What every job needs, and takes a second to import: Numba's compiler with our instructions.
_COMPILERS = ("eagle3core.kernels.isa.ptx", "eagle3core.kernels.isa.inlined", "numba.cuda.compiler")


@dataclass(frozen=True)
class Compilation:
    """What compiling many took.

    Attributes:
        n_wanted, n_compiled: different kernels, and those of them that were missing.
        n_processes: that compiled; 0 where nothing was missing.
        seconds: until all were there. processor_s: of the compilers, together.
    """

    n_wanted: int
    n_compiled: int
    n_processes: int
    seconds: float
    processor_s: float

    def __str__(self) -> str:
        return (
            f"{self.n_compiled} of {self.n_wanted} kernels compiled in {self.seconds:.1f} s by {self.n_processes} "
            f"processes, {self.processor_s:.1f} s of processors"
        )


class Compiling:
    """The missing ones of many kernels, under way in processes of their own from the start; `wait` ends it.

    Args:
        folder: where to put them under the names of an ahead-of-time folder, those excepted that lie there already,
            made by this machine's compilers; None: into the cache, those excepted that are found anywhere.
        n_processes: most; by default one a processor, as memory goes.
    """

    def __init__(
        self, variants: Iterable[Variant], arch: str, *, folder: Path | None = None, n_processes: int | None = None
    ) -> None:
        self._began, self._arch = time.monotonic(), arch
        wanted = {cubin_name(variant, arch): variant for variant in variants}
        self._n_wanted, self._folder = len(wanted), folder
        self._jobs = self._sorted([v for name, v in wanted.items() if not self._is_there(v, name)])
        most = n_processes or processes_for(len(self._jobs), _PROCESS_BYTES)
        self._pool = self._started(most) if most > 1 and len(self._jobs) > 1 else None

    def __enter__(self) -> Compiling:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.close()

    @property
    def n_missing(self) -> int:
        """Kernels that had to be compiled."""
        return len(self._jobs)

    def wait(self, tell: Callable[[str], None] = lambda line: None) -> Compilation:
        """Until every kernel is there; one that its process could not make is made here, so its error is seen.

        Raises:
            BackendUnavailable: there is no compiler, or it failed.
            OSError: the folder that was named cannot be written.
        """
        n_processes = self._pool.n_processes if self._pool else min(1, len(self._jobs))
        weights, taken = [_expected_s(variant) for variant, *_ in self._jobs], 0.0
        with ProgressLine("compiling kernels", weights, max(n_processes, 1)) as line:
            for index, seconds in self._made():
                taken += seconds
                tell(f"{self._jobs[index][3]}: {seconds:.1f} s")
                line.done(weights[index])
        done = Compilation(self._n_wanted, self.n_missing, n_processes, time.monotonic() - self._began, taken)
        if done.n_compiled:
            log.info("[EAGLE] %s", done)
        return done

    def _is_there(self, variant: Variant, name: str) -> bool:
        if self._folder is None:
            return is_stored(variant, self._arch)
        found = read_from(self._folder, name)
        return found is not None and found[1].get("compilers") == compiler_versions()

    def _sorted(self, missing: Sequence[Variant]) -> list[Job]:
        if not missing:
            return []
        folder = self._folder or kept_folder()
        name_of = cache_name if self._folder is None else cubin_name
        longest_first = sorted(missing, key=lambda variant: (-_expected_s(variant), variant.name))
        return [(variant, self._arch, folder, name_of(variant, self._arch)) for variant in longest_first]

    def _started(self, n_processes: int) -> Pool | None:
        try:
            return Pool(build, self._jobs, n_processes, imports=_COMPILERS)
        except (OSError, pickle.PicklingError, AttributeError, TypeError) as error:
            log.info("[EAGLE] kernels are compiled one after the other: %s", error)
            return None

    def _made(self) -> Iterator[tuple[int, float]]:
        """Places of jobs with the processor time they took, as they end."""
        left = list(range(len(self._jobs)))
        if self._pool is not None:
            left = []
            for result in self._pool.results():
                if result.failure is None:
                    yield result.index, result.seconds
                else:
                    log.info("[EAGLE] %s is compiled here: %s", self._jobs[result.index][3], result.failure)
                    left.append(result.index)
        for index in left:
            began = time.process_time()
            self._make(self._jobs[index])
            yield index, time.process_time() - began

    def _make(self, job: Job) -> None:
        if self._folder is None:
            cubin(job[0], job[1])
        else:
            build(*job)


def compile_missing(variants: Iterable[Variant], arch: str) -> Compilation:
    """Compile into the cache what is found nowhere, in as many processes as there are processors.

    Raises:
        BackendUnavailable: there is no compiler, or it failed.
    """
    with Compiling(variants, arch) as under_way:
        return under_way.wait()


def build_cubins(
    wanted: Sequence[Card] | Sequence[Variant], arch: str, out: Path, *, tell: Callable[[str], None] = lambda line: None
) -> int:
    """Compile variants, or all variants of cards, for `arch` into `out`. Needs no GPU.

    Those already there are skipped if the compilers that made them are this machine's.

    Returns:
        How many were compiled now.

    Raises:
        BackendUnavailable: there is no compiler, or it failed.
        OSError: `out` cannot be written.
    """
    variants: list[Variant] = []
    for item in wanted:
        variants += [item] if isinstance(item, Variant) else [*item.variants(arch), *item.slow_variants(arch)]
    with Compiling(variants, arch, folder=out) as under_way:
        return under_way.wait(tell).n_compiled


def _expected_s(variant: Variant) -> float:
    return _SECONDS.get(variant.make.__qualname__, _OTHER_SECONDS)
