"""Networks that turn autocast on by themselves, and half precision: measured in one type, or refused."""

import copy
import threading
from functools import wraps
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
import oracle
from flatness.errors import ModelError
from small import Net, assert_same, data, measure, network
from untouched import refusal, untouched

NOTE = "the model turns autocast on; measured without it"


def inside():
    """A forward that turns it on and off again."""

    def compute(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.fc1(x).relu()
            with torch.autocast("cpu", enabled=False):
                h = h.float()
            return self.head(h)

    return Net(compute).float()


def decorated():
    return Net(
        torch.autocast("cpu", dtype=torch.bfloat16)(lambda self, x: self.head(self.fc1(x).relu()))
    ).float()


def prepared():
    """As accelerate wraps a model's forward: autocast, then outputs in single precision."""
    model = network(torch.float32)
    model._original_forward = model.forward
    under = torch.autocast("cpu", dtype=torch.bfloat16)(type(model).forward)

    @wraps(under)
    def forward(self, *arguments):
        output = under(self, *arguments)
        return output.float() if output.dtype == torch.bfloat16 else output

    model.forward = MethodType(forward, model)
    return model


def switched():
    """A forward that switches it on by hand, and leaves it on."""

    def compute(self, x):
        torch.set_autocast_enabled("cpu", True)
        return self.head(self.fc1(x).relu())

    return Net(compute).float()


@pytest.mark.parametrize("make", [inside, decorated, prepared, switched])
def test_a_model_that_turns_autocast_on_is_measured_without_it(make):
    """The same operators as without: equal to rounding. Single precision against the dense Hessian: 1e-4."""
    model, given = make(), data(dtype=torch.float32)
    before = torch.set_autocast_enabled
    with untouched(model):
        report = measure(model, given)
    assert NOTE in report.notes
    plain = Net(lambda self, x: self.head(self.fc1(x).relu())).float()
    assert_same(report, measure(network(torch.float32) if make is prepared else plain, given), 1e-6)
    for name in ("fc1", "head"):
        H = oracle.layer_hessian(network(), oracle.mean_risk(*data(), F.cross_entropy), name)
        trace = report.value("hessian_trace", layer=name)
        assert trace == pytest.approx(oracle.hessian_trace(H), rel=1e-4)
    assert torch.set_autocast_enabled is before
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        assert model(given[0]).dtype == (torch.float32 if make is prepared else torch.bfloat16)


def test_copies_of_a_wrapped_model_are_measured_in_the_type_asked_for():
    report = measure(prepared(), data(), dtype=torch.float64)
    assert_same(report, measure(network(torch.float32), data(), dtype=torch.float64))


def test_autocast_is_as_it_was_after_an_error():
    def compute(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            raise KeyboardInterrupt

    before = torch.set_autocast_enabled
    with pytest.raises(KeyboardInterrupt):
        measure(Net(compute).float(), data(dtype=torch.float32))
    assert torch.set_autocast_enabled is before
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cpu")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_other_threads_keep_their_autocast():
    found = []

    def train():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)

    def compute(self, x):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.head(self.fc1(x).relu())

    report = measure(Net(compute).float(), data(dtype=torch.float32))
    assert NOTE in report.notes
    assert set(found) == {torch.bfloat16}


def test_rewriting_a_model_that_turns_autocast_on_compares_outputs_without_it():
    model, x = inside(), data(dtype=torch.float32)[0]
    changed = flatness.rescale(model, x[:2], kind="neuronwise", seed=1)
    plain = Net(lambda self, x: self.head(self.fc1(x).relu())).float()
    expected = plain(x)
    plain.load_state_dict(changed.state_dict())
    assert torch.allclose(plain(x), expected, rtol=1e-4, atol=1e-5)


def test_casts_that_only_autocast_makes_fit_are_refused_with_the_reason():
    def compute(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.head(self.fc1(x.bfloat16()).relu())

    assert refusal(ModelError, Net(compute).float(), data(dtype=torch.float32)) == (
        "Expected the model to take batches like tuple(float32[8, 4], int64[8]) but it raised RuntimeError: "
        "mat1 and mat2 must have the same dtype, but got BFloat16 and Float. It turns autocast on, which "
        "is switched off while measuring: cast to the type of the weights, x.to(weight.dtype), or pass "
        "dtype=torch.float32."
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_in_single_precision_of_a_network_in_half_are_measured(dtype):
    """As language models return them. Half precision: a few units of its last place, of outputs up to 5."""
    model = Net(lambda self, x: self.head(self.fc1(x).relu()).float()).to(dtype)
    plain = Net(lambda self, x: self.head(self.fc1(x).relu())).to(dtype)
    report = measure(model, data())
    assert_same(report, measure(plain, data()), 1e-6)
    exact = measure(copy.deepcopy(plain).double(), data())
    for name in ("fc1", "head"):
        value = report.value("hessian_trace", layer=name)
        assert value == pytest.approx(
            exact.value("hessian_trace", layer=name), rel=8 * torch.finfo(dtype).eps
        )


def test_parameters_of_several_types_are_refused_unless_one_is_asked_for():
    model = Net(lambda self, x: self.head(self.fc1(x).relu().to(self.head.weight.dtype))).float()
    model.head.bfloat16()
    assert refusal(ModelError, model, data(dtype=torch.float32)) == (
        "Expected parameters of one floating-point type but got float32 (fc1.weight), bfloat16 "
        "(head.weight). Pass dtype=torch.float32, which measures a copy of the model in that type."
    )
    report = measure(model, data(), dtype=torch.float32)
    assert_same(report, measure(copy.deepcopy(model).float(), data(dtype=torch.float32)))


@pytest.mark.parametrize("held", [True, False], ids=["closure", "global"])
def test_a_function_in_place_of_a_forward_cannot_be_copied(held):
    model = network(torch.float32)
    if held:
        original = model.forward
        model.forward = lambda x: 2 * original(x)
    else:
        names = {"original": model.forward}
        exec("def forward(x): return 2 * original(x)", names)
        model.forward = names["forward"]
    assert measure(model, data(dtype=torch.float32)).meta["samples"] == 23
    assert refusal(ModelError, model, data(), dtype=torch.float64) == (
        "Expected a model that copy.deepcopy can copy, since device= and dtype= work on a copy, but got a "
        "function in place of the forward of the model itself, which would run the original. Convert the "
        "model yourself and leave device and dtype out."
    )


def test_a_function_that_knows_no_module_may_stand_in_for_a_forward():
    model = nn.Sequential(nn.Linear(4, 6), nn.Identity(), nn.Linear(6, 3))
    model[1].forward = lambda x: x.relu()
    assert measure(model, data(), dtype=torch.float64).meta["dtype"] == "float64"


def test_a_model_that_fabric_set_up_is_measured():
    """Under mixed precision it casts inputs to half, which only fits under autocast."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self._forward_module(x.bfloat16()).float()

    kind = type(
        "_FabricModule", (nn.Module,), {"__module__": "lightning.fabric.wrappers", "forward": forward}
    )
    model, given = kind(), data(dtype=torch.float32)
    model._forward_module = model._original_module = network(torch.float32)
    with untouched(model):
        report = measure(model, given)
    assert report.notes[0] == "unwrapped Lightning Fabric"
    assert_same(report, measure(network(torch.float32), given))


def test_a_model_that_accelerate_prepared_is_measured():
    accelerate = pytest.importorskip("accelerate")
    model, given = network(torch.float32), data(dtype=torch.float32)
    expected = measure(model, given)
    ready = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    with untouched(ready):
        report = measure(ready, given)
    assert NOTE in report.notes
    assert_same(report, expected, 1e-6)
