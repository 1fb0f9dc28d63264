"""What `landscape.density` found: quadratures of spectra, saved and drawn without the network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flatness.catalogue.soft_rank import soft_ranks
from flatness.files import check_shape
from flatness.landscape.captions import data_words, number_of
from flatness.landscape.storage import Array, Saved, named_arrays
from flatness.report.tables import format_value

if TYPE_CHECKING:
    import pandas

_PARTS = ("nodes", "weights")
_POINTS = 2001
_METRICS = {
    "euclidean": "the Hessian",
    "layerwise": "D^½ H D^½, every tensor in units of its own length,",
    "nodewise": "D^½ H D^½, every parameter in units of its own size,",
    "fisher": "D^½ H D^½, every parameter in units of its own gradients,",
    "relative": "D^½ H D^½, D = W Wᵀ ⊗ 1,",
    "whitened": "D^½ H D^½, D = W C Wᵀ ⊗ C⁺,",
}


@dataclass(frozen=True)
class SpectralQuadrature:
    """Gauss quadratures of one spectrum, a row for each run.

    Attributes:
        nodes: Places, (runs, steps).
        weights: Shares of the spectrum at these places; each row sums to 1.
        dimension: N, the number of eigenvalues.
    """

    nodes: Array
    weights: Array
    dimension: int

    def power_sum(self, power: int) -> tuple[float, float]:
        """Σ λ^power over all eigenvalues, and the standard error of the estimate.

        power=1 is the trace, power=2 the squared Frobenius norm.
        """
        runs = self.dimension * (self.weights * self.nodes**power).sum(1)
        return _averaged(runs)

    def soft_rank(self, ridge: float) -> tuple[float, float]:
        """Σ λ/(λ + ridge) over all eigenvalues, those below 0 left out, and the standard error."""
        return _averaged(soft_ranks(self.nodes, self.weights, self.dimension, ridge))


def _averaged(runs: Array) -> tuple[float, float]:
    """The mean over runs and its standard error."""
    error = float(runs.std(ddof=1)) / len(runs) ** 0.5 if len(runs) > 1 else float("nan")
    return float(runs.mean()), error


@dataclass(frozen=True)
class Density(Saved):
    """Densities of the eigenvalues of Hessians, by name: of networks, of their layers.

    Attributes:
        spectra: Quadratures by name.
        meta: Where it comes from: metric, data, loss, settings.
        notes: What the user should know.
    """

    kind = "density"
    text_fields = ("notes",)

    spectra: dict[str, SpectralQuadrature]
    meta: dict[str, Any] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the work before all of it was done."""
        return bool(self.meta.get("interrupted"))

    def width(self, name: str) -> float:
        """The width of the Gaussian that a spectrum is smoothed with by default: 1/100 of its range."""
        low, high = self.ends(name)
        return max(high - low, 1e-12) / 100

    def grid(self, name: str, width: float | None = None) -> Array:
        """Evenly spaced λ that hold a spectrum."""
        low, high = self.ends(name)
        room = 4 * (width or self.width(name))
        return np.linspace(low - room, high + room, _POINTS)

    def curve(self, name: str, grid: Array, width: float | None = None) -> tuple[Array, Array]:
        """The density at each λ of a grid, smoothed by a Gaussian, and its standard error over runs.

        Args:
            name: Which spectrum.
            grid: Where.
            width: Standard deviation of the Gaussian; `width(name)` when None.
        """
        own, sigma = self.spectra[name], width or self.width(name)
        runs = np.zeros((len(own.nodes), len(grid)))
        for nodes, weights, run in zip(own.nodes, own.weights, runs, strict=True):
            bumps = np.exp(-0.5 * ((grid[:, None] - nodes) / sigma) ** 2) / (sigma * np.sqrt(2 * np.pi))
            run[:] = bumps @ weights
        several = len(runs) > 1
        error = runs.std(0, ddof=1) / len(runs) ** 0.5 if several else np.full(len(grid), np.nan)
        return runs.mean(0), error

    def ends(self, name: str) -> tuple[float, float]:
        """The smallest and the largest eigenvalue that a run met."""
        own = self.spectra[name]
        counted = own.nodes[own.weights > 1e-14]
        return float(counted.min()), float(counted.max())

    def caption(self) -> str:
        """What a picture of it shows, in a sentence or two."""
        what = _METRICS.get(str(self.meta.get("metric")), "the Hessian")
        runs, steps = ({own.nodes.shape[axis] for own in self.spectra.values()} for axis in (0, 1))
        return (
            f"Density of the eigenvalues of {what} of {self.meta.get('loss', 'the loss')}"
            f"{data_words(self.meta)}; mean and two standard errors over {number_of(runs, 'run')} of Lanczos "
            f"with {number_of(steps, 'step')}, smoothed by a Gaussian of 1/100 of the range."
        )

    def to_frame(self) -> pandas.DataFrame:
        """A tidy table: name, run, node, weight."""
        import pandas

        frames = []
        for name, own in self.spectra.items():
            runs, steps = own.nodes.shape
            columns = {
                "name": name,
                "run": np.repeat(np.arange(runs), steps),
                "node": own.nodes.ravel(),
                "weight": own.weights.ravel(),
            }
            frames.append(pandas.DataFrame(columns))
        return pandas.concat(frames, ignore_index=True)

    def _arrays(self) -> dict[str, Array]:
        parts = enumerate(self.spectra.values())
        return {f"{part} {place}": getattr(own, part) for place, own in parts for part in _PARTS}

    def _texts(self) -> dict[str, Any]:
        return super()._texts() | {"spectra": {name: own.dimension for name, own in self.spectra.items()}}

    @classmethod
    def _fields(cls, arrays: dict[str, Array], meta: dict[str, Any]) -> dict[str, Any]:
        check_shape(meta, {"spectra": {}})
        spectra = {}
        for place, (name, dimension) in enumerate(meta.pop("spectra").items()):
            nodes, weights = named_arrays(arrays, [f"{part} {place}" for part in _PARTS]).values()
            spectra[name] = SpectralQuadrature(nodes, weights, dimension)
        return super()._fields(arrays, meta) | {"spectra": spectra}

    def __str__(self) -> str:
        """The caption; for each spectrum its ends, trace and Frobenius norm."""
        lines = [self.caption()]
        for name, own in self.spectra.items():
            low, high = self.ends(name)
            trace, square = (format_value(*own.power_sum(power)) for power in (1, 2))
            lines.append(
                f"{name}: {own.dimension:,} eigenvalues from {low:.4g} to {high:.4g}, "
                f"trace {trace}, ‖·‖²_F {square}"
            )
        return "\n  ".join([*lines, *self.notes])

    __repr__ = __str__
