"""`python -m threepo` is the command `threepo`; under torchrun, each rank runs it."""

import os
import sys

from threepo.cli import main
from threepo.ranks.group import started

if __name__ == "__main__":
    status = main()
    if started().size > 1:
        # Without the interpreter's end: meshes of devices keep their gloo groups alive, and a thread of such a group
        # that lets go of a tensor then aborts the process ("terminate called without an active exception").
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
