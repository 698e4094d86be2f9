"""`python -m percolator.cli` is the `percolator` command."""

from percolator.cli import main

if __name__ == "__main__":
    main()
