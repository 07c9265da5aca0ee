"""`python -m karvan` is `karvan`."""

from karvan.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
