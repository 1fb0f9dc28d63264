"""``python -m flatness.cli``."""

from flatness.cli.app import main

main()
