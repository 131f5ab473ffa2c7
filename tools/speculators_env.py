"""Make an environment with vllm-project/speculators, whose own model slow tests hold this project's drafts against.

It is kept apart from the project's: its pins are other people's, and a plain install of it replaces a CPU build of
torch by one with several gigabytes of CUDA. Here torch comes first, and speculators last and without dependencies.

    python3 tools/speculators_env.py DIR -- [arguments for pip, e.g. --find-links FOLDER or --index-url URL]
    EAGLE3_SPECULATORS_PYTHON=DIR/bin/python pytest tests/core/checkpoint/test_speculators.py
"""

from __future__ import annotations

import argparse
import subprocess
import venv
from pathlib import Path

# What speculators 0.9.0 imports for its models, at versions that were tried; it pins datasets to 5.1.0 at most.
TORCH = "torch==2.13.0"
IMPORTED = (
    "transformers==5.17.0", "datasets==5.1.0", "openai==3.54.0", "pydantic==2.14.3", "pydantic-settings==2.16.3",
    "loguru==0.7.3", "safetensors==0.8.0", "numpy==2.4.6", "tqdm==4.70.1",
)  # fmt: skip
WITHOUT_DEPENDENCIES = ("speculators==0.9.0", "hs-connectors==0.9.0")
CHECK = "import speculators.models.eagle3, importlib.metadata as m; print('speculators', m.version('speculators'))"


def main() -> None:
    """Environment, packages, and a look at whether the models can be imported."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="of the environment; made if it does not exist")
    parser.add_argument("pip", nargs="*", help="arguments for pip, behind --")
    given = parser.parse_args()
    venv.create(given.folder, with_pip=True)
    python = given.folder / "bin" / "python"
    for packages in ((TORCH,), (TORCH, *IMPORTED), ("--no-deps", *WITHOUT_DEPENDENCIES)):
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages, *given.pip], check=True)
    subprocess.run([python, "-c", CHECK], check=True)
    print(f"EAGLE3_SPECULATORS_PYTHON={python}")


if __name__ == "__main__":
    main()
