"""A forward pass is written down whatever it looks like, and where it cannot be the message says so."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from architectures import sequential
from flatness.errors import ModelError, NondeterministicError, NotFiniteError
from flatness.symmetry.flow.groups import symmetries
from flatness.symmetry.rewriting.rescaling import rescale
from flatness.symmetry.trace.forward_pass import default_forward, trace
from networks import CASES


class Formula(nn.Module):
    """A network given by a function of its two layers and its input."""

    def __init__(self, formula):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 6), nn.Linear(6, 3)
        self.formula = formula

    def forward(self, x):
        return self.formula(self, x)


def names(model, x):
    return [call.name for call in trace(model.eval(), x, default_forward).calls]


def reasons(found, layer):
    """Why the output of a layer is fixed."""
    return next(group.reasons for group in found.fixed if group.name == layer)


def test_all_spellings_of_an_operator_have_one_name():
    def spelled(self, x):
        h = self.fc1(x)
        h = h + h
        h = torch.add(h, h)
        h = h.add(h)
        h.add_(h)
        h += h
        h = 0 + h
        return self.fc2(F.relu(h).relu().relu_())

    assert names(Formula(spelled), torch.randn(2, 4)) == ["linear", *["add"] * 6, *["relu"] * 3, "linear"]


def test_branches_and_loops_are_followed_as_they_run():
    def branching(self, x):
        h = self.fc1(x)
        for _ in range(3):
            h = h.relu() if h.shape[1] == 6 else h.tanh()
        return self.fc2(h)

    assert names(Formula(branching), torch.randn(2, 4)) == ["linear", "relu", "relu", "relu", "linear"]


def test_calls_say_in_which_module_they_ran():
    model = sequential(stem=nn.Linear(4, 6), block=sequential(act=nn.Tanh(), out=nn.Linear(6, 3))).eval()
    calls = trace(model, torch.randn(2, 4), default_forward).calls
    assert [str(call) for call in calls] == ["linear in stem", "tanh in block.act", "linear in block.out"]


def test_arguments_may_be_a_tuple_or_a_dict():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x, gain):
            return self.fc2(F.relu(self.fc1(x) * gain))

    model, x = Two(), torch.randn(2, 4)
    for example in ((x, torch.ones(1)), {"x": x, "gain": torch.ones(1)}):
        assert [group.name for group in symmetries(model, example).groups] == ["fc1"]


def test_the_logits_of_an_output_that_names_them_are_the_output():
    model = Formula(lambda self, x: {"logits": self.fc2(F.relu(self.fc1(x))), "hidden": x})
    assert len(symmetries(model, torch.randn(2, 4)).groups) == 1


def test_the_model_comes_back_as_it_was():
    case = CASES["residual_batch_norm"]
    model = case.build().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hook = model.head.register_forward_hook(lambda *_: None)
    hooks = len(model.head._forward_hooks)
    state = torch.random.get_rng_state()
    symmetries(model, case.x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert len(model.head._forward_hooks) == hooks
    assert torch.equal(torch.random.get_rng_state(), state)
    hook.remove()


def message(raised):
    return str(raised.value)


def test_a_wrong_example_shape_is_refused_with_the_module_that_stopped():
    model = sequential(fc1=nn.Linear(4, 6), act=nn.ReLU(), fc2=nn.Linear(6, 3))
    with pytest.raises(ModelError) as raised:
        symmetries(model, torch.randn(2, 5))
    # Newer versions of torch name the operator.
    assert message(raised).replace("addmm: ", "") == (
        "Expected an example that the model can run on but module 'fc1' (Linear) stopped at float32[2, 5] "
        "with RuntimeError: mat1 and mat2 "
        "shapes cannot be multiplied (2x5 and 4x6). Pass inputs as the model takes them, one row per sample: "
        "a tensor, a tuple of arguments "
        "or a dict of keyword arguments."
    )


def test_examples_that_say_nothing_are_refused():
    model = sequential(fc1=nn.Linear(4, 6), act=nn.ReLU(), fc2=nn.Linear(6, 3))
    with pytest.raises(ModelError) as raised:
        symmetries(model, torch.randn(0, 4))
    assert message(raised) == (
        "Expected an example of at least one sample but got float32[0, 4], for which the model "
        "returns nothing (float32[0, 3]). Pass at least one sample."
    )
    with pytest.raises(ModelError) as raised:
        symmetries(model, torch.full((2, 4), float("nan")))
    assert message(raised) == (
        "Expected finite outputs but the model returns NaN or infinity for the example, float32[2, 4]. Look "
        "for NaN in the example, or for weights that overflow."
    )


def test_a_wrong_number_of_arguments_is_refused():
    model = Formula(lambda self, x: self.fc2(self.fc1(x)))
    with pytest.raises(ModelError) as raised:
        symmetries(model, (torch.randn(2, 4), torch.randn(2, 4)))
    assert message(raised) == (
        "Expected an example that the model can run on but Formula stopped at tuple(float32[2, 4], "
        "float32[2, 4]) with TypeError: "
        "Formula.forward() takes 2 positional arguments but 3 were given. Pass inputs as the model takes "
        "them, one row per sample: a "
        "tensor, a tuple of arguments or a dict of keyword arguments."
    )


def test_an_output_that_is_no_tensor_is_refused_and_forward_helps():
    model = Formula(lambda self, x: (self.fc2(F.relu(self.fc1(x))), x))
    with pytest.raises(ModelError) as raised:
        symmetries(model, torch.randn(2, 4))
    assert message(raised) == (
        "Expected the model to return one tensor but got tuple(float32[2, 3], float32[2, 4]). Say which part "
        "is the output, for example "
        "forward=lambda model, x: model(x)[0]."
    )
    assert len(symmetries(model, torch.randn(2, 4), forward=lambda model, x: model(x)[0]).groups) == 1
    rescale(model, torch.randn(2, 4), forward=lambda model, x: model(x)[0])


def test_computing_outside_of_torch_is_refused():
    model = Formula(lambda self, x: torch.from_numpy(self.fc2(self.fc1(x)).detach().numpy().clip(0)))
    with pytest.raises(ModelError) as raised:
        symmetries(model, torch.randn(2, 4))
    assert message(raised) == (
        "Expected a forward pass made of torch operations but the output of Formula was computed where "
        "torch operations cannot be followed "
        "(TorchScript, numpy, another library). Pass the eager torch model, or wrap only the torch part of "
        "it."
    )


def test_a_submodule_that_cannot_be_followed_ends_the_chain():
    class Numpy(nn.Module):
        def forward(self, x):
            return torch.from_numpy(x.detach().numpy().clip(0))

    model = sequential(
        fc1=nn.Linear(4, 6), act=Numpy(), fc2=nn.Linear(6, 5), relu=nn.ReLU(), fc3=nn.Linear(5, 3)
    )
    found = symmetries(model, torch.randn(2, 4))
    assert [group.name for group in found.groups] == ["fc2"]
    assert reasons(found, "fc1") == ("Python code reads its values (numpy in act)",)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_submodule_ends_the_chain():
    scripted = torch.jit.script(nn.Linear(6, 6))
    model = sequential(
        fc1=nn.Linear(4, 6), act=nn.ReLU(), inner=scripted, relu=nn.ReLU(), fc3=nn.Linear(6, 3)
    )
    found = symmetries(model, torch.randn(2, 4))
    assert found.groups == ()
    assert reasons(found, "fc1") == ("RecursiveScriptModule in inner is not known to keep channels apart",)


def test_where_recording_breaks_is_said():
    def picky(self, x):
        h = self.fc1(x).relu()
        if torch.overrides._get_current_function_mode() is not None:
            raise RuntimeError("no modes, please")
        return self.fc2(h)

    with pytest.raises(ModelError) as raised:
        symmetries(Formula(picky), torch.randn(2, 4))
    assert message(raised) == (
        "Expected a forward pass whose calls to torch can be recorded but Formula after relu stopped with "
        "RuntimeError: no modes, please. "
        "The model runs when nothing is recorded: replace that part with plain torch operations, or check "
        "only the part of the model before it."
    )


def test_random_outputs_are_refused():
    model = Formula(lambda self, x: self.fc2(self.fc1(x)) + torch.rand(()).round().mul(0) + torch.rand(3))
    with pytest.raises(NondeterministicError) as raised:
        symmetries(model, torch.randn(2, 4))
    start, end = message(raised).split("differ by ")
    assert start == "Expected the same output for the same example but two runs in evaluation mode "
    size, rest = end.split(" ", 1)
    assert float(size) > 0
    assert rest == (
        "of its size. Look for F.dropout(x) without training=self.training, for noise, or for random "
        "sampling inside forward."
    )


def test_models_that_cannot_be_measured_are_refused_here_too():
    with pytest.raises(ModelError) as raised:
        symmetries(lambda x: x, torch.randn(2, 4))
    assert message(raised).startswith("Expected a torch.nn.Module but got function.")
    model = nn.Linear(4, 3)
    model.weight.data[0, 0] = float("nan")
    with pytest.raises(NotFiniteError):
        symmetries(model, torch.randn(2, 4))


def test_wrapped_models_are_unwrapped():
    model = nn.DataParallel(sequential(fc1=nn.Linear(4, 6), act=nn.ReLU(), fc2=nn.Linear(6, 3)))
    assert symmetries(model, torch.randn(2, 4)).model == "Sequential"
    assert type(rescale(model, torch.randn(2, 4))) is nn.Sequential
