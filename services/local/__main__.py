"""`python -m services.local`: the same as `percolator dev`."""

import sys

from services.local.command import main

if __name__ == "__main__":
    main(sys.argv[1:], "python -m services.local")
