"""The command line `trimtab`. Commands import what they run only when they run."""

from controller.cli.root import main

__all__ = ["main"]
