"""Notebooks opened in a running JupyterLab, in a real browser: run, moved, and looked at in both themes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_browser import absent, browser_page, jupyterlab, open_notebook, run_all, use_theme

from lab.night.copies import copy_notebooks

pytestmark = [pytest.mark.reference, pytest.mark.slow, pytest.mark.long]

LESS: dict[str, dict[str, Any]] = {
    "10_parity_stages": {"n_prompts": 1, "steps": 1, "max_prompt_tokens": 24, "fault": "wrong_tap"},
    "31_acceptance": {"n_prompts": 4, "max_new_tokens": 24, "ks": [3], "n_reference_prompts": 1, "uneven_k": 0},
    "33_doctor": {"n_prompts": 4, "max_new_tokens": 12},
}
# Of a colour: how light it is, 0 to 255.
LIGHTNESS = """element => {
  const [r, g, b] = getComputedStyle(element).color.match(/[\\d.]+/g).map(Number);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """JupyterLab on copies with less to do."""
    if absent():
        pytest.skip(absent())
    folder = tmp_path_factory.mktemp("by-hand")
    copies = folder / "copies"
    copy_notebooks(copies)
    for name, parameters in LESS.items():
        path = copies / f"{name}.ipynb"
        content = json.loads(path.read_text(encoding="utf-8"))
        [cell] = [cell for cell in content["cells"] if "parameters" in cell["metadata"].get("tags", [])]
        cell["source"] = "".join(cell["source"]) + "".join(f"\n{key} = {value!r}" for key, value in parameters.items())
        path.write_text(json.dumps(content), encoding="utf-8")
    with jupyterlab(copies, folder / "scratch") as found:
        yield found


def test_a_slider_that_is_moved_changes_its_figure_and_no_other(address: str) -> None:
    with browser_page() as page:
        open_notebook(page, address, "40_speed.ipynb")
        run_all(page)
        captions = page.locator(".jupyter-widgets figure.plot figcaption")
        before = captions.all_inner_texts()
        assert len(before) > 1
        assert "a step of spec-3 costs" in before[0]
        page.locator(".widget-slider .noUi-handle").nth(0).focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function(
            "() => document.querySelector('.jupyter-widgets figcaption').innerText.includes('spec-4')"
        )
        after = captions.all_inner_texts()
        assert "a step of spec-4 costs" in after[0]
        assert after[1:] == before[1:]
        page.locator(".widget-slider .noUi-handle").nth(1).focus()
        page.keyboard.press("Home")
        page.wait_for_function(
            "() => document.querySelector('.jupyter-widgets figcaption').innerText.includes('With 0% of drafts')"
        )
        assert "the best there is plain decoding" in captions.all_inner_texts()[0]


def test_a_prompt_is_picked_and_its_tokens_are_read_in_both_themes(address: str) -> None:
    with browser_page() as page:
        open_notebook(page, address, "31_acceptance.ipynb")
        run_all(page)
        view = page.locator(".jupyter-widgets .tokens")
        first = view.locator("summary").first.inner_text()
        assert first.startswith("Prompt 1 of 4")
        choices = page.locator(".widget-dropdown select")
        choices.select_option(index=3)
        page.wait_for_function("() => document.querySelector('.tokens summary').innerText.startsWith('Prompt 4 of 4')")
        token = view.locator("label.t-accepted").first
        token.click()
        assert "position 1: accepted" in view.locator(".t-more:visible").last.inner_text()
        lightness = {}
        for theme in ("JupyterLab Light", "JupyterLab Dark"):
            use_theme(page, theme)
            lightness[theme] = token.evaluate(LIGHTNESS)
            assert token.is_visible()
        assert lightness["JupyterLab Light"] < 80, "dark letters on light paper"
        assert lightness["JupyterLab Dark"] > 175, "light letters on dark paper"


def test_a_planted_fault_is_named_and_the_stages_that_feed_it_are_opened(address: str) -> None:
    with browser_page() as page:
        open_notebook(page, address, "10_parity_stages.ipynb")
        run_all(page)
        shown = page.locator(".jp-OutputArea-output")
        verdict = " ".join(shown.all_inner_texts())
        assert "the first is target.taps in prefill" in verdict
        caption = page.locator(".jupyter-widgets figcaption")
        assert caption.inner_text().startswith("target.taps in prefill")
        page.locator(".widget-dropdown select").select_option(label="prefill: target.embed")
        page.wait_for_function(
            "() => document.querySelector('.jupyter-widgets figcaption').innerText.includes('embed')"
        )
        assert caption.inner_text().startswith("target.embed in prefill")


def test_the_doctor_shows_its_finding_and_what_it_rests_on(address: str) -> None:
    with browser_page() as page:
        open_notebook(page, address, "33_doctor.ipynb")
        run_all(page)
        assert page.locator('figure[data-name="doctor-base"] svg').is_visible()
        said = " ".join(page.locator(".jp-OutputArea-output").all_inner_texts())
        assert "No known cause of low acceptance was found" in said
        assert "gate no known cause of low acceptance: passed" in said
