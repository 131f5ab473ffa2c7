"""`python -m lab` is `eagle3lab`."""

from lab.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
