"""Curvature of layers: additive statistics, the exact engine, and eigenvalues from products."""
