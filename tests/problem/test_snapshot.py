"""Whatever a model holds is as it was, by content, after every public function."""

import dataclasses
import random
from collections import OrderedDict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
import oracle
from entry_points import calls
from flatness.errors import ModelError
from flatness.problem.guard import Guard
from flatness.problem.snapshot import Snapshot
from small import data, network
from untouched import refusal, untouched


@dataclasses.dataclass
class Moments:
    mean: torch.Tensor
    count: int = 0


class Slotted:
    __slots__ = ("late", "seen", "total")

    def __init__(self):
        self.seen, self.total = [1], 0.0


class Collecting(nn.Module):
    """Writes to all it holds, behind torch's back where that is possible; its outputs are plain."""

    def __init__(self):
        super().__init__()
        self.net = network()
        # Kept in training mode by the forward pass: its kernel writes without moving version counters.
        self.norm = nn.BatchNorm1d(4).double()
        # In training mode, reading its weight changes its buffers.
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).double()
        self.aside = [nn.BatchNorm1d(4).double()]
        for name in ("by_data", "by_numpy", "by_storage", "wide"):
            self.register_buffer(name, torch.zeros(3, dtype=torch.float64))
        self.register_buffer("repeated", torch.zeros(1).expand(4))
        self.plain = torch.full((2,), torch.nan)
        self.other_memory = torch.zeros(2)
        self.nested = {"outer": {"inner": [torch.zeros(2), {"deep": deque([1, 2], maxlen=2)}]}}
        self.pair = ({"calls": 0}, [0])
        self.seen, self.order = {1, 2}, OrderedDict(first=1, second=2)
        self.array, self.bytes = np.zeros(3), bytearray(b"abc")
        self.moments, self.slotted = Moments(torch.zeros(2)), Slotted()
        self.space = SimpleNamespace(inner=Moments(torch.zeros(1)), calls=0)
        self.generators = [torch.Generator(), np.random.default_rng(0), random.Random(0)]

    @torch.no_grad()
    def _collect(self, x):
        self.norm.train()
        for norm in (self.norm, *self.aside):
            norm(torch.cat([x, x + 1]).to(norm.weight))
        self.by_data.data += 1
        self.by_numpy.numpy()[:] += 1
        self.by_storage.untyped_storage().fill_(7)
        self.wide.resize_(5)
        self.repeated[:1].add_(1)
        self.plain.data.fill_(5)
        self.other_memory.data = torch.ones(3)
        self.nested["outer"]["inner"][0].data.add_(1)
        self.nested["outer"]["inner"][1]["deep"].append(3)
        self.nested["outer"]["new"] = 1
        self.pair[0]["calls"] += 1
        self.pair[1].append(1)
        self.seen.add(len(self.seen))
        self.order.move_to_end("first")
        self.array += 1
        self.bytes[0] = 0
        self.moments.mean.data += 1
        self.moments.count += 1
        self.slotted.seen.append(2)
        self.slotted.total, self.slotted.late = 3.0, 1
        self.space.inner.mean.numpy()[:] = 3
        self.space.calls += 1
        torch.rand(1, generator=self.generators[0])
        self.generators[1].random(), self.generators[2].random()

    def forward(self, x):
        self._collect(x.detach())
        return self.net(self.spectral(x))


@pytest.mark.parametrize("name", list(calls(*data())))
def test_every_function_leaves_all_that_a_model_holds_as_it_was(name):
    model, (x, y) = Collecting().train(), data(12)
    if name == "pac_bayes_bound":  # it is about weights that are parameters
        nn.utils.parametrize.remove_parametrizations(model.spectral, "weight")
    with untouched(model, x, y):
        calls(x, y)[name](model)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["measure", "pac_bayes_flatness", "line", "rescale"])
def test_all_is_as_it_was_after_an_error_too(name, error):
    model, (x, y) = Collecting().train(), data(12)
    passes = []

    def stop(module, args):
        passes.append(module)
        if len(passes) == 3:
            raise error("stopped")

    model.net.register_forward_pre_hook(stop)
    with untouched(model, x, y), pytest.raises((error, ModelError), match="stopped"):
        calls(x, y)[name](model)


def test_memory_that_was_put_in_the_place_of_a_tensor_goes_and_the_same_memory_comes_back():
    model = network()
    weight, address = model.fc1.weight, model.fc1.weight.data_ptr()
    view = weight.detach().numpy()
    before = Snapshot(model)
    weight.data = torch.zeros(2, 2, dtype=torch.float64)
    view += 1
    before.restore()
    before.restore()
    assert weight.data_ptr() == address
    assert torch.equal(weight, network().fc1.weight)


def test_what_has_not_changed_is_not_written_to():
    """Neither a version counter nor an order moves, and NaN is the same as before."""
    model = Collecting()
    versions = [tensor._version for tensor in (*model.parameters(), *model.buffers(), model.plain)]
    Snapshot(model).restore()
    assert [tensor._version for tensor in (*model.parameters(), *model.buffers(), model.plain)] == versions


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1 + 2j, 3j], dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
        torch.tensor([1.5, -0.0]).to(torch.float8_e4m3fn),
        torch.arange(6).reshape(2, 3).T,
        torch.zeros(0),
        torch.tensor(3.0),
    ],
    ids=["conjugated", "boolean", "eight bits", "transposed", "empty", "a number"],
)
def test_tensors_of_every_kind_are_compared_and_restored(tensor):
    model = nn.Sequential(network())
    model.kept = tensor.clone() if not tensor.is_conj() else tensor
    model.zero = torch.tensor(0.0)
    before, expected = Snapshot(model), model.kept.resolve_conj().clone()
    model.kept.data.zero_()
    model.zero.neg_()
    before.restore()
    assert model.kept.resolve_conj().tolist() == expected.tolist()
    assert str(float(model.zero)) == "0.0"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantized_tensors_are_restored():
    model = nn.Sequential(network())
    model.kept = torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.5, 0, torch.qint8)
    before = Snapshot(model)
    model.kept.copy_(torch.zeros(2))
    before.restore()
    assert model.kept.dequantize().tolist() == [1, 2]


def test_tensors_made_in_inference_mode_are_restored():
    model = nn.Sequential(network())
    with torch.inference_mode():
        model.cache = torch.ones(2)
        before = Snapshot(model)
        model.cache += 1
        before.restore()
    assert model.cache.tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_are_measured_with_and_restored(layout):
    class Mixing(nn.Module):
        """Features are mixed by a sparse matrix, as in networks on graphs."""

        def __init__(self, mixing):
            super().__init__()
            self.net = network()
            self.register_buffer("mixing", mixing)
            self.eval()

        def forward(self, x):
            return self.net(x @ self.mixing.to_dense())

    (x, y), dense = data(), torch.eye(4).double().roll(1, 0) + torch.eye(4).double()
    sparse = Mixing(dense.to_sparse(layout=layout))
    values = sparse.mixing._values() if layout is torch.sparse_coo else sparse.mixing.values()
    expected = flatness.measure(network(), (x @ dense, y), progress=False)
    report = flatness.measure(sparse, (x, y), progress=False)
    assert report.value("hessian_trace", layer="net.fc1") == pytest.approx(
        expected.value("hessian_trace", layer="fc1"), rel=1e-12
    )
    other = Mixing((2 * dense).to_sparse(layout=layout))
    assert (
        flatness.measure(other, (x, y), progress=False).meta["model_fingerprint"]
        != report.meta["model_fingerprint"]
    )
    with Guard(sparse, 0):
        values.fill_(7)
    assert torch.equal(sparse.mixing.to_dense(), dense)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
def test_nested_tensors_do_not_matter():
    model, (x, y) = nn.Sequential(network()), data()
    model.ragged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    report = flatness.measure(model, (x, y), measures="hessian_trace", progress=False)
    expected = flatness.measure(network(), (x, y), measures="hessian_trace", progress=False)
    assert report.value("hessian_trace", layer="0.fc1") == expected.value("hessian_trace", layer="fc1")


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x, y: flatness.measure(model, (x, y), dtype=torch.float32, progress=False),
        lambda model, x, y: flatness.rescale(model, x),
        lambda model, x, y: flatness.check_invariance(
            model.float(), (x.float(), y), measures="hessian_trace", trials=1, progress=False
        ),
    ],
    ids=["measure", "rescale", "check"],
)
def test_hooks_of_a_copy_write_into_the_original_which_is_restored(call):
    """Functions are not copied: what they hold is the original."""
    model, (x, y) = network(), data()
    model.seen, model.calls = {}, 0

    def remember(module, inputs, output):
        model.seen["fc1"] = output.detach()
        model.calls += 1

    model.fc1.register_forward_hook(remember)
    call(model, x, y)
    assert model.seen == {}
    assert model.calls == 0


def test_what_hangs_on_a_model_but_is_not_its_own_is_left_alone():
    """Optimizers, data and large stores of a program that a module points at."""
    model = network()
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.data_set = torch.utils.data.TensorDataset(torch.zeros(3))
    model.program = SimpleNamespace(replay=np.zeros(9 * 2**20))
    with Guard(model, 0):
        model.optimizer.param_groups[0]["lr"] = 0.2
        model.data_set.tensors[0].add_(1)
        model.program.replay += 1
        model.program.step = 1
    assert model.optimizer.param_groups[0]["lr"] == 0.2
    assert float(model.data_set.tensors[0].sum()) == 3
    assert model.program.replay[0] == 1
    assert vars(model.program).keys() == {"replay"}


# Forward passes that write to weights


class Renormalized(nn.Module):
    """Keeps the rows of its first weight within a norm of 1, each time that it runs."""

    def __init__(self, write):
        super().__init__()
        self.net, self.write = network(), [write]
        self.eval()

    def forward(self, x):
        self.write[0](self.net.fc1.weight)
        return self.net(x)


def _by_data(weight):
    weight.data = torch.renorm(weight.data, 2, 0, 1.0)


@torch.no_grad()
def _in_place(weight):
    weight.copy_(torch.renorm(weight, 2, 0, 1.0))


def _by_numpy(weight):
    weight.detach().numpy()[:] = torch.renorm(weight.detach(), 2, 0, 1.0).numpy()


@pytest.mark.parametrize("write", [_by_data, _in_place, _by_numpy])
def test_weights_that_a_forward_pass_normalises_are_measured_as_it_leaves_them_and_restored(write):
    model, (x, y) = Renormalized(write), data()
    plain = network()
    assert bool((plain.fc1.weight.norm(dim=1) > 1).any())
    _in_place(plain.fc1.weight)
    with untouched(model, x, y):
        report = flatness.measure(
            model, (x, y), measures=["hessian_trace", "weight_norm", "fisher_rao"], progress=False
        )
    H = oracle.layer_hessian(plain, oracle.mean_risk(x, y, F.cross_entropy), "fc1")
    assert report.value("hessian_trace", layer="net.fc1") == pytest.approx(oracle.hessian_trace(H), rel=1e-10)
    assert report.value("weight_norm", layer="net.fc1") == pytest.approx(
        float(plain.fc1.weight.detach().square().sum()), rel=1e-12
    )
    other = flatness.measure(plain, (x, y), measures="fisher_rao", progress=False)
    assert report.value("fisher_rao") == pytest.approx(other.value("fisher_rao"), rel=1e-10)
    assert report.notes == (
        "forward passes overwrite net.fc1.weight; measured at the resulting weights, without derivatives "
        "of that update, then restored",
    )


def _unit_rows(weight):
    weight.data = F.normalize(weight.data, dim=1)


def _unit_norm(weight):
    weight.data /= torch.linalg.matrix_norm(weight.data, 2)


def _centred(weight):
    weight.data -= weight.data.mean()


@pytest.mark.parametrize("write", [_unit_rows, _unit_norm, _centred])
def test_weights_whose_last_digits_move_when_they_are_normalised_again_are_measured(write):
    """To divide by a norm of 1 or to subtract a mean of 0 is exact up to rounding only."""
    model, (x, y), plain = Renormalized(write), data(), network()
    write(plain.fc1.weight)
    again = plain.fc1.weight.detach().clone()
    moved = 0
    for _ in range(3):
        write(again)
        moved += not torch.equal(again, plain.fc1.weight)
    assert moved > 0
    with untouched(model, x, y):
        report = flatness.measure(model, (x, y), measures="hessian_trace", progress=False)
    H = oracle.layer_hessian(plain, oracle.mean_risk(x, y, F.cross_entropy), "fc1")
    assert report.value("hessian_trace", layer="net.fc1") == pytest.approx(oracle.hessian_trace(H), rel=1e-12)


def test_weights_that_change_little_at_every_pass_are_refused():
    def shrink(weight):
        weight.data = (1 - 1e-13) * weight.data

    message = refusal(ModelError, Renormalized(shrink), data(), batch_size=1)
    assert message.startswith("Expected weights that stay as they are while the model runs")


def test_weights_that_change_at_every_pass_are_refused():
    def shrink(weight):
        weight.data = 0.9 * weight.data

    assert refusal(ModelError, Renormalized(shrink), data()) == (
        "Expected weights that stay as they are while the model runs, or that settle after its "
        "first pass, but net.fc1.weight changed later on. Move the change out of forward, or write it as a "
        "parametrization (torch.nn.utils.parametrize), which derivatives go through."
    )


def test_weights_that_change_in_the_middle_are_refused():
    passes = []

    def late(weight):
        passes.append(weight)
        if len(passes) == 6:
            weight.data = 0.9 * weight.data

    message = refusal(ModelError, Renormalized(late), data(), measures="hessian_trace", batch_size=5)
    assert message.startswith("Expected weights that stay as they are while the model runs")


def test_a_backward_pass_inside_a_forward_pass_adds_to_no_gradient_of_the_users():
    def adapt(weight):
        with torch.enable_grad():
            weight.sum().backward()

    model, (x, y) = Renormalized(adapt), data()
    model.net.fc1.weight.grad = torch.ones_like(model.net.fc1.weight)
    model.net.head.weight.grad = None
    with untouched(model, x, y):
        flatness.measure(model, (x, y), measures="hessian_trace", progress=False)
