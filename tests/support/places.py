"""Where things lie, for tests in any folder."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
GOLDEN = DATA / "golden" / "eagle3_random"
SUPPORT = ROOT / "tests" / "support"
NIGHT_8B = ROOT / "reports" / "reference" / "h200" / "night-8b"
