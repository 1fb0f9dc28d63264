"""Names to objects: data sets, models and checkpoints."""
