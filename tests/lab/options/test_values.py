"""Names that options know beforehand are those of the rooms that own them."""

from __future__ import annotations

from typing import get_args

import pytest

from eagle3core.kernels.card import ARCHES
from lab.options.bench import SUITE_NAMES
from lab.options.exchange import TapDtypeName
from lab.options.kernels import SanitizedCardOptions
from lab.options.sweeps import HEAD_SIZES
from lab.options.training import SizeName
from lab.options.values import ArchName, GeometryName, PlantedGeometryName
from lab.pairs.planted import GEOMETRIES
from lab.parity.recording import DTYPES
from lab.probes.bench.suite import SUITES
from lab.probes.proofs.plans import SHIPPED
from lab.probes.sanitizer.plants import PLANTS
from lab.probes.sweeps.regimes import HEADS
from lab.training.sizes import SIZES

pytestmark = pytest.mark.reference


def test_names_that_may_be_typed_are_those_there_are() -> None:
    assert get_args(GeometryName) == tuple(GEOMETRIES)
    assert set(get_args(PlantedGeometryName)) == set(GEOMETRIES) - {SHIPPED}
    assert get_args(ArchName) == ARCHES
    assert get_args(SizeName) == tuple(SIZES)
    assert set(HEAD_SIZES) == set(HEADS)
    assert get_args(TapDtypeName) == tuple(DTYPES)
    assert tuple(SUITES) == SUITE_NAMES
    assert set(get_args(SanitizedCardOptions.model_fields["tool"].annotation)) == set(PLANTS)
