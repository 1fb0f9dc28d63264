"""The version of this package, said here alone: also where it runs from its source."""

__version__ = "0.1.0"
