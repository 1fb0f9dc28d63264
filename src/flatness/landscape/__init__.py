"""Landscapes: loss and accuracy along lines and over planes, and the density of the Hessian's eigenvalues.

Arrays first: every function returns a result that saves, loads and is drawn without the network.
"""

from flatness.landscape.line_result import Line
from flatness.landscape.lines import line

__all__ = ["Line", "line"]
