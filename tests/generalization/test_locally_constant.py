"""Definition 9: what labels do around samples."""

import math

import pytest
import torch

import flatness
import small
from flatness.generalization.fitting import LinearPredictor
from flatness.generalization.locally_constant import fitted_order, label_constancy
from flatness.losses import resolve_loss
from untouched import untouched

SQUARED = resolve_loss("squared_error")


def grid(n=40):
    """Points on a line, far apart, all of length about 10."""
    angle = torch.linspace(0, 1.5, n, dtype=torch.float64)
    return 10 * torch.stack([angle.cos(), angle.sin()], dim=1)


def constant(value):
    return LinearPredictor(
        torch.zeros(1, 2, dtype=torch.float64), torch.full((1,), value, dtype=torch.float64)
    )


@pytest.mark.parametrize("power", [1, 2, 3])
def test_the_order_is_the_power_with_which_labels_leave_their_value(power):
    """y(z) = d(z, nearest sample)^p and ψ = 1: |(1 − y)² − 1| = 2y − y², of order p."""
    z = grid()
    y = torch.zeros(len(z), 1, dtype=torch.float64)

    def label(moved):
        return torch.cdist(moved, z).amin(1, keepdim=True) ** power

    deltas = (0.0005, 0.001, 0.002)
    found = label_constancy(constant(1.0), z, y, SQUARED, labels=label, deltas=deltas, draws=6)
    assert found.order == pytest.approx(power, abs=0.05)
    assert found.holds is (power == 3)
    assert found.curve[1] < found.worst_curve[1]
    assert found.flips == (1.0, 1.0, 1.0)


def test_labels_that_do_not_change_have_infinite_order():
    z = grid()
    y = torch.ones(len(z), 1, dtype=torch.float64)
    found = label_constancy(
        constant(0.3), z, y, SQUARED, labels=lambda moved: torch.ones(len(moved), 1).double()
    )
    assert found.order == math.inf
    assert found.holds
    assert found.value == 0


def test_a_half_space_changes_labels_for_the_share_of_points_beyond_it():
    """Points at distance r from the line; ψ = 1: a changed label changes (1 − y)² by 4."""
    z = torch.cat([torch.full((500, 1), 10.0), torch.zeros(500, 1)], dim=1).double()
    z[:, 1] = torch.linspace(-1, 1, 500).double()
    y = torch.where(z[:, 1:] > 0, 1.0, -1.0).double()
    found = label_constancy(
        constant(1.0),
        z,
        y,
        SQUARED,
        labels=lambda moved: torch.where(moved[:, 1:] > 0, 1.0, -1.0).double(),
        deltas=[0.05],
        draws=40,
    )
    assert found.value == pytest.approx(4 * found.flips[0])
    # A point at height h leaves with the share of its disc beyond the line: on average 2r/(3π), r = 0.5.
    assert found.flips[0] == pytest.approx(2 / (3 * math.pi) * 0.5, rel=0.1)


def test_models_are_looked_at_through_the_part_that_follows_the_layer():
    model = small.network()
    x, y = small.data(40)
    with untouched(model, x, y):
        found = flatness.locally_constant_labels(
            model, (x, y), layer="head", deltas=(0.1, 0.5), progress=False
        )
    with torch.no_grad():
        features = model.relu(model.fc1(x))

        def head(z):
            return model.head(z)

        again = label_constancy(head, features, y, resolve_loss("cross_entropy"), deltas=(0.1, 0.5))
    assert found.curve == pytest.approx(again.curve)
    assert found.labels == "nearest sample"
    assert "a heuristic" in str(found)
    hidden = flatness.locally_constant_labels(model, (x, y), layer="fc1", deltas=(0.5,), progress=False)
    assert hidden.layer == "fc1"
    assert math.isnan(hidden.order) or hidden.order == math.inf


def test_layers_that_something_goes_around_are_refused():
    model = small.Net(lambda net, x: net.head(net.fc1(x) + net.fc2(net.fc1(x).relu())))
    with pytest.raises(flatness.FlatnessError) as error:
        flatness.locally_constant_labels(model, small.data(), layer="fc2", progress=False)
    assert str(error.value) == (
        "Expected a layer that everything passes through, so that ψ is a function of its features, but "
        "something goes around 'fc2'. Choose another layer, such as 'last'."
    )


def test_an_order_needs_two_points():
    assert math.isnan(fitted_order([0.1, 0.2], [0.0, 0.3]))


def test_an_order_that_cannot_be_fitted_is_no_verdict():
    z, y = grid(), torch.zeros(40, 1, dtype=torch.float64)

    def label(moved):
        return (moved.norm(dim=1, keepdim=True) > 10.5).double()

    found = label_constancy(constant(1.0), z, y, SQUARED, labels=label, deltas=(0.01, 0.5), draws=8)
    assert math.isnan(found.order)
    said = "unknown whether locally constant; no order can be fitted, because only one δ changes any loss"
    assert str(found).splitlines()[0].endswith(f"{said} (order 3 is needed); y(·) is as given")
    assert "nan" not in str(found)
