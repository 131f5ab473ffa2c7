"""`eagle3lab warm`: the kernels of engines to come, compiled side by side, with no GPU; or packed into one file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from eagle3core.config import EngineConfig
from eagle3core.kernels import Variant, cubins, launch
from eagle3core.loading import launched_kernels, needed_kernels
from eagle3core.speculative import SpeculativeConfig
from lab.ending import tell_summary
from lab.errors import EXIT_PASSED
from lab.options.kernels import WarmOptions
from lab.options.values import ArchName
from lab.pairs.planted import empty_models, find_geometry
from lab.probes.start.parts import models_for

HERE_WITHOUT_A_GPU: ArchName = "sm_90a"


def run(options: WarmOptions) -> int:
    """Compiles what is missing and says what that took."""
    arch = options.arch or (launch.device_arch() if torch.cuda.is_available() else HERE_WITHOUT_A_GPU)
    wanted = wanted_kernels(options, arch)
    with cubins.Compiling(wanted, arch, folder=options.out) as under_way:
        done = under_way.wait()
    where = options.out or cubins.cache_folder()
    summary = {"command": "warm", "arch": arch, **asdict(done), "folder": str(where)}
    if options.archive is not None:
        summary |= {"archive": str(options.archive), "archive_bytes": write_archive(options, wanted, arch)}
    tell_summary(summary)
    return EXIT_PASSED


def wanted_kernels(options: WarmOptions, arch: str) -> list[Variant]:
    """Every kernel of the engines that the options name, each once."""
    found = {cubins.cubin_name(variant, arch): variant for variant in _of_all(options, arch)}
    return [found[name] for name in sorted(found)]


def write_archive(options: WarmOptions, kernels: Iterable[Variant], arch: str) -> int:
    """The kernels in one file, and its size in bytes; the same kernels give the same bytes."""
    assert options.archive is not None
    found = {}
    for variant in kernels:
        name = cubins.cubin_name(variant, arch)
        kept = cubins.read_from(options.out, name) if options.out is not None else None
        found[name] = kept or cubins.cubin(variant, arch)
    models = [*options.geometry] if options.geometry else ["on disk"]
    about = {"arch": arch, "models": models, "drafts": list(options.spec), "slots": list(options.batch)}
    cubins.write_archive(options.archive, found, about)
    return options.archive.stat().st_size


def _of_all(options: WarmOptions, arch: str) -> Iterable[Variant]:
    depths = options.spec if options.geometry or options.draft else (0,)
    for name in options.geometry:
        models = empty_models(find_geometry(name), options.draft_weights, options.target_weights)
        for config in _configs(options, name, depths):
            yield from launched_kernels(*models_for(models, config), config, arch)
    for config in _configs(options, options.draft, depths) if options.target else ():
        yield from needed_kernels(options.target, config, arch)


def _configs(options: WarmOptions, model: str, depths: Iterable[int]) -> Iterator[EngineConfig]:
    """Settings of the engines, whose draft lies in `model` or is planted there."""
    of_draft: dict[str, Any] = {name: options.formats[name] for name in ("draft_weights", "draft_cache_dtype")}
    of_target: dict[str, Any] = {name: options.formats[name] for name in ("target_weights", "cache_dtype")}
    for k in depths:
        spec = SpeculativeConfig(model=model, num_speculative_tokens=k, **of_draft) if k else None
        for batch in options.batch:
            yield EngineConfig(
                session_len=options.session_len,
                max_batch_size=batch,
                device="cpu",
                speculative_config=spec,
                **of_target,
            )
