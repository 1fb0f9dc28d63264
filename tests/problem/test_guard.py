"""What a model must be to be measured, and that it comes back as it was."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
from flatness.errors import ModelError, NotFiniteError
from flatness.problem.guard import Guard
from flatness.problem.model import check_model
from small import Net, assert_same, data, measure, network, reference
from untouched import refusal, untouched

TRAINING = "the model was in training mode; measured in evaluation mode, then restored"


# The promise


class Restless(nn.Module):
    """Changes what it can at every call: buffers in place and by replacement, attributes, dicts and lists."""

    def __init__(self):
        super().__init__()
        self.net = network()
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.calls = 0
        self.history = {}
        self.outputs = [torch.ones(1), torch.zeros(1)]

    def forward(self, x):
        self.written += 1
        self.replaced = self.replaced + 1
        self.calls += 1
        self.history[self.calls] = x
        self.last_input = x
        self.outputs.pop(0)
        self.outputs += [self.net(x), x]
        return self.outputs[-2]


def test_buffers_attributes_dicts_and_lists_that_a_forward_pass_changes_are_set_back():
    model, (x, y) = Restless(), data()
    outputs, (first, second) = model.outputs, model.outputs
    with untouched(model, x, y):
        report = measure(model, (x, y), batch_size=7)
    assert model.calls == 0
    assert model.history == {}
    assert model.outputs is outputs
    assert [id(output) for output in outputs] == [id(first), id(second)]
    assert not hasattr(model, "last_input")
    assert report.value("hessian_trace", layer="net.head") == reference().value("hessian_trace", layer="head")


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_shortens_its_rows_gets_them_back(kind):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = kind(11, 6, max_norm=1.0), nn.Linear(6, 3)

        def forward(self, x):
            found = self.embedding(x)
            return self.head(found if found.dim() == 2 else found.mean(1))

    torch.manual_seed(0)
    model = Network()
    before = model.embedding.weight.detach().clone()
    assert float(before.norm(dim=1).max()) > 1
    data = torch.randint(11, (20, 4)), torch.arange(20) % 3
    report = flatness.measure(model, data, measures="relative_flatness", layers="last", progress=False)
    assert torch.equal(model.embedding.weight, before)
    model(data[0])  # shortens them for good
    assert not torch.equal(model.embedding.weight, before)
    again = flatness.measure(model, data, measures="relative_flatness", layers="last", progress=False)
    expected = report.value("relative_flatness", layer="head")
    assert again.value("relative_flatness", layer="head") == pytest.approx(expected, rel=1e-5)


def test_modes_gradients_and_hooks_are_as_they_were():
    model, (x, y) = network(), data()
    model.train()
    model.relu.eval()
    model.fc1.weight.requires_grad_(False)
    F.cross_entropy(model(x), y).backward()
    seen = []
    model.head.register_forward_hook(lambda *_: seen.append("forward"))
    model.head.register_full_backward_hook(lambda *_: seen.append("backward"))
    with untouched(model, x, y):
        report = measure(model, (x, y))
    assert "backward" not in seen
    assert "forward" in seen
    assert TRAINING in report.notes
    assert_same(report, reference())
    model(x).sum().backward()
    assert seen[-1] == "backward"


def test_a_backward_hook_that_changes_gradients_changes_no_number():
    model = network()
    model.fc1.register_full_backward_hook(
        lambda module, given, received: tuple(0 * g if g is not None else g for g in given)
    )
    assert_same(measure(model, data()), reference())


def test_a_hook_on_a_parameter_that_clips_its_gradient_changes_no_number():
    model, given = network(), data()
    expected = measure(model, given, measures=["fisher_rao", "hessian_trace"])
    handles = [value.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3)) for value in model.parameters()]
    with untouched(model, *given):
        report = measure(model, given, measures=["fisher_rao", "hessian_trace"])
    assert [row.value for row in report.results] == [row.value for row in expected.results]
    F.cross_entropy(model(given[0]), given[1]).backward()
    assert all(value.grad.abs().max() <= 1e-3 for value in model.parameters())  # they work again
    for handle in handles:
        handle.remove()
    model.zero_grad()
    F.cross_entropy(model(given[0]), given[1]).backward()
    assert model.head.weight.grad.abs().max() > 1e-3


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("when", [1, 4, 9, 14])
def test_a_model_that_stops_in_the_middle_comes_back_as_it_was(error, when):
    model, (x, y) = Restless().train(), data()

    def stop(module, args):
        if model.calls == when:
            raise error("stopped")

    model.net.register_forward_pre_hook(stop)
    with untouched(model, x, y), pytest.raises((error, ModelError)) as caught:
        measure(model, (x, y), batch_size=4)
    assert "stopped" in str(caught.value)


def test_interrupted_in_a_backward_pass_the_model_comes_back_as_it_was():
    class Interrupting(torch.autograd.Function):
        countdown = 8

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            Interrupting.countdown -= 1
            if Interrupting.countdown == 0:
                raise KeyboardInterrupt
            return gradient

    model, (x, y) = Net(lambda self, x: self.head(Interrupting.apply(self.fc1(x)).relu())), data()
    with untouched(model, x, y), pytest.raises(KeyboardInterrupt):
        measure(model, (x, y), curvature="gauss_newton", batch_size=3)
    assert Interrupting.countdown == 0


def test_random_states_are_set_back_and_results_do_not_depend_on_them():
    model = network()
    first = measure(model, data())
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(77)
    with untouched(model):
        again = measure(model, data())
    assert first.results == again.results


@pytest.mark.parametrize("precision", ["tf32", "ieee", "none"])
def test_precision_switches_are_full_inside_and_set_back(precision):
    """The switches of each backend; with one set, reading the older `allow_tf32` raises."""
    before = torch.backends.cuda.matmul.fp32_precision
    seen = []
    model = Net(
        lambda self, x: (
            seen.append(torch.backends.cuda.matmul.fp32_precision),
            self.head(self.fc1(x).relu()),
        )[1]
    )
    try:
        torch.backends.cuda.matmul.fp32_precision = precision
        measure(model, data())
        assert torch.backends.cuda.matmul.fp32_precision == precision
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert set(seen) == {"ieee"}


def test_autocast_is_off_inside_and_noted():
    model, given = network(torch.float32), data(dtype=torch.float32)
    plain = measure(model, given)
    with untouched(model, *given), torch.autocast("cpu", dtype=torch.bfloat16):
        report = measure(model, given)
    assert report.notes == ("autocast was on; measured without it",)
    assert_same(report, plain)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_callers_without_gradients_get_the_same_numbers(context):
    model, (x, y) = network(), data()
    with context(), untouched(model, x, y):
        report = measure(model, (x, y))
    assert_same(report, reference())


def test_models_and_data_made_in_inference_mode_are_measured_as_copies():
    with torch.inference_mode():
        model, given = network(), data()
    assert next(model.parameters()).is_inference()
    assert_same(measure(model, given), reference())
    assert next(model.parameters()).is_inference()


def test_frozen_parameters_give_the_same_numbers_and_stay_frozen():
    model = network().requires_grad_(False)
    with untouched(model):
        report = measure(model, data())
    assert_same(report, reference())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_context_restores_after_an_exception():
    model = Restless().train()

    def fail():
        with Guard(model, 3):
            assert not model.training
            model(data()[0])
            draws = torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
            raise ZeroDivisionError(draws)

    with untouched(model), pytest.raises(ZeroDivisionError):
        fail()


@pytest.mark.parametrize("loss", ["cross_entropy", "normalized_cross_entropy"])
def test_another_default_device_changes_nothing(loss):
    """Whatever is made inside says where it is: a default device without values would show."""
    model, given = network(), data()
    expected = measure(model, given, loss, weight_decay=0.1)
    with torch.device("meta"):
        assert_same(measure(model, given, loss, weight_decay=0.1), expected)


# Copies


def test_another_dtype_is_measured_on_a_copy():
    model, (x, y) = network(torch.float32), data()
    with untouched(model, x, y):
        report = measure(model, (x, y), dtype=torch.float64)
    assert report.meta["dtype"] == "float64"
    assert_same(report, measure(copy.deepcopy(model).double(), (x, y)))
    low = measure(model, (x, y), dtype=torch.bfloat16)
    assert low.notes == (
        "computed in bfloat16, which leaves about two digits; pass dtype=torch.float32 for more",
    )
    assert low.value("hessian_trace") == pytest.approx(report.value("hessian_trace"), rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_are_measured_to_about_two_digits(dtype):
    model = network(dtype)
    report = measure(model, data())
    assert report.notes == (
        f"computed in {str(dtype).removeprefix('torch.')}, which leaves about two digits; pass "
        "dtype=torch.float32 for "
        "more",
    )
    exact = measure(copy.deepcopy(model).double(), data())
    for name in (
        "hessian_trace",
        "relative_flatness",
        "relative_flatness_normalized",
        "hessian_top_eigenvalue",
    ):
        for layer in ("fc1", "head"):
            assert report.value(name, layer=layer) == pytest.approx(
                exact.value(name, layer=layer), rel=0.05
            ), name


def test_double_precision_data_meets_a_single_precision_model():
    model, given = network(torch.float32), data()
    report = measure(model, given)
    assert report.meta["dtype"] == "float32"
    assert_same(report, measure(model, data(dtype=torch.float32)), rel=1e-6)
    assert given[0].dtype == torch.float64


def test_the_same_device_and_dtype_need_no_copy():
    model = network()
    assert flatness.Problem(model, data(), device="cpu", dtype=torch.float64).model is model


def test_a_model_that_cannot_be_copied_is_refused():
    class Uncopyable(nn.Linear):
        def __deepcopy__(self, memo):
            raise TypeError("cannot pickle 'module' object")

    message = refusal(ModelError, nn.Sequential(Uncopyable(4, 3)), data(), dtype=torch.float64)
    assert message == (
        "Expected a model that copy.deepcopy can copy, since device= and dtype= work on a copy, but got: "
        "cannot pickle 'module' object. Convert the model yourself and leave device and dtype out."
    )


# Wrapped models


def test_data_parallel_is_unwrapped():
    report = measure(nn.DataParallel(network()), data())
    assert report.notes == ("unwrapped DataParallel",)
    assert report.layers() == ["fc1", "head"]
    assert_same(report, reference())


class Compiled(nn.Module):
    """What torch.compile returns, as far as wrapping goes; calling it would compile."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module

    def forward(self, x):
        raise AssertionError("compiled")


def test_compiled_models_are_unwrapped_also_inside_data_parallel():
    report = measure(nn.DataParallel(Compiled(network())), data())
    assert report.notes == ("unwrapped DataParallel", "unwrapped torch.compile")
    assert_same(report, reference())


def test_a_model_from_torch_compile_is_unwrapped_and_compiled_parts_run_as_they_were_written():
    report = measure(torch.compile(network(), backend="eager"), data())
    assert report.notes == ("unwrapped torch.compile",)
    assert_same(report, reference())
    model = network()
    model.fc1 = torch.compile(model.fc1, backend="eager")
    inner = measure(model, data())
    assert inner.layers() == ["fc1._orig_mod", "head"]
    assert inner.value("hessian_trace") == pytest.approx(reference().value("hessian_trace"), rel=1e-12)


def test_a_part_that_is_told_to_compile_itself_does_not_while_it_is_measured():
    model, compiled = network(), []
    model.fc1.compile(backend=lambda graph, inputs: compiled.append(graph) or graph.forward)
    assert_same(measure(model, data()), reference())
    assert compiled == []


# What is no model


def test_what_is_no_module_is_refused():
    assert refusal(ModelError, lambda x: x, data()) == (
        "Expected a torch.nn.Module but got function. Pass the model itself, with its weights loaded."
    )
    assert refusal(ModelError, network().state_dict(), data()) == (
        "Expected a torch.nn.Module but got OrderedDict. Pass the model itself, with its weights loaded."
    )


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_model_is_refused():
    assert refusal(ModelError, torch.jit.script(network()), data()) == (
        "Expected an eager torch.nn.Module but got a TorchScript module, whose layers cannot be recorded. "
        "Pass the model before scripting."
    )


def test_a_model_without_parameters_is_refused():
    assert refusal(ModelError, nn.Sequential(nn.ReLU()), data()) == (
        "Expected a model with parameters but Sequential has none. Pass the network whose weights were "
        "trained."
    )


def test_lazy_parameters_are_refused():
    assert refusal(ModelError, nn.Sequential(nn.LazyLinear(3)), data()) == (
        "Expected initialised parameters but got lazy ones: 0.weight, 0.bias. Run one forward pass first."
    )


def test_parameters_without_values_are_refused():
    assert refusal(ModelError, nn.Sequential(nn.Linear(4, 3, device="meta")), data()) == (
        "Expected parameters with values but got meta tensors: 0.weight, 0.bias. Load the weights first."
    )


def test_sharded_parameters_are_refused():
    class Sharded(nn.Parameter):
        def full_tensor(self):
            return self

    model = network()
    model.head.weight = Sharded(model.head.weight.detach())
    assert refusal(ModelError, model, data()) == (
        "Expected whole parameters but got sharded ones (DTensor): head.weight. In all processes, build the "
        "model again and load into it what get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict returns; "
        "measure that copy."
    )


def test_complex_and_integer_parameters_are_refused():
    model = network()
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    model.codes = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    assert refusal(ModelError, model, data()) == (
        "Expected real floating-point parameters but got phase (torch.complex64), codes (torch.int8). "
        "Second derivatives of complex or integer parameters are not defined here; dequantise the model "
        "or use a real one."
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value):
    model = network()
    with torch.no_grad():
        model.fc1.weight[2, 1] = value
        model.head.bias[0] = value
    assert refusal(NotFiniteError, model, data()) == (
        "Expected finite weights but got NaN or infinity in fc1.weight, head.bias. Training diverged, or "
        "the checkpoint is damaged: measure an earlier one."
    )


def test_batch_norm_without_running_statistics_is_refused():
    model = Net(
        lambda self, x: self.head(self.norm(self.fc1(x))), norm=nn.BatchNorm1d(6, track_running_stats=False)
    )
    assert refusal(ModelError, model, data()) == (
        "Expected batch norm with running statistics but got none in norm: each sample's output "
        "depends on its batch, so there is no loss per sample. Train with track_running_stats=True, "
        "or set running_mean and running_var."
    )


@pytest.mark.parametrize("switch", ["train", "eval"])
def test_a_switch_of_a_single_module_is_used_though_all_are_in_evaluation_mode(switch):
    """Libraries hang their own `eval` on a module to keep parts of it as they are."""
    model = Net(lambda net, x: net.head(net.fc1(x).relu()) * (5 if net.loud else 1))
    model.loud = True
    stock = getattr(nn.Module, switch)

    def quiet(*arguments):
        model.loud = False
        return stock(model, *arguments)

    setattr(model, switch, quiet)
    with untouched(model):
        report = measure(model, data(), layers=["fc1", "head"])
    plain = Net(lambda net, x: net.head(net.fc1(x).relu()))
    assert_same(report, measure(plain, data(), layers=["fc1", "head"]))


@pytest.mark.parametrize(
    "spare",
    [
        torch.zeros(3).to(torch.float8_e4m3fn),
        torch.zeros(0),
        torch.full((9,), 1e30),
        torch.eye(2).to_sparse(),
    ],
    ids=["eight bits", "empty", "huge", "sparse"],
)
def test_parameters_of_every_kind_are_looked_at(spare):
    model = network()
    model.spare = nn.Parameter(spare, requires_grad=False)
    check_model(model)


def test_a_parameter_of_eight_bits_that_is_not_finite_is_refused():
    model = network()
    model.spare = nn.Parameter(torch.tensor([1.0, torch.nan]).to(torch.float8_e5m2), requires_grad=False)
    with pytest.raises(NotFiniteError, match="spare"):
        check_model(model)


def test_weights_that_change_when_they_are_read_in_training_mode_are_read_in_evaluation_mode():
    """Spectral norm takes a step of its power iteration then."""
    model = network()
    nn.utils.parametrizations.spectral_norm(model.head)
    model.train()
    with untouched(model, *data()):
        report = measure(model, data())
    assert_same(report, measure(model.eval(), data()))
