"""`eagle3lab planted`: is a planted pair what its card says, and, if asked, its checkpoints on disk."""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import Any

import torch

from lab.ending import tell_summary
from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED
from lab.options.bench import PlantedOptions
from lab.pairs.on_disk import Pair
from lab.pairs.planted import PlantedPair, share_for_length
from lab.pairs.planted.check import DialCheck, Margin, check_dial, measure_margin, tokens_for
from lab.pairs.planted.disk import write_pair
from lab.pairs.planted.tokens import expected_length
from lab.probes.bench.command import chosen_device, chosen_dtype, resolved_device
from lab.probes.bench.load import read_models, watched_load
from lab.probes.bench.record import Rows
from lab.probes.bench.scenario import Scenario
from lab.probes.bench.source import open_pair
from lab.rows.environment import collect
from lab.rows.store import RowWriter

DEFAULT_LENGTH = 3.0


def run(options: PlantedOptions) -> int:
    """Writes and checks a planted pair; 0, 1 if it is not what its card says, 3 if nothing of it could be judged."""
    scenario = scenario_of(options)
    rows = Rows(options.out.stem if options.out else "planted", collect(), [])
    judged: list[bool] = []
    written = None
    if options.write is not None:
        pair = _pair(scenario)
        written = write_pair(options.write, pair)
        print(f"{options.write.name}: {pair.card()}")
    if options.load:
        judged.append(_check_load(scenario, written, rows))
    if not options.no_margin and (holds := _check_margin(scenario, rows)) is not None:
        judged.append(holds)
    if options.steps:
        judged.append(_check_dial(scenario, options.steps, rows))
    if options.out is not None:
        with RowWriter(options.out) as writer:
            for row in rows.rows:
                writer.write(row)
    passed = all(judged) if judged else None
    tell_summary({"command": "planted", "n_rows": len(rows.rows), "passed": passed})
    if passed is None:
        # A pair that is only written is not asked for its margin; else that was the one question, and it has no answer.
        return EXIT_PASSED if options.write is not None or options.no_margin else EXIT_COULD_NOT_RUN
    return EXIT_PASSED if passed else EXIT_GATE_FAILED


def scenario_of(options: PlantedOptions) -> Scenario:
    """The scenario of the options.

    Raises:
        ExperimentError: they name what is not there.
    """
    length = options.acceptance_length
    if length is None:
        length = min(DEFAULT_LENGTH, options.spec + 1.0)  # one draft commits at most two tokens
    geometry = options.shapes()
    # What is only made, written or loaded takes a CPU seconds a layer; decoding it would take hours.
    is_only_made = options.steps == 0 and options.no_margin
    device = resolved_device(options.device) if is_only_made else chosen_device(options.device, geometry)
    return Scenario(
        geometry=geometry,
        pair="planted",
        points=options.at,
        ks=(0, options.spec),
        share=options.share if options.share is not None else share_for_length(length, options.spec),
        dtype=chosen_dtype(options.dtype, device),
        device=device,
        peers=(),
        seed=options.seed,
        repeated=options.repeated,
    )


def _pair(scenario: Scenario) -> PlantedPair:
    return PlantedPair(
        scenario.geometry, share=scenario.share, repeated=scenario.repeated, seed=scenario.seed,
        dtype=getattr(torch, scenario.dtype), device=scenario.device,
    )  # fmt: skip


def _check_load(scenario: Scenario, written: Pair | None, rows: Rows) -> bool:
    """Whether making the models, or reading them from disk, takes little more memory than they do."""
    device, dtype = torch.device(scenario.device), getattr(torch, scenario.dtype)
    make = _pair(scenario).models if written is None else partial(read_models, written, dtype, device)
    with torch.no_grad():
        _, load = watched_load(make, device)
    how = "made" if written is None else "read"
    parameters = {"geometry": scenario.geometry, "dtype": scenario.dtype, "device": scenario.device, "how": how}
    rows.measured("load", load.values(), parameters, scenario)
    kept, peak, beyond = (f"{n / 1e9:.2f} GB" for n in (load.kept, load.peak, load.beyond))
    print(f"load: {how}, models {kept}, at most {peak} at once, {beyond} beyond them; holds {load.holds}", flush=True)
    gc.collect()
    return load.holds


def _check_margin(scenario: Scenario, rows: Rows) -> bool | None:
    """Whether the margin holds; None where there is none to measure."""
    if scenario.dtype == "float32":
        rows.missing("margin", "a margin is against fp32, which is the dtype itself", {"geometry": scenario.geometry})
        print("margin: missing: a margin is against fp32, which is the dtype itself; use --dtype bfloat16")
        return None
    with torch.no_grad():
        found: Margin = measure_margin(_pair(scenario))
    gc.collect()
    if scenario.device == "cuda":
        torch.cuda.empty_cache()
    values = {
        "gap": found.gap, "error": found.error, "ratio": found.ratio, "follows": found.follows, "holds": found.holds,
        "n_rows": found.n_rows,
    }  # fmt: skip
    rows.measured("margin", values, {"geometry": scenario.geometry, "dtype": scenario.dtype}, scenario)
    print(f"margin: gap {found.gap:.2f}, logit error {found.error:.4f}, ratio {found.ratio:.1f}, holds {found.holds}")
    return found.holds


def _check_dial(scenario: Scenario, n_steps: int, rows: Rows) -> bool:
    started = time.perf_counter()
    source = open_pair(scenario)
    assert source.planted is not None, "the scenario's pair is planted"
    print(f"{source.card}, made in {time.perf_counter() - started:.1f} s", flush=True)
    passed, k = True, scenario.ks[-1]
    for point in scenario.points:
        n_tokens = tokens_for(n_steps, point.batch, expected_length(source.planted.tokens.share, k))
        engine = source.engine(k, batch=point.batch, session_len=point.context + n_tokens + 1)
        with torch.no_grad():
            found: DialCheck = check_dial(source.planted, engine, n_steps=n_steps, context=point.context)
        parameters: dict[str, Any] = {"geometry": scenario.geometry, "dtype": scenario.dtype, "device": scenario.device}
        parameters |= {"context": point.context, "batch": point.batch, "spec_k": k}
        rows.measured("dial", {**found.values(), **source.card}, parameters, scenario)
        rates = ", ".join(f"{one.rate:.3f} [{one.interval[0]:.3f}, {one.interval[1]:.3f}]" for one in found.positions)
        print(
            f"{point} spec-{k}: planted share {found.share:.3f}; measured {rates}; {found.length:.3f} tokens a "
            f"step over {found.n_steps} steps (allowed: {max(found.allowed):.3f} from the planted share); "
            f"{found.n_wrong} requests not as planted; holds {found.holds}",
            flush=True,
        )
        passed &= found.holds
    return passed
