"""The `fived` command."""

from lightning_5d.cli.command import main

__all__ = ["main"]
