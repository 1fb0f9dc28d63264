"""Published data sets on disk, by name: see `load`."""

from flatness.zoo.data import DATASETS, Dataset, load

__all__ = ["DATASETS", "Dataset", "load"]
