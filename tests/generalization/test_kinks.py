"""Kinks: what a finite step sees and the Hessian does not."""

import pytest
import torch
from torch import nn

import flatness
from flatness.errors import OptionError
from small import Net, data
from untouched import untouched


def test_smooth_networks_and_last_layers_have_none():
    model = Net(lambda self, x: self.head(self.fc1(x).tanh()))
    x, y = data()
    with untouched(model, x, y):
        report = flatness.kink_share(model, (x, y), alpha=0.003, trials=100, progress=False)
    for layer in ("fc1", "head"):
        row = report.result("kink_share", layer=layer)
        # What the expansion leaves out is of order α² as well: 1e-5 here.
        assert abs(row.value) < 4 * row.stderr + 1e-3
        assert row.stderr < 0.25


def test_a_hidden_relu_layer_has_some():
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
        model[0].bias.zero_()
    x = torch.randn(400, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (400,), generator=generator)
    report = flatness.kink_share(model, (x, y), alpha=0.01, trials=60, progress=False)
    hidden, last = (report.result("kink_share", layer=layer) for layer in ("0", "2"))
    assert abs(last.value) < 4 * last.stderr + 1e-3
    assert abs(hidden.value) > 5 * hidden.stderr


@pytest.mark.parametrize("options", [{"alpha": 0.0}, {"trials": 1}])
def test_no_size_and_one_trial_are_refused(options):
    model, given = Net(lambda self, x: self.head(self.fc1(x))), data()
    with pytest.raises(OptionError) as error:
        flatness.kink_share(model, given, **options)
    alpha, trials = options.get("alpha", 0.01), options.get("trials", 8)
    assert str(error.value) == (
        f"Expected alpha > 0 and at least 2 trials but got alpha={alpha} and trials={trials}. For example "
        "alpha=0.01, trials=8."
    )
