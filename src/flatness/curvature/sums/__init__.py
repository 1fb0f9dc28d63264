"""Additive statistics of layers: exact, sampled, and through parameters."""
