"""Every network that `rescale` returns computes the same on data that nobody has seen."""

import warnings
from functools import partial

import torch

import flatness
from flatness.symmetry.rewriting.kinds import KINDS
from property.budget import count, for_examples
from property.recipes import build, drawn
from property.reference import Reference
from untouched import untouched

# Products of a few factors between 0.3 and 3 and their inverses, relative to the largest output.
ROUNDING = 1e-10
# Scale and shift of the kind "output", whose outputs differ by just that.
SCALE, SHIFT = 1.7, 0.4


def test_a_rewritten_network_is_equal_on_fresh_data():
    for_examples("rewriting", 20, partial(drawn, tasks=("cross_entropy", "mse")), hold_rewritings)


def hold_rewritings(recipe):
    """Rewrite a network in every way and compare outputs on new inputs, small and large."""
    made = build(recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            with untouched(made.model, made.x):
                found = flatness.symmetries(made.model, made.x)
                assert str(found)
                assert str(found.permutations)
        except flatness.FlatnessError:
            count("rewriting, refused")
            return
        for kind in KINDS:
            hold_rewriting(made, kind)
        if Reference(made).exists():
            hold_vertical_directions(made, found)


def hold_rewriting(made, kind):
    factors = {"scale": SCALE, "shift": SHIFT} if kind == "output" else None
    try:
        with untouched(made.model, made.x):
            equal = flatness.rescale(
                made.model, made.x, kind, made.recipe.seed, low=0.3, high=3.0, factors=factors
            )
    except flatness.FlatnessError:
        count(f"{kind}, refused")
        return
    count(f"{kind}, compared")
    for inputs in (made.fresh(), made.fresh(20) if made.recipe.tokens else 3 * made.fresh(20)):
        with torch.no_grad():
            before, after = made.model(inputs.clone()), equal(inputs.clone())
        expected = SCALE * before + SHIFT if kind == "output" else before
        size = float(expected.abs().max())
        difference = float((after - expected).abs().max())
        assert not difference > ROUNDING * (1 + size), (kind, difference, size)


def hold_vertical_directions(made, found):
    """Along them nothing changes: the derivative of every output is 0."""
    for kind in ("layerwise", "neuronwise"):
        with untouched(made.model, made.x):
            directions = flatness.vertical_directions(made.model, found, kind)
        for direction in directions[:3]:
            inputs = made.fresh()
            parameters = dict(made.model.named_parameters())
            output = made.model(inputs.clone())
            if not output.requires_grad:
                continue
            weights = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
            gradients = torch.autograd.grad(
                (weights * output).sum(), list(parameters.values()), materialize_grads=True
            )
            terms = [
                (gradient * direction[name]).sum()
                for name, gradient in zip(parameters, gradients, strict=True)
                if name in direction
            ]
            if terms and all(term.isfinite() for term in terms):
                size = float(sum(term.abs() for term in terms))
                slope = float(sum(terms))
                assert abs(slope) <= ROUNDING * (1 + size), ("vertical", kind, slope, size)
