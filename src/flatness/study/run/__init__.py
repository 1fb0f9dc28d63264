"""A study run: units of work, where they run, and how far they are."""
