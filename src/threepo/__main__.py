"""`python -m threepo` is the command `threepo`."""

from threepo.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
