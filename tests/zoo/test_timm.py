"""Networks of timm by name; timm itself need not be installed."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
from torch import nn

from flatness.errors import ModelError
from flatness.zoo.objects import build_timm


@pytest.fixture
def stand_in(monkeypatch):
    timm = types.ModuleType("timm")
    timm.list_models = lambda: ["resnet18", "vit_tiny_patch16_224"]  # type: ignore[attr-defined]
    timm.create_model = lambda name, **options: nn.Linear(3, options["num_classes"])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", timm)


@pytest.mark.parametrize("name", ["resnet18", "resnet18.a1_in1k"])
def test_a_network_with_its_options(name, stand_in):
    assert build_timm(name, num_classes=7).out_features == 7


def test_an_unknown_network_is_answered_with_the_nearest(stand_in):
    with pytest.raises(ModelError) as caught:
        build_timm("resnet19")
    assert (
        str(caught.value) == "Expected one of timm's 2 networks but got 'resnet19'. Did you mean 'resnet18'?"
    )


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed")
def test_without_timm():
    with pytest.raises(ModelError) as caught:
        build_timm("resnet18")
    assert str(caught.value) == (
        "Expected timm for 'timm:resnet18' but it is not installed. Type: pip install 'flatness[timm]'."
    )
