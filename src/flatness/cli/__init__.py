"""The command line: parse, call, print. Nothing here loads torch before a command needs it."""

from flatness.cli.app import main

__all__ = ["main"]
