"""What is asked for: the words of the user, checked once, and what follows from them alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from flatness.catalogue.measure import SPECTRA, Measure
from flatness.catalogue.registry import adapted_measures
from flatness.curvature.spectra import SpectrumRequest
from flatness.errors import OptionError, listed, nearest
from flatness.measuring import CURVATURES, METHODS

SPECTRUM_PARTS = {
    "layer_eigenvalue": "whole",
    "row_eigenvalues": "rows",
    "relative_eigenvalue": "relative",
    "whitened_eigenvalue": "whitened",
}
"""The eigenvalue problem of a layer that gives what a measure needs."""

# Products per batch that method="exact" does at most for layers with smooth operators after them.
LARGEST_BRUTE_FORCE = 1024


@dataclass(frozen=True)
class MeasureRequest:
    """What to measure, and how.

    Attributes:
        measures: The measures, each as its options make it.
        options: Their options, by measure.
        layers: The layers, in the user's words.
        method: "auto", "exact" or "sampled".
        curvature: "hessian", "gauss_newton" or "finite_differences".
        precision: The relative standard error that samples aim at.
        max_passes: The most probes.
    """

    measures: list[Measure]
    options: dict[str, dict[str, Any]]
    layers: str | Iterable[str] | None = None
    method: str = "auto"
    curvature: str = "hessian"
    precision: float = 0.01
    max_passes: int = 100

    def __post_init__(self) -> None:
        """Refuse words and numbers that mean nothing."""
        _check_choice("method", self.method, METHODS)
        _check_choice("curvature", self.curvature, CURVATURES)
        if not isinstance(self.precision, (int, float)) or not 0 < self.precision < 1:
            raise OptionError(
                "Expected precision to be a relative standard error between 0 and 1 but got "
                f"{self.precision!r}. For example precision=0.01."
            )
        if not hasattr(self.max_passes, "__index__") or self.max_passes < 2:
            raise OptionError(
                f"Expected max_passes to be an integer of at least 2 but got {self.max_passes!r}. A "
                "standard error needs at least two probes per sample."
            )

    @property
    def needs(self) -> frozenset[str]:
        """What the measures need of layers in the shared pass."""
        return self._all_needs - SPECTRA

    @property
    def layer_spectra(self) -> list[str]:
        """The eigenvalue problems to solve for every layer."""
        return [SPECTRUM_PARTS[need] for need in sorted(self._all_needs & SPECTRA)]

    @property
    def network_spectra(self) -> dict[str, SpectrumRequest]:
        """The spectra of the network's Hessian to find, by measure."""
        return {
            measure.name: _spectrum_request(self.options[measure.name])
            for measure in self.measures
            if "spectrum" in measure.network_needs
        }

    @property
    def of_layers(self) -> bool:
        """Whether any measure is about layers."""
        return any(measure.of_layers for measure in self.measures)

    @property
    def explores(self) -> bool:
        """Whether any measure iterates or ascends over the network's parameters."""
        return any(measure.explore or "spectrum" in measure.network_needs for measure in self.measures)

    @property
    def beyond_layers(self) -> bool:
        """Whether any measure has a value of its own for the network."""
        return self.explores or any(measure.network is not None for measure in self.measures)

    @property
    def differences(self) -> bool:
        """Whether products with the Hessian are differences of gradients."""
        return self.curvature == "finite_differences"

    @property
    def enumeration_limit(self) -> int:
        """The largest parameter whose entries are probed one by one: what random directions may cost."""
        return {"exact": LARGEST_BRUTE_FORCE, "sampled": 0}.get(self.method, self.max_passes)

    @property
    def _all_needs(self) -> frozenset[str]:
        return frozenset().union(*(measure.needs for measure in self.measures))


def measure_request(
    measures: str | Iterable[str], options: Mapping[str, Mapping[str, Any]] | None = None, **how: Any
) -> MeasureRequest:
    """The words of the user, or an error about the first that is unknown.

    Args:
        measures: As `flatness.measure` takes it.
        options: As `flatness.measure` takes it.
        **how: More attributes of `MeasureRequest`.
    """
    return MeasureRequest(*adapted_measures(measures, options), **how)


def _spectrum_request(options: Mapping[str, Any]) -> SpectrumRequest:
    known = {item.name for item in fields(SpectrumRequest)}
    return SpectrumRequest(**{key: value for key, value in options.items() if key in known})


def _check_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(
            f"Expected {argument} to be one of {listed(choices)} but got {value!r}.{nearest(value, choices)} "
            f"The default is {choices[0]!r}."
        )
