"""What measures work with that takes a solver or passes of its own; imported by the measure that runs it."""
