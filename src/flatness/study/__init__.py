"""Studies: many networks trained, measured and compared with their generalisation gap."""

from flatness.study.analysis.experiment import ExperimentStudy
from flatness.study.analysis.results import Study
from flatness.study.folder.archive import pack, unpack
from flatness.study.run.run import load, run
from flatness.study.spec.spec import Spec, names, read_spec

__all__ = ["ExperimentStudy", "Spec", "Study", "load", "names", "pack", "read_spec", "run", "unpack"]
