"""A study file, read and checked."""
