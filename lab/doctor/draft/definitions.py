"""The figures that are all called acceptance, of one run."""

from __future__ import annotations

from lab.acceptance.counts import DepthAcceptance


def definitions(counted: DepthAcceptance) -> dict[str, float]:
    """Every figure in use by its name, that of docs/requirements.md 1.X-19 first; without those that have no step."""
    steps = [step for response in counted.responses for step in response.req_metrics.steps]
    complete = [step for step in steps if not step.cut]
    n, k = max(len(complete), 1), counted.k
    accepted = sum(step.n_accepted for step in complete)
    drafted = sum(step.n_draft for step in complete)
    lengths = [length for length in counted.per_prompt if length is not None]
    answered = [response for response in counted.responses if response.req_metrics.steps]
    first = [step for response in answered[:1] for step in response.req_metrics.steps if not step.cut]
    told: dict[str, float | None] = {
        "acceptance length (bonus included, complete steps)": 1 + accepted / n if complete else None,
        "accepted drafts a step (without the bonus)": accepted / n,
        "acceptance rate (accepted over drafted tokens)": accepted / drafted if drafted else None,
        "length outside loops": counted.outside_loops.mean,
        "mean over prompts of their lengths": sum(lengths) / len(lengths) if lengths else None,
        "length with cut steps": sum(step.n_committed for step in steps) / len(steps) if steps else None,
        "tokens a pass of the target (prefill's counted)": counted.n_tokens / (len(steps) + len(counted.responses)),
        "length of the first prompt alone": sum(s.n_committed for s in first) / len(first) if first else None,
        "length at its largest (k + 1)": float(k + 1),
    }
    told |= {f"share of steps that accept draft {i + 1}": share for i, share in enumerate(counted.by_position)}
    told |= {
        f"acceptance of draft {i + 1} where those before it were": share
        for i, share in enumerate(counted.given_prefix)
        if i
    }
    return {name: value for name, value in told.items() if value is not None}
