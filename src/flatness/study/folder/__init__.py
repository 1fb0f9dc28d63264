"""A study's folder: records and weights, each written whole or not at all."""
