"""``python -m flatness``."""

from flatness.cli.app import main

main()
