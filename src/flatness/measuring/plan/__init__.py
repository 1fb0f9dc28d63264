"""From what was asked and what was examined to what will run, and why."""
