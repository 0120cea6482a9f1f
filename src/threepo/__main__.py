"""`python -m threepo` is the command `threepo`; under torchrun, each rank runs it."""

from threepo.cli import main
from threepo.ranks.launch import leave

if __name__ == "__main__":
    leave(main())
