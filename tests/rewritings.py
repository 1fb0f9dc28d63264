"""What drawn rewritings are in the words of users: factors that do the same again, and that undo it."""

import torch

from flatness.symmetry.rewriting.equality import Comparison
from flatness.symmetry.rewriting.rescaling import rescaled_copy
from flatness.symmetry.trace.forward_pass import default_forward


def changed_copy(model, x, rescaling):
    """A copy of the model, changed and compared with it."""
    return rescaled_copy(model, rescaling, Comparison(model, x, default_forward))


def factors_of(rescaling):
    """What `flatness.rescale` takes as ``factors`` to do the same again."""
    found, scales = rescaling.symmetries, torch.cat([rescaling.scales, rescaling.scales.new_ones(1)])
    if rescaling.kind == "output":
        return {"scale": float(scales[found.output]), "shift": rescaling.shift}
    if rescaling.kind == "permutation":
        comes = torch.argsort(rescaling.scales).tolist()
        return {name: _order(action.rows.tolist(), comes) for name, action in found.layers.items()}
    if rescaling.kind == "layerwise":
        return {
            name: _first(scales, action.rows) / _first(scales, action.columns)
            for name, action in found.layers.items()
        }
    return {name: scales[action.rows] for name, action in found.layers.items()}


def inverse_of(rescaling):
    """What `flatness.rescale` takes as ``factors`` to undo it."""
    factors = factors_of(rescaling)
    if rescaling.kind == "output":
        return {"scale": 1 / factors["scale"], "shift": -factors["shift"] / factors["scale"]}
    if rescaling.kind == "permutation":
        return {name: torch.argsort(order) for name, order in factors.items()}
    return {name: 1 / value for name, value in factors.items()}


def _order(classes, comes):
    """New row i is old row order[i]."""
    place = {number: row for row, number in enumerate(classes)}
    stays = [number < 0 or comes[number] == number for number in classes]
    return torch.tensor([row if stays[row] else place[comes[number]] for row, number in enumerate(classes)])


def _first(scales, units):
    return 1.0 if units is None or not units.numel() else float(scales[units.flatten()[0]])
