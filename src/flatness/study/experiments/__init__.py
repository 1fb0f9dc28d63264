"""Experiments of the papers on synthetic data, as plain functions that return tables."""
