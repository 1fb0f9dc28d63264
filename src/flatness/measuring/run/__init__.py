"""The passes over the data that a plan asks for."""
