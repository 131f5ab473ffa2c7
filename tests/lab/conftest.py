"""What tests of the lab share: figures look the same whichever test ran before."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from lab.figures import use_style


@pytest.fixture(autouse=True)
def look_of_the_test_before() -> Iterator[None]:
    """The look of figures, which commands and experiments set for a whole process, and open ones end with each test."""
    with mpl.rc_context({"backend": "agg"}):
        yield
        plt.close("all")


@pytest.fixture
def page_style(look_of_the_test_before: None) -> None:
    """Figures look as they do on a report's page."""
    use_style()
