"""A rewritten network is compared on the example, on new inputs like it, and on the measured data."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
from architectures import sequential
from flatness.errors import ModelError
from flatness.network.operators import OPERATORS, Operator
from flatness.symmetry.rewriting.equality import inputs_like
from flatness.symmetry.rewriting.rescaling import rescale
from transformer_models import Compute

ELSEWHERE = (
    "otherwise it treats other values differently from the example (a branch, an index or a rounding "
    "depends on values): leave this kind out, or rescale only a part of the network."
)


def silent_on(example):
    """A network with squares, none of which the example reaches."""
    torch.manual_seed(0)
    model = Compute(lambda m, x: m.fc2(m.fc1(x).relu().square()), fc1=nn.Linear(4, 6), fc2=nn.Linear(6, 3))
    with torch.no_grad():
        model.fc1.weight[:, 1:], model.fc1.bias[:] = 0.0, 0.0
        model.fc1.weight[:, 0].abs_()
    model = model.double()
    assert torch.equal(model(example), model.fc2.bias.expand(len(example), 3))
    return model


@pytest.mark.parametrize("kind", ["layerwise", "neuronwise"])
def test_a_network_that_is_equal_on_the_example_alone_is_refused(kind, monkeypatch):
    monkeypatch.setitem(OPERATORS, "square", Operator(flow="homogeneous"))  # a row of the table that is wrong
    example = torch.tensor([[-1.0, 0.5, 0.7, 1.0]], dtype=torch.float64)
    with pytest.raises(ModelError) as raised:
        rescale(silent_on(example), example, kind)
    start, rest = str(raised.value).split(" differ by ")
    drift, rest = rest.split(" ", 1)
    assert start == f"Expected the {kind} copy to put out the same but outputs"
    assert float(drift) > 0.01
    assert rest == (
        "of their size on new random inputs like the example, more than rounding (1e-08 in float64). Convert "
        f"the model with model.double() if it is badly conditioned; {ELSEWHERE}"
    )


def test_a_permutation_and_scaled_logits_are_compared_on_new_inputs_too(monkeypatch):
    example = torch.tensor([[-1.0, 0.5, 0.7, 1.0]], dtype=torch.float64)
    monkeypatch.setitem(OPERATORS, "cumsum", Operator(flow="homogeneous"))
    model = silent_on(example)
    model.compute = [lambda m, x: m.fc2(m.fc1(x).relu().cumsum(1))]
    with pytest.raises(ModelError, match=r"permutation copy .* on new random inputs like the example"):
        rescale(model, example, "permutation")
    monkeypatch.setitem(OPERATORS, "relu6", Operator(flow="homogeneous"))
    model.compute = [lambda m, x: F.relu6(m.fc2(100 * m.fc1(x).relu()))]
    with pytest.raises(ModelError, match=r"output copy .* on new random inputs like the example"):
        rescale(model, example, "output", factors={"scale": 3.0})


def test_measured_data_are_compared_before_anything_is_measured(monkeypatch):
    monkeypatch.setitem(OPERATORS, "hardtanh", Operator(flow="homogeneous"))
    torch.manual_seed(0)
    model = sequential(fc1=nn.Linear(4, 6), act=nn.ReLU6(), fc2=nn.Linear(6, 3)).double()
    x, y = 0.01 * torch.rand(40, 4, dtype=torch.float64), torch.randint(3, (40,))
    x[20:] *= 10_000  # what the first samples do not show
    with torch.no_grad():
        model.fc1.bias.zero_()
    with pytest.raises(ModelError) as raised:
        flatness.check_invariance(model, (x, y), measures=["weight_norm"], kinds="neuronwise", progress=False)
    rest = str(raised.value).split(" differ by ")[1].split(" ", 1)[1]
    assert rest == (
        "of their size on the measured data, more than rounding (1e-08 in float64). Convert "
        f"the model with model.double() if it is badly conditioned; {ELSEWHERE}"
    )


class Ends(nn.Module):
    """Wants a 9 in every row."""

    def __init__(self):
        super().__init__()
        self.table, self.fc1, self.fc2 = nn.Embedding(10, 4), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        if not bool((x == 9).any(1).all()):
            raise ValueError("every row needs an end")
        return self.fc2(self.fc1(self.table(x).mean(1)).relu())


NOTE = (
    "the networks were compared on the example only (also in another order), since the model does not run on "
    "similar random inputs (every row needs an end)"
)


def test_a_model_that_does_not_run_on_random_inputs_is_compared_on_the_example_with_a_warning():
    torch.manual_seed(0)
    model, x = Ends().double(), torch.tensor([[1, 2, 9], [4, 9, 0]])
    with pytest.warns(UserWarning, match="compared on the example only") as warned:
        changed = rescale(model, x, "neuronwise")
    assert [str(warning.message) for warning in warned] == [f"flatness.rescale {NOTE}"]
    other = torch.tensor([[5, 9, 3], [8, 8, 9], [9, 9, 9]])
    torch.testing.assert_close(changed(other), model(other), rtol=1e-10, atol=1e-10)
    report = flatness.check_invariance(
        model, (x, torch.tensor([0, 2])), measures=["weight_norm"], trials=1, progress=False
    )
    assert NOTE in report.notes


def test_new_inputs_are_of_the_examples_kind_and_scale():
    example = {
        "pixels": torch.rand(3, 5),
        "tokens": torch.tensor([[4, 9], [5, 7]]),
        "kept": torch.tensor([[True, False], [True, True]]),
        "bias": torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]),
        "one": torch.tensor(2.5),
        "name": "a",
    }
    new = inputs_like(example, torch.Generator().manual_seed(0))
    again = inputs_like(example, torch.Generator().manual_seed(0))
    assert list(new) == list(example)
    for key in list(example)[:-1]:
        assert new[key].dtype == example[key].dtype
        assert new[key].shape == example[key].shape
        assert torch.equal(new[key], again[key])
    for key in ("pixels", "tokens"):
        assert not torch.equal(new[key], example[key])
        assert new[key].min() >= example[key].min()
        assert new[key].max() <= example[key].max()
    for key in ("kept", "bias"):
        assert sorted(map(tuple, new[key].tolist())) == sorted(map(tuple, example[key].tolist()))
    assert float(new["one"]) == 2.5
    assert new["name"] == "a"
