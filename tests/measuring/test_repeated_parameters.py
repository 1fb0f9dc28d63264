"""Class tokens and positions as raw parameters: a copy for every sample, in the passes of all layers."""

import pytest
import torch
import torch.nn.functional as F
from test_sampled import rows_over_seeds
from torch import nn

import flatness
import oracle
from flatness.curvature.sums.sampled import Budget
from flatness.measuring.plan.planner import make_plan
from flatness.measuring.request import measure_request
from flatness.problem.problem import Problem
from untouched import untouched

LENGTH, WIDTH = 3, 4


class Vision(nn.Module):
    """A class token before embedded parts, positions, attention of one head, and a scale for each channel."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.places = nn.Parameter(0.5 * torch.randn(1, LENGTH + 1, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        h = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1) + self.places
        mixed = (self.q(h) @ self.k(h).mT).softmax(-1) @ h
        return self.head(F.gelu(h + self.scale * mixed)[:, 0])


def built(kind: type[nn.Module] = Vision):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return kind().double().eval()


def data(n=24):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, LENGTH, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


def planned(model, given, **options):
    problem = Problem(model, given, progress=False)
    with problem.guarded():
        return make_plan(problem, measure_request(["hessian_trace"], **{"method": "sampled", **options}))


def test_what_may_have_a_copy_for_every_sample_has_one():
    plan = planned(built(), data())
    assert plan.repeated == {"token": (1, WIDTH), "places": (LENGTH + 1, WIDTH), "scale": (1, WIDTH)}
    assert plan.by_parameters.rest == []
    assert "trace of token, places, scale: probes, with one copy per sample" in str(plan)


def test_a_scale_is_broadcast_to_what_it_multiplies():
    """Images with channels before their places, with channels after them, and a shift that is reshaped."""

    class Images(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(2, WIDTH, 1), nn.Linear(WIDTH, 3)
            self.front = nn.Parameter(torch.ones(WIDTH, 1, 1))
            self.back, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            h = torch.tanh(self.front * self.conv(x)) + self.shift.reshape(1, -1, 1, 1)
            return self.head((self.back * h.movedim(1, 3)).tanh().mean((1, 2)))

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 2, 3, 3, generator=generator, dtype=torch.float64)
    plan = planned(built(Images), (x, torch.randint(3, (8,), generator=generator)))
    assert plan.repeated == {"front": (WIDTH, 1, 1), "back": (1, 1, WIDTH)}
    assert plan.by_parameters.rest == ["shift"]


@pytest.mark.parametrize("curvature", ["hessian", "gauss_newton"])
def test_the_trace_of_the_network_is_unbiased_and_its_error_honest(curvature):
    model, (x, y) = built(), data()
    names = [name for name, _ in model.named_parameters()]
    if curvature == "hessian":
        full = oracle.hessian(model, oracle.mean_risk(x, y, F.cross_entropy), names)
    else:
        full = oracle.gauss_newton(model, x, names, oracle.output_hessian(y, F.cross_entropy))
    truth = float(full.diagonal().sum())
    runs = _runs(model, (x, y), curvature, 100)
    z = torch.tensor([(value - truth) / error for value, error in runs])
    assert abs(float(z.mean())) < 4 / len(z) ** 0.5
    assert abs(float(z.var()) - 1) < 4 * (2 / len(z)) ** 0.5


def _runs(model, given, curvature, seeds):
    """The trace of all that is probed, with its error, for each seed."""
    found = []
    for run in rows_over_seeds(model, *given, "hessian_trace", Budget(8, 8), seeds, curvature=curvature):
        row = next(row for row in run if row.layer is None and row.reduction is None)
        found.append((row.value, row.stderr))
    return found


def test_a_model_is_as_it_was_also_after_an_error():
    model, (x, y) = built(), data()
    with untouched(model, x, y):
        flatness.measure(model, (x, y), method="sampled", precision=0.5, progress=False)

    class Failing(Vision):
        calls = 0

        def forward(self, x):
            Failing.calls += len(self.token) > 2
            if Failing.calls > 3:
                raise RuntimeError("out of luck")
            return super().forward(x)

    model = built(Failing)
    with untouched(model, x, y), pytest.raises(RuntimeError, match="out of luck"):
        flatness.measure(model, (x, y), method="sampled", precision=0.5, progress=False)
    assert list(dict(model.named_parameters())) == list(dict(built().named_parameters()))


def test_parameters_that_samples_share_in_other_ways_take_products():
    """A row that is averaged over its first dimension, and one that is read by a reshape."""

    class Shared(Vision):
        def forward(self, x):
            h = torch.cat([self.token.reshape(1, WIDTH).expand(len(x), 1, WIDTH), self.embed(x)], 1)
            return self.head(F.gelu(h + self.places.mean(0))[:, 0])

    plan = planned(built(Shared), data())
    assert plan.repeated == {}
    assert {"token", "places"} <= {*plan.by_parameters.rest}


def test_a_parameter_of_which_the_first_row_is_taken_takes_products():
    """The first sample's copy would act on all samples, and the outputs would stay as they are."""

    class First(Vision):
        def forward(self, x):
            h = torch.cat([self.token[0].expand(len(x), 1, WIDTH), self.embed(x)], 1)
            return self.head(F.gelu(h + self.places[0])[:, 0])

    assert planned(built(First), data()).repeated == {}


def test_a_parameter_that_is_also_read_from_a_list_takes_products():
    """No copy stands in the list."""

    class Listed(Vision):
        def __init__(self):
            super().__init__()
            self.listed = [self.places]

        def forward(self, x):
            h = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1)
            return self.head(F.gelu(h + self.listed[0] + self.places)[:, 0])

    assert list(planned(built(Listed), data()).repeated) == ["token"]


def test_exact_values_do_without_copies():
    model, given = built(), data(6)
    assert planned(model, given, method="exact").repeated == {}
