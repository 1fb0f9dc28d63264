"""Studies: many networks trained, measured and held against their generalisation gap."""

from flatness.study.archive import pack, unpack
from flatness.study.experimenting import ExperimentStudy
from flatness.study.results import Study
from flatness.study.run import load, run
from flatness.study.spec import Spec, names, read_spec

__all__ = ["ExperimentStudy", "Spec", "Study", "load", "names", "pack", "read_spec", "run", "unpack"]
