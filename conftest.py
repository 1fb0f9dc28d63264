"""What an example in a docstring registers is forgotten after it: other tests count measures and layers."""

import pytest

from flatness.catalogue import registry
from flatness.network import layers


@pytest.fixture(autouse=True)
def as_loaded(request, monkeypatch):
    """Give doctests copies of the tables that grow."""
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
        monkeypatch.setattr(layers, "_VIEWS", dict(layers._VIEWS))
