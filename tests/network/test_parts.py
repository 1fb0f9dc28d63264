"""Modules, parameters and buffers by name: what torch's own iterators say, also of shared ones."""

import pytest
from torch import nn

from flatness.network import parts
from networks import CASES


def shared():
    """One module under two names, one parameter in two modules, one buffer in two norms, an empty slot."""
    inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    other = nn.Linear(3, 3)
    other.weight = inner[0].weight
    norm = nn.BatchNorm1d(3)
    norm.running_mean = inner[1].running_mean
    model = nn.ModuleDict({"a": inner, "b": nn.ModuleList([other, inner]), "c": norm})
    model.register_module("nothing", None)
    model.register_buffer("none", None)
    return model


class Renamed(nn.Sequential):
    """A model with names of its own."""

    def named_modules(self, *arguments, **options):
        yield from ((name.upper(), module) for name, module in super().named_modules(*arguments, **options))


class Closed(nn.Sequential):
    """A module that keeps its submodules to itself."""

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield prefix, self


MODELS = {
    **{name: CASES[name].build for name in list(CASES)[:8]},
    "shared": shared,
    "renamed": lambda: Renamed(nn.Linear(2, 2)),
    "closed": lambda: nn.Sequential(nn.Linear(2, 2), Closed(nn.Linear(2, 2)), nn.Linear(2, 2)),
    "renamed inside": lambda: nn.Sequential(shared(), nn.Sequential(Renamed(shared(), nn.Linear(2, 2)))),
}


@pytest.mark.parametrize("name", MODELS)
def test_parts_are_those_that_torch_names(name):
    model = MODELS[name]()
    assert parts.named_modules(model) == list(model.named_modules())
    assert parts.modules(model) == list(model.modules())
    assert list(map(id, parts.buffers(model))) == list(map(id, model.buffers()))
    own, torchs = parts.named_parameters(model), dict(model.named_parameters())
    assert [(key, id(value)) for key, value in own.items()] == [(k, id(v)) for k, v in torchs.items()]
    assert list(map(id, parts.parameters(model))) == list(map(id, model.parameters()))
