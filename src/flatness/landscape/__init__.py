"""Landscapes: loss and accuracy along lines and over planes, and the density of the Hessian's eigenvalues.

Every function returns arrays that can be saved, loaded and drawn without the network.
"""

from flatness.landscape.densities import density
from flatness.landscape.density_result import Density
from flatness.landscape.line_result import Line
from flatness.landscape.lines import line
from flatness.landscape.surface_result import Surface
from flatness.landscape.surfaces import surface

__all__ = ["Density", "Line", "Surface", "density", "line", "surface"]
