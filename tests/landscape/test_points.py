"""Points of a parameter space: the same at every one as the network itself, set to it."""

import copy

import pytest
import torch
from torch import nn
from torch._C._functorch import is_batchedtensor
from torch.nn import functional as F

from flatness.landscape import points as points_module
from flatness.landscape.points import ENGINES, LOOPED, TOGETHER, Points
from flatness.problem.problem import Problem
from untouched import untouched


class Network(nn.Module):
    """Layers by name, and what to do with them."""

    def __init__(self, run, **layers):
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.run(self, x)


def then(*first, features):
    return nn.Sequential(*first, nn.Flatten(), nn.Tanh(), nn.Linear(features, 3))


def normalised():
    model = Network(
        lambda net, x: net.fc(net.conv((x - net.mean) / 2).flatten(1)),
        conv=nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        fc=nn.Linear(108, 3),
    )
    model.register_buffer("mean", torch.tensor([[[[0.3]], [[-0.2]]]]))
    return model


def tied():
    shared = nn.Linear(6, 6)
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Flatten(), nn.Linear(72, 3))


IMAGES, VOLUMES, ROWS = (2, 6, 6), (2, 4, 4, 4), (2, 6)
CASES = {
    "conv2d": (
        lambda: then(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(inplace=True), features=36),
        IMAGES,
    ),
    "pooled": (
        lambda: then(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 2), nn.MaxPool2d(1), features=6
        ),
        IMAGES,
    ),
    "pooled without a bias": (
        lambda: then(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(2), features=36),
        IMAGES,
    ),
    "grouped": (lambda: then(nn.Conv2d(2, 4, 3, groups=2, padding="same"), features=144), IMAGES),
    "no bias": (lambda: then(nn.Conv2d(2, 4, 3, dilation=2, bias=False), features=16), IMAGES),
    "transposed": (lambda: then(nn.ConvTranspose2d(2, 3, 3, stride=2), features=507), IMAGES),
    "conv1d": (lambda: then(nn.Conv1d(2, 3, 3), features=12), ROWS),
    "conv3d": (lambda: then(nn.Conv3d(2, 3, 3), features=24), VOLUMES),
    "linear on rows": (lambda: then(nn.Linear(6, 5), features=10), ROWS),
    "batch norm": (lambda: then(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), features=64), IMAGES),
    "tied": (tied, IMAGES),
    "normalised inside": (normalised, IMAGES),
    "a weight made of parameters": (
        lambda: Network(
            lambda net, x: net.fc(F.conv2d(x, net.w / net.w.norm(), net.b).flatten(1)),
            w=nn.Parameter(torch.randn(4, 2, 3, 3)),
            b=nn.Parameter(torch.randn(4)),
            fc=nn.Linear(64, 3),
        ),
        IMAGES,
    ),
    "two views of the data": (
        lambda: Network(
            lambda net, x: net.fc((net.conv(x[:, :1]) - 2 * net.conv(x[:, 1:]).tanh()).flatten(1)),
            conv=nn.Conv2d(1, 4, 3),
            fc=nn.Linear(64, 3),
        ),
        IMAGES,
    ),
    "one layer on two things made of the data": (
        lambda: Network(
            lambda net, x: net.fc((net.conv(2 * x) - net.conv(3 * x).tanh()).flatten(1)),
            conv=nn.Conv2d(2, 4, 3),
            fc=nn.Linear(64, 3),
        ),
        IMAGES,
    ),
    "two strides": (
        lambda: Network(
            lambda net, x: net.fc(
                (F.conv2d(x, net.w, stride=2) + F.conv2d(x, weight=net.w)[..., ::2, ::2].sin()).flatten(1)
            ),
            w=nn.Parameter(torch.randn(4, 2, 3, 3)),
            fc=nn.Linear(16, 3),
        ),
        IMAGES,
    ),
    "a weight with something around": (
        lambda: Network(
            lambda net, x: net.fc(
                F.conv2d(
                    x, torch.cat([F.pad(net.w, (1, 0), value=0.7), F.pad(net.w, (0, 1), value=-0.4)])
                ).flatten(1)
            ),
            w=nn.Parameter(torch.randn(2, 2, 3, 2)),
            fc=nn.Linear(64, 3),
        ),
        IMAGES,
    ),
    "a weight with zeros on either side": (
        lambda: Network(
            lambda net, x: net.fc(
                (F.conv2d(x, F.pad(net.w, (1, 0))) - F.conv2d(x, F.pad(net.w, (0, 1))).tanh()).flatten(1)
            ),
            w=nn.Parameter(torch.randn(4, 2, 3, 2)),
            fc=nn.Linear(64, 3),
        ),
        IMAGES,
    ),
    "a concatenation by keyword": (
        lambda: Network(
            lambda net, x: net.fc(torch.cat(tensors=[net.conv(x), x[:, :, 1:5, 1:5]], dim=1).flatten(1)),
            conv=nn.Conv2d(2, 2, 3),
            fc=nn.Linear(64, 3),
        ),
        IMAGES,
    ),
    "a weight written into": (
        lambda: Network(
            lambda net, x: net.fc(F.conv2d(x, F.pad(net.w, (1, 0)).tanh_()).flatten(1)),
            w=nn.Parameter(torch.randn(4, 2, 3, 2)),
            fc=nn.Linear(64, 3),
        ),
        IMAGES,
    ),
    "weights side by side": (
        lambda: Network(
            lambda net, x: net.fc(
                F.conv2d(x, torch.cat([net.w, net.w], dim=1))
                .add(F.conv2d(x, torch.cat([net.v, net.still])))
                .flatten(1)
            ),
            w=nn.Parameter(torch.randn(4, 1, 3, 3)),
            v=nn.Parameter(torch.randn(2, 2, 3, 3)),
            still=nn.Parameter(torch.randn(2, 2, 3, 3)),
            fc=nn.Linear(64, 3),
        ),
        IMAGES,
    ),
    "a weight turned": (
        lambda: Network(
            lambda net, x: F.linear(F.linear(x.flatten(1), net.w.t(), bias=net.b * net.b).tanh(), net.v),
            w=nn.Parameter(torch.randn(72, 5)),
            b=nn.Parameter(torch.randn(5)),
            v=nn.Parameter(torch.randn(3, 5)),
        ),
        IMAGES,
    ),
    "a bias made a parameter": (
        lambda: Network(
            lambda net, x: F.linear(F.linear(x.flatten(1), net.w, nn.Parameter(net.b * net.b)).tanh(), net.v),
            w=nn.Parameter(torch.randn(5, 72)),
            b=nn.Parameter(torch.randn(5)),
            v=nn.Parameter(torch.randn(3, 5)),
        ),
        IMAGES,
    ),
    "a bias made of parameters": (
        lambda: Network(
            lambda net, x: F.linear(F.linear(x.flatten(1), net.w, net.b * net.b).tanh(), net.v),
            w=nn.Parameter(torch.randn(5, 72)),
            b=nn.Parameter(torch.randn(5)),
            v=nn.Parameter(torch.randn(3, 5)),
        ),
        IMAGES,
    ),
}
STILL = {"nothing": (), "weights": ("weight", "w"), "biases": ("bias", "b", "still")}
COEFFICIENTS = torch.tensor([[0.3, -0.2], [0.0, 0.5], [-1.5, 2.0], [0.0, 0.0]], dtype=torch.float64)


def drawn(case, dtype=torch.float64, still=()):
    """A network, its data, and two directions in which some of its parameters stay."""
    build, shape = CASES[case]
    torch.manual_seed(7)
    model = build().eval().to(dtype)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    data = torch.randn(9, *shape, dtype=dtype), torch.randint(3, (9,))
    directions = [
        {
            name: 0.5 * torch.randn_like(value).detach()
            for name, value in model.named_parameters()
            if name.split(".")[-1] not in still
        }
        for _ in range(2)
    ]
    return model, data, directions


def evaluated(model, data, directions, engine, **options):
    problem = Problem(model, data, batch_size=5, progress=False)
    with problem.guarded():
        points = Points(problem, engine=engine, fixed_batch=True, **options).along(directions)
        return points(COEFFICIENTS)


def expected(model, data, directions):
    """Networks set to their points, one by one."""
    rows = []
    for row in COEFFICIENTS.tolist():
        other = copy.deepcopy(model)
        with torch.no_grad():
            for name, value in other.named_parameters():
                move = sum(c * d[name].double() for c, d in zip(row, directions, strict=True) if name in d)
                value.copy_(value.double() + move)
            output = other(data[0])
        right = (output.argmax(1) == data[1]).double().mean()
        rows.append([float(F.cross_entropy(output, data[1])), float(right)])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("still", STILL)
@pytest.mark.parametrize("case", CASES)
def test_every_point_has_the_loss_of_the_network_set_to_it(case, still, engine):
    model, data, directions = drawn(case, still=STILL[still])
    with untouched(model, *data):
        found = evaluated(model, data, directions, engine)
    torch.testing.assert_close(found, expected(model, data, directions), rtol=1e-12, atol=0)


def written(weight, mask):
    weight.mul_(mask)


def written_unnoticed(weight, mask):
    weight.data *= mask


@pytest.mark.parametrize(
    ("write", "engine"), [*[(written, engine) for engine in ENGINES], (written_unnoticed, "looped")]
)
def test_a_network_may_write_into_its_weights(write, engine):
    """As masked convolutions do; `torch.vmap` does not allow the second way."""

    def run(net, x):
        with torch.no_grad():
            write(net.conv.weight, net.mask)
        return net.fc(net.conv(x).flatten(1))

    torch.manual_seed(3)
    model = Network(run, conv=nn.Conv2d(2, 3, 3), fc=nn.Linear(48, 3)).double()
    model.register_buffer("mask", (torch.arange(3) < 2).double())
    model.conv.weight.data.mul_(model.mask)
    data = torch.randn(9, *IMAGES, dtype=torch.float64), torch.randint(3, (9,))
    directions = [{"conv.weight": torch.randn(3, 2, 3, 3)} for _ in range(2)]
    with untouched(model, *data):
        found = evaluated(model, data, directions, engine)
    torch.testing.assert_close(found, expected(model, data, directions), rtol=1e-12, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_network_may_replace_its_buffers(engine):
    """As one that follows the mean of its features does; chunks of points may differ in length."""

    def run(net, x):
        z = net.conv(x).tanh()
        net.seen = 0.9 * net.seen + z.mean((0, 2, 3))
        return net.fc(z.flatten(1))

    torch.manual_seed(3)
    model = Network(run, conv=nn.Conv2d(2, 3, 3), fc=nn.Linear(48, 3)).double()
    model.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
    data = torch.randn(9, *IMAGES, dtype=torch.float64), torch.randint(3, (9,))
    directions = [{"conv.weight": torch.randn(3, 2, 3, 3)} for _ in range(2)]
    problem = Problem(model, data, batch_size=5, progress=False)
    with untouched(model, *data), problem.guarded():
        points = Points(problem, engine=engine, fixed_batch=True).along(directions)
        found = torch.cat([points(COEFFICIENTS[:3]), points(COEFFICIENTS[2:])[1:]])
    torch.testing.assert_close(found, expected(model, data, directions), rtol=1e-12, atol=0)


@pytest.mark.parametrize("rounded", [True, False])
def test_a_network_may_differentiate_by_its_data(rounded):
    """Equal entries in a window as well."""

    def run(net, x):
        with torch.enable_grad():
            z = (x.round() if rounded else x).detach().requires_grad_()
            (slope,) = torch.autograd.grad(net.body(z).sum() + F.max_pool2d(z, 2).sum(), z)
        return net.fc((slope * x).flatten(1))

    torch.manual_seed(3)
    body = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.MaxPool2d(2))
    model = Network(run, body=body, fc=nn.Linear(72, 3)).double()
    data = torch.randn(9, *IMAGES, dtype=torch.float64), torch.randint(3, (9,))
    directions = [{name: torch.randn_like(value) for name, value in model.named_parameters()} for _ in "ab"]
    with untouched(model, *data):
        found = evaluated(model, data, directions, "looped")
    torch.testing.assert_close(found, expected(model, data, directions), rtol=1e-12, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", ["conv2d", "linear on rows"])
def test_float32_agrees_to_its_rounding(case, engine):
    model, data, directions = drawn(case, torch.float32)
    found = evaluated(model, data, directions, engine)
    torch.testing.assert_close(found, expected(model, data, directions), rtol=1e-5, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_statistics_of_batch_norm_are_recomputed(engine):
    model, data, directions = drawn("batch norm")
    found = evaluated(model, data, directions, engine, batch_norm="recomputed")
    usual = evaluated(model, data, directions, "looped", batch_norm="recomputed")
    torch.testing.assert_close(found, usual, rtol=1e-12, atol=0)
    assert not torch.equal(found[:, 0], evaluated(model, data, directions, "looped")[:, 0])


@pytest.mark.parametrize("engine", ENGINES)
def test_statistics_of_batch_norm_that_move_go_along(engine):
    model, data, directions = drawn("batch norm")
    for direction in directions:
        direction["1.running_mean"] = torch.randn(4, dtype=torch.float64)
    found = evaluated(model, data, directions, engine)
    for (a, b), (loss, _) in zip(COEFFICIENTS.tolist(), found.tolist(), strict=True):
        other = copy.deepcopy(model)
        state = {}
        for name, value in model.state_dict().items():
            # Buffers go no further than from 0 to 1.
            c = [min(max(c, 0.0), 1.0) if "running" in name else c for c in (a, b)]
            state[name] = value + c[0] * directions[0].get(name, 0) + c[1] * directions[1].get(name, 0)
        other.load_state_dict(state)
        with torch.no_grad():
            reference = F.cross_entropy(other(data[0]), data[1])
        assert loss == pytest.approx(float(reference), rel=1e-12)


def test_directions_in_which_no_point_goes_are_left_out():
    model, data, directions = drawn("pooled")
    still = {name: torch.ones_like(value) for name, value in directions[0].items()}
    problem = Problem(model, data, batch_size=5, progress=False)
    with problem.guarded():
        points = Points(problem, engine="looped", fixed_batch=True)
        points.along([still, directions[0], still, directions[1], still])
        wide = torch.zeros(4, 5, dtype=torch.float64)
        wide[:, [1, 3]] = COEFFICIENTS
        found = points(wide)
    torch.testing.assert_close(found, expected(model, data, directions), rtol=1e-12, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", ["conv2d", "normalised inside"])
@pytest.mark.parametrize("budget", [0, 2**30])
def test_batches_that_are_kept_and_those_that_are_not_give_the_same(budget, case, engine, monkeypatch):
    """Chunks in turn along both directions, one of them, both again, then along others."""
    monkeypatch.setattr("flatness.landscape.points.kept_budget", lambda device: budget)
    model, data, directions = drawn(case)
    others = [{name: -value for name, value in direction.items()} for direction in directions]
    problem = Problem(model, data, batch_size=3, progress=False)
    with problem.guarded():
        points = Points(problem, engine=engine, fixed_batch=True).along(directions)
        reference = expected(model, data, directions)
        for rows in ([0, 2], [1], [2, 0], [2, 0], [3], [0, 1]):
            torch.testing.assert_close(points(COEFFICIENTS[rows]), reference[rows], rtol=1e-12, atol=0)
        points.along(others)
        torch.testing.assert_close(points(-COEFFICIENTS), reference, rtol=1e-12, atol=0)


def test_points_that_go_nowhere_do_not_change_what_is_kept():
    model, data, directions = drawn("conv2d")
    model[1] = nn.ELU(inplace=True)
    problem = Problem(model, data, batch_size=5, progress=False)
    with problem.guarded():
        points = Points(problem, engine="looped", fixed_batch=True).along(directions)
        found = points(torch.zeros(2, 2, dtype=torch.float64))
    torch.testing.assert_close(found, expected(model, data, directions)[[3, 3]], rtol=1e-12, atol=0)


def viewed(net, x):
    return net.fc(net.conv(x).view(len(x), -1))


def test_a_network_that_needs_its_images_as_they_lie_in_memory_gets_them_so():
    """Where channels lie side by side a pixel's neighbours do not, and torch refuses such a view."""
    torch.manual_seed(0)
    model = Network(viewed, conv=nn.Conv2d(2, 4, 3), fc=nn.Linear(64, 3)).double()
    data = torch.randn(9, *IMAGES, dtype=torch.float64), torch.randint(3, (9,))
    directions = [{name: torch.randn_like(value) for name, value in model.named_parameters()} for _ in "ab"]
    found = evaluated(model, data, directions, None)
    torch.testing.assert_close(found, expected(model, data, directions), rtol=1e-12, atol=0)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x) if self.fc(x).sum() > 0 else -self.fc(x)


class Asserts(Branches):
    def forward(self, x):
        assert not is_batchedtensor(self.fc.weight)
        return self.fc(x)


@pytest.mark.parametrize("build", [Branches, Asserts, lambda: nn.Linear(4, 3)])
def test_small_networks_that_vmap_takes_run_together_where_that_is_usual(build, monkeypatch):
    monkeypatch.setattr(points_module, "_usual", lambda device, dimension: TOGETHER)
    problem = Problem(build(), (torch.randn(5, 4), torch.randint(3, (5,))), progress=False)
    with problem.guarded():
        points = Points(problem)
    together = isinstance(problem.model, nn.Linear)
    assert points.engine == (TOGETHER if together else LOOPED)
    assert (
        "torch.vmap does not support this network; its points were evaluated one by one" in problem.notes
    ) != together
