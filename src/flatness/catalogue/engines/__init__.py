"""Solvers and extra passes behind some measures, each imported by the function that runs it."""
