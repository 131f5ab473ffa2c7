"""A job's rows are taken up again only while nothing has changed that its result depends on."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.rows.environment import source_hash

pytestmark = pytest.mark.reference
ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("eagle3core/kernels/tuned/h200.json", "lab/settings.toml", "lab/rows/store.py")


def written(root: Path) -> Path:
    for name in (*SOURCES, "eagle3core/__init__.py", "lab/__pycache__/store.json"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


@pytest.mark.parametrize("name", SOURCES)
def test_a_changed_setting_or_source_of_either_package_changes_the_hash(name: str, tmp_path: Path) -> None:
    before = source_hash(written(tmp_path))
    (tmp_path / name).write_text("changed")
    assert source_hash(tmp_path) != before
    (tmp_path / name).write_text(name)
    assert source_hash(tmp_path) == before
    (tmp_path / name).rename(tmp_path / f"{name[:-4]}_moved{Path(name).suffix}")
    assert source_hash(tmp_path) != before


def test_what_python_keeps_beside_the_sources_does_not(tmp_path: Path) -> None:
    before = source_hash(written(tmp_path))
    (tmp_path / "lab/__pycache__/store.json").write_text("changed")
    (tmp_path / "README.md").write_text("of no package")
    assert source_hash(tmp_path) == before


def test_the_tuned_settings_of_the_kernels_lie_where_the_hash_sees_them() -> None:
    from eagle3core.kernels.tuned import FOLDER

    assert list(FOLDER.glob("*.json"))
    assert (ROOT / "eagle3core") in FOLDER.parents
