"""`python -m threepo` is the command `threepo`."""

import sys

from threepo.cli import main

if __name__ == "__main__":
    sys.exit(main())
