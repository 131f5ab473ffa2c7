"""Where to begin among the notebooks: every question there is, from a symptom to a notebook, and the runs there are."""

from __future__ import annotations

import html
from dataclasses import dataclass

from lab.figures import table_html
from lab.night.parameters import notebooks_folder, read_parameters, title
from lab.rows.runs import Runs


@dataclass(frozen=True)
class Symptom:
    """What somebody sees, the notebooks that say why, the first one first, and what may be moved there by hand."""

    seen: str
    notebooks: tuple[str, ...]
    by_hand: str = ""


SYMPTOMS = (
    Symptom("the output is not plain decoding's, or not Hugging Face's", ("11_parity_tokens", "10_parity_stages"),
            "open a stage: its errors, the worst elements, what feeds it"),
    Symptom("too few drafts are accepted", ("33_doctor", "31_acceptance"),
            "pick a prompt and see each of its tokens with what was proposed"),
    Symptom("drafts do not pay, or the depth is unclear", ("40_speed", "30_decode"),
            "slide the depth and the share of drafts accepted"),
    Symptom("a chain, or which tree", ("32_trees",), "choose a budget of nodes"),
    Symptom("the draft's head takes too long, or its vocabulary is too large", ("34_draft_vocabulary",)),
    Symptom("a step takes longer than its bytes", ("50_profile", "40_speed", "22_kernels"),
            "choose a GPU for the roofline"),
    Symptom("a kernel is wrong, slow or new", ("22_kernels", "20_fmha_sweep", "21_gemm_sweep")),
    Symptom("faster or slower than another engine", ("41_bench",)),
    Symptom("something moved since an earlier night", ("90_nightly", "42_perf_gates"),
            "pick two runs and lay them over each other"),
    Symptom("the first token of a process comes late", ("43_start",)),
    Symptom("the first token of a prompt comes late", ("44_prefill",)),
    Symptom("a machine that nothing is known of", ("00_environment",)),
)  # fmt: skip


def notebook_names() -> list[str]:
    """The packaged notebooks, in order."""
    return sorted(path.stem for path in notebooks_folder().glob("*.ipynb"))


def questions_html(*, links: bool) -> str:
    """A table of the notebooks with their questions.

    Args:
        links: to the notebooks, which lie beside the one that shows it.
    """
    rows = []
    for name in notebook_names():
        path = notebooks_folder() / f"{name}.ipynb"
        n_parameters = sum(spec.name not in ("run_dir", "job") for spec in read_parameters(path))
        rows.append([_linked(name, links), html.escape(title(path)), f"{n_parameters}"])
    return _table(["notebook", "question", "parameters"], rows)


def symptoms_html(*, links: bool) -> str:
    """A table from what is seen to the notebooks that say why; `links` as of `questions_html`."""
    rows = [
        [html.escape(each.seen), ", ".join(_linked(name, links) for name in each.notebooks), html.escape(each.by_hand)]
        for each in SYMPTOMS
    ]
    return _table(["you see", "open", "by hand"], rows)


def runs_html(runs: Runs) -> str:
    """A table of the finished runs, the newest first, each with its verdict in a sentence."""
    if not runs.found:
        return "<p>No run of this machine yet: <code>eagle3lab nightly</code> makes one, in ten minutes.</p>"
    newest = runs.found[::-1]
    return table_html(["run", "verdict"], [[path.name, str(summary.get("sentence", ""))] for path, summary in newest])


def unanswered() -> list[str]:
    """Notebooks that no symptom leads to, and names in `SYMPTOMS` that are no notebook."""
    named, known = {name for each in SYMPTOMS for name in each.notebooks}, set(notebook_names())
    return sorted((known - named - {"00_start_here"}) | (named - known))


def _linked(name: str, links: bool) -> str:
    return f'<a href="{name}.ipynb">{name}</a>' if links else name


def _table(columns: list[str], rows: list[list[str]]) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    cells = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<table class="cards"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
