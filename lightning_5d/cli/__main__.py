"""`python -m lightning_5d.cli` is `fived`."""

import sys

from lightning_5d.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
