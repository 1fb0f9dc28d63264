"""Independent libraries agree: BackPACK on the diagonal, curvlinops on traces and the largest eigenvalue."""

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import eigsh

import flatness
from flatness.catalogue.registry import unregister_measure

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def diagonal_measure():
    seen = {}

    def keep(view):
        seen[view.name] = view.statistics["diagonal"]
        return view.statistics["diagonal"].sum()

    flatness.register_measure(
        flatness.Measure(
            name="diagonal_sum",
            symbol="Σ",
            formula="Σ diag H",
            source="test",
            summary="",
            levels=("layer",),
            needs=frozenset({"diagonal"}),
            layer=keep,
        )
    )
    yield seen
    unregister_measure("diagonal_sum")


def network():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 6),
        torch.nn.ReLU(),
        torch.nn.Linear(6, 4),
    ).double()
    return model, torch.randn(20, 2, 8, 8, dtype=torch.float64), torch.randint(4, (20,))


def test_diagonal_agrees_with_backpack(diagonal_measure):
    backpack = pytest.importorskip("backpack")
    from backpack.extensions import DiagGGNExact

    model, x, y = network()
    flatness.measure(model, (x, y), measures="diagonal_sum", batch_size=7, progress=False)
    extended, loss = backpack.extend(model), backpack.extend(torch.nn.CrossEntropyLoss())
    with backpack.backpack(DiagGGNExact()):
        loss(extended(x), y).backward()
    for name in ("0", "4", "6"):
        expected = extended.get_submodule(name).weight.diag_ggn_exact
        torch.testing.assert_close(
            diagonal_measure[name].reshape(expected.shape), expected, rtol=1e-10, atol=1e-14
        )


def test_trace_and_eigenvalue_agree_with_curvlinops():
    curvlinops = pytest.importorskip("curvlinops")
    model, x, y = network()
    report = flatness.measure(
        model, (x, y), measures=["hessian_trace", "hessian_top_eigenvalue"], progress=False
    )
    for name in ("0", "4", "6"):
        weights = [model.get_submodule(name).weight]
        operator = curvlinops.HessianLinearOperator(
            model, torch.nn.CrossEntropyLoss(), weights, [(x, y)], check_deterministic=False
        ).to_scipy()
        dense = operator @ np.eye(operator.shape[0])
        assert report.value("hessian_trace", layer=name) == pytest.approx(np.trace(dense), rel=1e-8)
        top = eigsh(operator, k=1, which="LA", return_eigenvectors=False)[0]
        assert report.value("hessian_top_eigenvalue", layer=name) == pytest.approx(top, rel=1e-6)
