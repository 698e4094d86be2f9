"""`python -m percolator.services.local`: the same as `percolator dev`."""

import sys

from percolator.services.local.command import main

if __name__ == "__main__":
    main(sys.argv[1:], "python -m percolator.services.local")
