"""What a few samples tell about a network, and what is refused because of it.

Networks whose numbers would be wrong, were they taken at face value, are refused with the reason, or their
layers are left out with a note. Where numbers are given they are those of the dense Hessian.
"""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import oracle
from flatness.errors import LayerError, ModelError, NondeterministicError, NotExactError
from flatness.measuring.plan import treatment
from flatness.network.layers import LinearLayer
from small import Net, assert_same, data, measure, reference
from untouched import refusal, untouched

CURVED = (
    "Expected layers whose Hessian is exact, which needs a network that is piecewise linear after the layer "
    "and uses its weight once, but got {}. All directions would take {} products per batch, more than 0: "
    "pass method='auto' for an estimate with its standard error, or {}curvature='gauss_newton' for that "
    "part of the Hessian."
)


def curved(monkeypatch, *arguments, **options):
    """The refusal of smooth layers by method="exact" when products are too many; then measured anyway."""
    monkeypatch.setattr(treatment, "LARGEST_BRUTE_FORCE", 0)
    return refusal(NotExactError, *arguments, method="exact", **options)


HOPELESS = "Expected layers whose curvature can be found but got {}. No method can measure these{}."


def plain(self, x):
    return self.head(self.fc1(x).relu())


def assert_exact(
    model, given=None, loss=F.cross_entropy, layers=None, network=True, loss_name="cross_entropy"
):
    """Traces and relative flatness agree with the dense Hessian; the report is returned."""
    x, y = given or data()
    with untouched(model, x, y):
        report = measure(model, (x, y), loss_name, layers=layers, batch_size=5)

    def risk(m):
        return loss(m(x), y)

    for name in report.layers():
        W, H = oracle.weight_matrix(model.get_submodule(name)), oracle.layer_hessian(model, risk, name)
        assert report.value("hessian_trace", layer=name) == pytest.approx(
            oracle.hessian_trace(H), rel=1e-8, abs=1e-12
        )
        assert report.value("relative_flatness", layer=name) == pytest.approx(
            oracle.relative_flatness(W, H), rel=1e-8, abs=1e-12
        )
    if network:
        assert report.value("hessian_trace") == pytest.approx(oracle.total_trace(model, risk), rel=1e-8)
    return report


# Randomness and mixed samples


def test_active_dropout_is_refused():
    torch.manual_seed(3)
    message = refusal(NondeterministicError, Net(lambda self, x: self.head(F.dropout(self.fc1(x)))), data())
    change = message.split("differ by ")[1].split(". Look")[0]
    assert message == (
        f"Expected the same output for the same batch but two runs in evaluation mode differ by {change}. "
        "Look for F.dropout(x) without training=self.training, for noise, or for random sampling inside "
        "forward."
    )
    assert 0.1 < float(change) < 20


@pytest.mark.parametrize("source", ["torch", "python", "numpy", "own"])
def test_randomness_that_spares_the_first_sample_is_refused(source):
    draw = {
        "torch": lambda self: float(torch.rand(())),
        "python": lambda self: random.random(),
        "numpy": lambda self: np.random.random_sample(),  # noqa: NPY002
        "own": lambda self: float(torch.rand((), generator=self.generator)),
    }[source]

    def compute(self, x):
        noise = torch.zeros(len(x), 1)
        noise[1:] = draw(self)
        return self.head(self.fc1(x) + noise)

    model = Net(compute)
    model.generator = torch.Generator().manual_seed(0)
    assert "two runs in evaluation mode differ" in refusal(NondeterministicError, model, data())


def test_random_numbers_that_change_nothing_are_fine():
    model, idle = Net(plain), Net(lambda self, x: plain(self, x) + 0 * torch.rand(()))
    idle.load_state_dict(model.state_dict())
    values = [measure(net, data(), measures="relative_flatness").to_frame()["value"] for net in (model, idle)]
    assert values[0].tolist() == pytest.approx(values[1].tolist(), rel=1e-12)


def test_outputs_that_depend_a_little_on_the_batch_size_are_fine():
    """As in half precision: the example is run once more, and what was recorded is not touched by that."""
    model = Net(plain)
    other = Net(lambda self, x: plain(self, x) * (1 + 1e-3 * (len(x) == 1)))
    other.load_state_dict(model.state_dict())
    values = [
        measure(net, data(), measures="relative_flatness").to_frame()["value"] for net in (model, other)
    ]
    assert values[0].tolist() == pytest.approx(values[1].tolist(), rel=1e-12)


def test_dropout_modules_are_off_in_evaluation_mode():
    model = Net(lambda self, x: self.head(self.drop(self.fc1(x).relu())), drop=nn.Dropout(0.5)).train()
    report = measure(model, data())
    for layer in ("fc1", "head"):
        for name in ("hessian_trace", "relative_flatness_normalized"):
            assert report.value(name, layer=layer) == pytest.approx(
                reference().value(name, layer=layer), rel=1e-12
            )


def test_samples_that_meet_are_refused():
    message = refusal(ModelError, Net(lambda self, x: self.head(self.fc1(x) - self.fc1(x).mean(0))), data())
    change = message.split("changes by ")[1].split(" when")[0]
    assert message == (
        f"Expected each sample's output to depend on that sample alone but it changes by {change} when the "
        "rest of the batch is left out. Samples must come first in every tensor, and no layer may use "
        "statistics of the batch."
    )
    assert 0.1 < float(change) < 20


# In-place operations


def test_inputs_that_the_model_overwrites_are_copied():
    def compute(self, x):
        x += 1.0
        x.mul_(2.0)
        return plain(self, x)

    model, (x, y) = Net(compute), data()
    with untouched(model, x, y):
        report = measure(model, (x, y), batch_size=6)
    shifted = measure(Net(plain), (2 * (x + 1), y))
    for layer in ("fc1", "head"):
        assert report.value("hessian_trace", layer=layer) == pytest.approx(
            shifted.value("hessian_trace", layer=layer)
        )
    batches = [(x[:9], y[:9]), (x[9:], y[9:])]
    with untouched(model, x, y):
        assert_same(measure(model, batches), report)


IN_PLACE = {
    "activation": lambda self, x: self.head(self.fc2(self.fc1(x).relu_()).relu_()),
    "activation of a view": lambda self, x: self.head(self.fc2(F.relu(self.fc1(x)[:, :], inplace=True))),
    "activation of a reshaped output": lambda self, x: self.head(
        F.relu(self.fc1(x).view(-1, 2, 3), inplace=True).flatten(1)
    ),
    "residual": lambda self, x: self.head(self.add(self.fc1(x).relu())),
    "slices": lambda self, x: self.head(self.halves(self.fc1(x))),
}


@pytest.mark.parametrize("name", list(IN_PLACE))
def test_in_place_operations_do_not_corrupt_what_is_recorded(name):
    class Spare(Net):
        def add(self, h):
            z = self.fc2(h)
            z += h
            return z.relu()

        def halves(self, h):
            h[:, 3:].add_(h[:, :3])
            h[:, :2] = 2 * h[:, 2:4]
            return h

    assert_exact(Spare(IN_PLACE[name]))


def test_inputs_of_layers_that_are_overwritten_after_use_are_copied():
    """Torch cannot differentiate such a network in its weights; another spelling of it has the numbers."""

    def overwriting(self, x):
        h = self.fc1(x) + 1
        z = self.fc2(h)
        h.mul_(3.0)
        return self.head((z + h).relu())

    def same(self, x):
        h = self.fc1(x) + 1
        return self.head((self.fc2(h) + 3 * h).relu())

    names = ["hessian_trace", "layer_flatness", "neuron_flatness", "relative_flatness"]
    layers = {"layers": ["fc1", "fc2", "head"], "measures": [*names[:1], *names[2:]]}
    assert_same(measure(Net(overwriting), data(), **layers), measure(Net(same), data(), **layers))
    report = measure(Net(overwriting), data(), measures=names)
    assert report.value("layer_flatness", layer="fc2") == pytest.approx(
        measure(Net(same), data(), measures=names).value("layer_flatness", layer="fc2"), rel=1e-6
    )


def test_an_in_place_relu_module_on_a_shared_tensor():
    def compute(self, x):
        h = self.fc1(x)
        return self.head(self.relu(h) + h)

    assert_exact(Net(compute, relu=nn.ReLU(inplace=True)))


def test_a_curved_operation_in_place_on_a_view_is_not_taken_for_a_linear_one(monkeypatch):
    def compute(self, x):
        h = self.fc1(x)
        h[:, :2].tanh_()
        return self.head(self.fc2(h).relu())

    assert curved(monkeypatch, Net(compute), data()) == CURVED.format(
        "fc1: tanh_ on a view after it", 6, "layers=['fc2', 'head'], or "
    )
    assert_exact(Net(compute))


def test_what_torch_cannot_differentiate_is_refused():
    def compute(self, x):
        h = self.fc1(x).sigmoid()
        h += 1
        return self.head(h)

    reason = (
        "torch cannot differentiate what follows it: one of the variables needed for gradient computation "
        "has been modified by an inplace operation"
    )
    assert refusal(NotExactError, Net(compute), data()) == HOPELESS.format(
        f"fc1: {reason}", ": pass layers=['head']"
    )
    report = measure(Net(compute), data(), layers="last")
    assert report.layers() == ["head"]


# Smooth layers


def test_smooth_layers_are_exact_by_brute_force_or_refused_with_all_reasons(monkeypatch):
    def compute(self, x):
        return self.head((self.fc2(self.fc1(x).tanh()).relu() + 1).log())

    assert_exact(Net(compute))
    assert curved(monkeypatch, Net(compute), data()) == CURVED.format(
        "fc1: tanh, log after it; fc2: log after it", 12, "layers=['head'], or "
    )
    assert curved(monkeypatch, Net(compute), data(), layers="fc2") == CURVED.format(
        "fc2: log after it", 6, "layers=['head'], or "
    )


def test_a_smooth_output_has_no_exact_layer(monkeypatch):
    x, y = data()
    targets = F.one_hot(y, 3).double()
    model = Net(lambda self, x: plain(self, x).sigmoid())
    assert_exact(model, (x, targets), F.mse_loss, loss_name="mse")
    message = curved(monkeypatch, model, (x, targets), "mse")
    assert message == CURVED.format("fc1: sigmoid after it; head: sigmoid after it", 9, "")


def test_many_smooth_layers_are_listed_up_to_twelve(monkeypatch):
    layers = [nn.Linear(4, 4) for _ in range(14)]
    model = nn.Sequential(
        *[part for layer in layers for part in (layer, nn.Tanh())], nn.Linear(4, 3)
    ).double()
    reasons = "; ".join(f"{2 * i}: tanh after it" for i in range(12))
    assert curved(monkeypatch, model, data()) == CURVED.format(
        f"{reasons} and 2 more", 56, "layers=['28'], or "
    )


# Weights used twice


@pytest.mark.parametrize(
    "compute",
    [
        lambda self, x: self.head(F.linear(self.fc2(self.fc1(x)).relu(), self.fc2.weight.T)),
        lambda self, x: self.head(self.fc2(self.fc1(x)).relu() * self.fc2.weight.norm()),
    ],
    ids=["used by a function too", "its norm used too"],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_that_is_used_again_where_no_module_runs(compute, frozen):
    model = Net(compute).requires_grad_(not frozen)
    report = measure(model, data(), batch_size=5)
    assert report.result("hessian_trace", layer="fc2").notes[0] == (
        "its weight is used 2 times: products with the Hessian of its parameter"
    )
    assert_same(report, assert_exact(Net(compute)))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_that_runs_twice(frozen):
    def compute(self, x):
        return self.head(self.fc2(self.fc2(self.fc1(x)).relu()))

    report = measure(Net(compute).requires_grad_(not frozen), data(), batch_size=5)
    assert report.result("hessian_trace", layer="fc2").notes[0] == (
        "its weight is used 2 times: Hessian in all directions, 36 products"
    )
    assert_same(report, assert_exact(Net(compute)))


def test_tied_weights():
    model = Net(
        lambda self, x: self.head(self.tied(self.fc2(self.fc1(x)).relu()).relu()), tied=nn.Linear(6, 6)
    )
    model.tied.weight = model.fc2.weight
    report = assert_exact(model)
    assert report.layers() == ["fc1", "fc2", "head"]
    assert report.notes == ("tied shares the weight of fc2 and is measured under that name",)
    # Under its other name, and left to the trace over the whole network alone.
    assert assert_exact(model, layers=["fc1", "tied"]).layers() == ["fc1", "tied"]
    assert_exact(model, layers=["fc1", "head"])


def test_frozen_parameters_are_measured_and_noted():
    model = Net(plain)
    model.fc1.requires_grad_(False)
    report = assert_exact(Net(plain))
    frozen = measure(model, data(), batch_size=5)
    assert "frozen (requires_grad=False) but measured like the others: fc1.weight, fc1.bias" in frozen.notes
    assert_same(frozen, report)
    assert not model.fc1.weight.requires_grad


# Layers that are not what they look like


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Cosine(nn.Linear):
    def forward(self, x):
        return F.linear(F.normalize(x), F.normalize(self.weight))


LEFT_OUT = (
    "left out, because they do not compute what their class computes: fc1; flatness.register_layer adds "
    "support"
)


@pytest.mark.parametrize("kind", [Doubled, Cosine])
def test_a_subclass_that_computes_something_else_is_left_out(kind):
    report = assert_exact(Net(plain, fc1=kind(4, 6)))
    assert report.layers() == ["head"]
    assert report.notes == ("left out, because the forward pass never calls them: fc2", LEFT_OUT)
    assert refusal(LayerError, Net(plain, fc1=kind(4, 6)), data(), layers="fc1") == (
        f"Expected the name of a supported layer but got 'fc1', which is a {kind.__name__}. Supported layers "
        "of this model: head, fc2."
    )


def test_a_hook_that_changes_an_output_is_not_overlooked():
    model = Net(plain)
    model.fc1.register_forward_hook(lambda module, args, output: 3 * output)
    report = assert_exact(model)
    assert report.layers() == ["head"]
    assert LEFT_OUT in report.notes


def test_a_forward_that_was_replaced_on_one_module_is_not_overlooked():
    model = Net(plain)
    model.fc1.forward = lambda x: F.linear(x, model.fc1.weight)
    report = assert_exact(model)
    assert report.layers() == ["head"]
    assert LEFT_OUT in report.notes


def test_torchs_own_layers_are_taken_at_their_word(monkeypatch):
    """Laying out the patches of a large input once more would cost memory for nothing."""
    monkeypatch.setattr(LinearLayer, "explains", lambda *_: 1 / 0)
    assert assert_exact(Net(plain)).layers() == ["fc1", "head"]


def test_a_subclass_that_computes_the_same_is_a_layer():
    class Named(nn.Linear):
        def forward(self, x):
            return x @ self.weight.T + self.bias

    report = assert_exact(Net(plain, fc1=Named(4, 6)))
    assert report.layers() == ["fc1", "head"]


def test_reparametrised_weights_are_measured_as_they_act():
    model = Net(plain)
    nn.utils.parametrizations.weight_norm(model.fc1)
    W = model.fc1.weight.detach().clone()
    report = measure(model, data())
    same = Net(plain)
    with torch.no_grad():
        same.fc1.weight.copy_(W)
    expected = measure(same, data())
    for name in ("hessian_trace", "relative_flatness", "weight_norm"):
        assert report.value(name, layer="fc1") == pytest.approx(expected.value(name, layer="fc1"), rel=1e-10)
    x, y = data()
    total = oracle.total_trace(model, oracle.mean_risk(x, y, F.cross_entropy))
    assert report.value("hessian_trace") == pytest.approx(total, rel=1e-8)


def test_norm_layers_that_compute_something_else_are_part_of_the_trace():
    class Shifted(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x) * 2

    report = assert_exact(Net(lambda self, x: self.head(self.norm(self.fc1(x)).relu()), norm=Shifted(6)))
    assert report.layers() == ["fc1", "head"]


# Layers the output does not depend on


def test_unused_layers_are_left_out():
    report = assert_exact(Net(plain))
    assert report.layers() == ["fc1", "head"]
    assert report.notes == ("left out, because the forward pass never calls them: fc2",)


def test_an_auxiliary_head_has_no_curvature_and_is_not_the_last_layer():
    def compute(self, x):
        h = self.fc1(x).relu()
        output = self.head(h)
        self.last_prediction = self.fc2(h)
        return output

    report = assert_exact(Net(compute))
    assert report.layers() == ["fc1", "head", "fc2"]
    assert report.notes[0] == "the output does not depend on: fc2"
    assert report.result("hessian_trace", layer="fc2").notes == (
        "the output does not depend on it, so it has no curvature",
    )
    zeros = [row.value for row in report.results if row.layer == "fc2" and row.measure != "weight_norm"]
    assert set(zeros) == {0.0}
    assert measure(Net(compute), data(), layers="last").layers() == ["head"]


def test_weights_used_without_calling_their_layer_are_part_of_the_trace():
    report = assert_exact(Net(lambda self, x: self.head(F.linear(self.fc1(x).relu(), self.fc2.weight))))
    assert report.layers() == ["fc1", "head"]
    assert report.notes == ("left out, because their weights are used without calling the layer: fc2",)


CUT_OFF = (
    "fc1: no gradient reaches it (the forward pass uses torch.no_grad, detach or reentrant checkpointing)"
)


def no_grad_trunk(self, x):
    with torch.no_grad():
        h = self.fc1(x).relu()
    return self.head(h)


@pytest.mark.parametrize(
    "compute",
    [no_grad_trunk, lambda self, x: self.head(self.fc1(x).detach().relu())],
    ids=["no_grad", "detach"],
)
def test_layers_that_no_gradient_reaches_are_refused(compute):
    """Their curvature would come out as 0, though the output depends on them."""
    assert refusal(NotExactError, Net(compute), data()) == HOPELESS.format(CUT_OFF, ": pass layers=['head']")
    report = measure(Net(compute), data(), layers="last")
    assert report.layers() == ["head"]
    assert report.value("relative_flatness", layer="head") == pytest.approx(
        reference().value("relative_flatness", layer="head"), rel=1e-12
    )


def test_an_output_without_a_graph_is_refused():
    assert refusal(ModelError, Net(lambda self, x: plain(self, x).detach()), data()) == (
        "Expected an output that can be differentiated, but the forward pass runs under torch.no_grad "
        "or detaches it. Remove that from the model's code: measuring needs the graph."
    )


def test_activation_checkpointing_is_refused():
    def compute(self, x):
        return self.head(checkpoint(lambda h: self.fc1(h).relu(), x, use_reentrant=False))

    assert refusal(ModelError, Net(compute), data()) == (
        "The backward pass runs the layers again, as activation checkpointing does, so they cannot be "
        "recorded. Switch checkpointing off and measure again; smaller micro-batches save memory here."
    )


# Layouts


def sequences(n=9, steps=16):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n, steps, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


def test_tokens_of_one_sample_after_another_are_fine():
    def compute(self, x):
        n = len(x)
        return self.head(self.fc1(x.reshape(-1, 4)).relu().reshape(n, -1, 6).mean(1))

    assert assert_exact(Net(compute), sequences()).layers() == ["fc1", "head"]


@pytest.mark.parametrize(
    "compute, shape",
    [
        (lambda self, x: self.head(self.fc1(x.transpose(0, 1)).relu().mean(0)), [16, 8, 4]),
        (
            lambda self, x: self.head(
                self.fc1(x.transpose(0, 1).reshape(-1, 4)).relu().reshape(16, -1, 6).mean(0)
            ),
            [128, 4],
        ),
        (
            lambda self, x: self.head((x.mean((1, 2))[:, None] + self.fc1(x.new_ones(16, 4)).mean(0)).relu()),
            [16, 4],
        ),
    ],
    ids=["steps first", "steps first, flattened", "no samples at all"],
)
def test_inputs_that_are_not_laid_out_by_sample(compute, shape):
    """16 steps are a multiple of 8 samples: shapes alone would let these pass, with wrong numbers."""
    report = assert_exact(Net(compute), sequences())
    assert report.result("hessian_trace", layer="fc1").notes[0] == (
        f"its input, of shape {shape} for 8 samples, is not laid out sample by sample: products with the "
        "Hessian of its parameter"
    )


def test_norm_layers_over_flattened_tokens_are_part_of_the_trace():
    def compute(self, x):
        h = self.norm(self.fc1(x).reshape(-1, 6)).relu()
        return self.head(h.reshape(len(x), -1, 6).mean(1))

    report = assert_exact(Net(compute, norm=nn.BatchNorm1d(6)), sequences())
    assert report.layers() == ["fc1", "head"]
    assert report.notes == ("left out, because the forward pass never calls them: fc2",)


# Paths that depend on the data


def batches():
    x, y = data()
    return [(x[:20], y[:20]), (x[20:], y[20:])]


def test_a_later_batch_that_meets_another_operator_is_refused():
    model = Net(lambda self, x: self.head(self.fc1(x).relu() if len(x) != 3 else self.fc1(x).tanh()))
    assert refusal(NotExactError, model, batches()) == (
        "Expected every batch to take the same path through the network but a later one meets tanh, which "
        "the first samples did not. Exact curvature requires a path that does not depend on the data."
    )


def test_a_later_batch_that_calls_another_layer_is_refused():
    model = Net(
        lambda self, x: self.head(self.fc1(x).relu() if len(x) != 3 else self.fc2(self.fc1(x).relu()))
    )
    assert refusal(LayerError, model, batches()) == (
        "Expected every batch to take the same path through the network but a later one calls 'fc2', which "
        "the first samples did not. Name the layers to measure with layers=, leaving out those that are "
        "used only sometimes."
    )
    report = measure(model, batches(), layers=["fc1", "head"], measures="relative_flatness")
    assert report.layers() == ["fc1", "head"]


def test_a_later_batch_that_skips_a_layer_is_refused():
    model = Net(
        lambda self, x: self.head(self.fc2(self.fc1(x).relu()) if len(x) != 3 else self.fc1(x).relu())
    )
    assert refusal(LayerError, model, batches()) == (
        "Expected 'fc2' to be called once in every forward pass but it was called 0 times on this batch. A "
        "network whose path depends on the data cannot be measured layer by layer: pass layers= without it."
    )


def test_a_later_batch_that_calls_a_layer_twice_is_refused():
    model = Net(
        lambda self, x: self.head(self.fc1(x).relu() if len(x) != 3 else self.fc1(x).relu() + self.fc1(x))
    )
    assert refusal(LayerError, model, batches()) == (
        "Expected 'fc1' to be called once in every forward pass but it was called 2 times on this batch. The "
        "first samples called it once. Look for a path that depends on the data, or for something else that "
        "calls the layer again, such as a hook; or pass layers= without it."
    )


def test_paths_of_single_samples_by_masks_are_fine():
    def compute(self, x):
        h = self.fc1(x).relu()
        return self.head(torch.where(x.sum(1, keepdim=True) > 0, h, self.fc2(h)))

    assert assert_exact(Net(compute)).layers() == ["fc1", "fc2", "head"]


# Nothing to measure


def test_a_model_without_supported_layers_is_refused():
    class Bilinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 3, dtype=torch.float64))

        def forward(self, x):
            return x @ self.weight

    assert refusal(LayerError, Bilinear(), data()) == (
        "Expected at least one supported layer (Linear, Embedding, Conv1d to Conv3d, ConvTranspose1d to 3d, "
        "MultiheadAttention, GPT-2's Conv1D) but Bilinear has none. "
        "Add support for yours with flatness.register_layer."
    )


def test_layers_that_are_never_called_are_refused():
    model = Net(lambda self, x: F.linear(x, self.fc1.weight[:3]))
    assert refusal(LayerError, model, data()) == (
        "Expected at least one layer to measure but the forward pass calls none of fc1, head, fc2. Call "
        "them as modules, not through their weights."
    )


def test_unsupported_layers_are_listed():
    model = Net(
        lambda self, x: self.head(
            self.mix(self.fc1(x), self.fc1.bias.detach().expand(len(x), 6)) + self.scale
        ),
        mix=nn.Bilinear(6, 6, 6),
    )
    model.scale = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    report = measure(model, data(), layers="head")
    assert report.notes == (
        "left out, because the forward pass never calls them: fc2",
        "left out, because the layer type is not supported: the model itself (Net), mix (Bilinear); "
        "flatness.register_layer adds support",
    )
    x, y = data()
    row = report.result("hessian_trace", layer=None, reduction=None)
    total = oracle.total_trace(model, oracle.mean_risk(x, y, F.cross_entropy))
    # Whether all 216 weights of the mixing layer are taken in turn or at random is a matter of time.
    assert abs(row.value - total) <= 4 * row.stderr + 1e-8 * total
    assert refusal(LayerError, model, data(), layers="mix") == (
        "Expected the name of a supported layer but got 'mix', which is a Bilinear. Supported layers of "
        "this model: fc1, head, fc2."
    )


def test_zero_weights_give_zeros():
    model = Net(plain)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    report = measure(model, data())
    assert report.value("hessian_trace", layer="head") == 0.0
    # Only the biases of the last layer meet curvature: Σ_k p_k (1 − p_k) at p = 1/3.
    assert report.value("hessian_trace") == pytest.approx(2 / 3)
    assert {row.value for row in report.results if row.layer is not None} == {0.0}
    assert all(row.converged for row in report.results)


def test_a_layer_of_zeros_between_others():
    model = Net(lambda self, x: self.head(self.fc2(self.fc1(x).relu()).relu()))
    nn.init.zeros_(model.fc2.weight)
    report = assert_exact(model)
    for name in (
        "relative_flatness",
        "layer_flatness",
        "maximal_relative_flatness",
        "relative_flatness_normalized",
    ):
        assert report.value(name, layer="fc2") == 0.0
    assert report.value("hessian_trace", layer="fc2") > 0.01
    assert report.value("hessian_trace", layer="fc1") == 0.0


def test_layers_that_the_first_run_makes_are_measured():
    def compute(net, x):
        if not hasattr(net, "made"):
            net.made = nn.Linear(4, 4, dtype=torch.float64)
            with torch.no_grad():
                net.made.weight.copy_(torch.eye(4) + 0.1)
                net.made.bias.fill_(0.1)
        return net.head(net.fc1(net.made(x)).relu())

    ready = Net(compute)
    ready(data()[0])
    model = Net(compute)
    with untouched(model):
        report = measure(model, data())
    expected = measure(ready, data())
    for name in ("made", "fc1", "head"):
        for one in ("hessian_trace", "relative_flatness"):
            assert report.value(one, layer=name) == pytest.approx(expected.value(one, layer=name), rel=1e-9)


def test_a_layer_that_the_first_run_replaces_is_measured():
    def compute(net, x):
        if not hasattr(net, "done"):
            net.done, net.head = True, copy.deepcopy(net.head)
        return net.head(net.fc1(x).relu())

    model = Net(compute)
    with untouched(model):
        report = measure(model, data(), layers=["fc1", "head"])
    plain = Net(lambda net, x: net.head(net.fc1(x).relu()))
    assert_same(report, measure(plain, data(), layers=["fc1", "head"]))


CHANGES_LATER = {
    "a product": (lambda self, x, h: self.head(h * h), "mul"),
    "a quotient": (lambda self, x, h: self.head(h / (1 + h)), "div"),
    "a product of matrices": (lambda self, x, h: (h @ h.T @ self.head(h))[:3], "mm"),
}


@pytest.mark.parametrize("name", list(CHANGES_LATER))
def test_a_later_batch_that_meets_a_known_operator_in_another_way_is_refused(name):
    later, operator = CHANGES_LATER[name]

    def compute(self, x):
        h = self.fc1(x).relu()
        # All operators run for the first samples, too, after no layer.
        unused = (x * x / (1 + x.square())) @ torch.eye(4).double()
        if len(x) == 3:
            return later(self, x, h)
        return self.head(h) + 0 * unused[:, :3]

    assert refusal(NotExactError, Net(compute), batches()) == (
        f"Expected every batch to take the same path through the network but a later one meets {operator}, "
        "which the first samples did not. Exact curvature requires a path that does not depend on the data."
    )


def squared(z):
    z = z.clone()
    z[:, 0] = z[:, 0] ** 2
    return z


@pytest.mark.parametrize("change", [torch.tanh, torch.Tensor.tanh_, squared, lambda z: z * z.sign()])
def test_a_later_batch_in_which_the_last_layer_is_not_last_is_refused(change):
    model = Net(lambda self, x: plain(self, x) if len(x) != 3 else change(plain(self, x)))
    assert refusal(NotExactError, model, batches(), layers="last", measures="relative_flatness") == (
        "Expected every batch to take the same path through the network but on a later one something follows "
        "'head', which was the last layer for the first samples. Exact curvature requires a path that does "
        "not depend on the data."
    )


def test_a_later_batch_may_take_another_path_of_pieces():
    model = Net(lambda self, x: plain(self, x) if len(x) != 3 else plain(self, x.relu() - 2 * (-x).relu()))
    report = measure(model, batches())

    def risk(m):
        return torch.cat([F.cross_entropy(m(a), b, reduction="none") for a, b in batches()]).mean()

    H = oracle.layer_hessian(model, risk, "fc1")
    assert report.value("hessian_trace", layer="fc1") == pytest.approx(oracle.hessian_trace(H), rel=1e-8)


def test_a_later_batch_that_uses_a_weight_once_more_is_refused():
    def compute(self, x):
        h = self.fc1(x).relu()
        return self.head(h if len(x) != 3 else h + F.linear(x, self.fc1.weight))

    assert refusal(NotExactError, Net(compute), batches()) == (
        "Expected every batch to take the same path through the network but a later one uses a parameter of "
        "'fc1' 2 times, the first samples 1. Exact curvature requires a path that does not depend on the "
        "data."
    )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_last_layer_under_reentrant_checkpointing_is_refused():
    model = Net(lambda self, x: checkpoint(self.head, self.fc1(x).relu(), use_reentrant=True))
    assert "use_reentrant=True" in refusal(NotExactError, model, data())


def test_few_samples_are_examined_where_they_have_many_outputs(monkeypatch):
    """With two samples the same layers are found, with the same values."""
    seen = []

    def counted(self, x):
        seen.append(len(x))
        return plain(self, x)

    model, (x, y) = Net(counted), data()
    before = measure(model, (x, y), batch_size=3)
    assert max(seen) == 8
    seen.clear()
    monkeypatch.setattr("flatness.measuring.examine.examination._MOST_OUTPUTS", 3)
    after = measure(model, (x, y), batch_size=3)
    # The first run says how many outputs there are.
    assert seen.count(8) == 1
    assert [row.value for row in after.results] == [row.value for row in before.results]


def test_probabilities_in_the_place_of_logits_are_noted():
    for end, noted in ((nn.Softmax(1), True), (nn.ReLU(), False)):
        notes = measure(nn.Sequential(nn.Linear(4, 3).double(), end), data(), measures="weight_norm").notes
        assert any(note.startswith("the outputs are probabilities") for note in notes) is noted
