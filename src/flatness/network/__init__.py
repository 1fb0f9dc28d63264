"""A model as layers (W, Φ, δ) and as a graph of operators; nothing here knows a loss."""
