"""One seed, one number: nothing that is measured depends on the clock, the process or the micro-batch."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import flatness

MEASURES = [
    "hessian_trace",
    "relative_flatness",
    "neuron_flatness",
    "matrix_normalized_sharpness",
    "relative_flatness_normalized",
]


class Attention(nn.Module):
    """One block of attention over six tokens, with a norm and a token embedding as a raw parameter."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(0.3 * torch.randn(6, 8))
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x):
        h = x + self.places
        q, k, v = self.qkv(h).chunk(3, -1)
        h = h + self.out((q @ k.mT / 8**0.5).softmax(-1) @ v)
        return self.head(self.norm(h).mean(1))


class Tied(nn.Module):
    """A weight used three times: by its module twice, and once more without it."""

    def __init__(self):
        super().__init__()
        self.core, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        h = self.core(x).tanh()
        return self.head(nn.functional.linear(self.core(h).tanh(), self.core.weight.T))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(6, 6, 3, stride=2),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(24, 4),
    )


NETWORKS = {
    "tanh": (
        lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 4)),
        (6,),
    ),
    "attention": (Attention, (6, 8)),
    "convolution": (convolutional, (2, 6, 6)),
    "tied": (Tied, (6,)),
}


def built(name, n=26):
    build, shape = NETWORKS[name]
    torch.manual_seed(5)
    model = build().double().eval()
    return model, (torch.randn(n, *shape, dtype=torch.float64), torch.randint(4, (n,)))


def measured(name, **options):
    model, data = built(name)
    asked = {"measures": MEASURES, "method": "sampled", "precision": 0.2, "max_passes": 4} | options
    return flatness.measure(model, data, progress=False, seed=7, **asked)


def numbers(report):
    """All that a report says about values: they, their errors and how they came about."""
    return [
        [
            row.measure,
            row.level,
            row.layer,
            row.unit,
            row.reduction,
            row.value,
            row.stderr,
            row.method,
            row.notes,
        ]
        for row in report.results
    ]


def busy(monkeypatch):
    """A clock that says something else at every look."""
    ticks = iter(float(3**k % 1009) for k in range(10**9))
    for name in ("perf_counter", "monotonic", "process_time"):
        monkeypatch.setattr(time, name, lambda: next(ticks))


@pytest.mark.parametrize("name", NETWORKS)
def test_ten_runs_of_one_seed_are_one_report_whatever_the_clock_says(name, monkeypatch):
    runs = 5 if name == "tanh" else 1
    for method in ("sampled", "auto") if name == "tanh" else ("sampled",):
        first = numbers(measured(name, method=method))
        assert any(row[7] == "sampled" for row in first) or method == "auto"
        for _ in range(runs - 1):
            assert numbers(measured(name, method=method)) == first
        with monkeypatch.context() as patch:
            busy(patch)
            for _ in range(runs):
                assert numbers(measured(name, method=method)) == first


@pytest.mark.parametrize("name", NETWORKS)
def test_micro_batches_and_threads_change_rounding_only(name):
    first = numbers(measured(name))
    others = [measured(name, batch_size=7)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        others += [measured(name)] if name == "tanh" else []
    finally:
        torch.set_num_threads(threads)
    for other in others:
        for one, two in zip(first, numbers(other), strict=True):
            assert one[:5] == two[:5]
            assert two[5] == pytest.approx(one[5], rel=1e-9, abs=1e-12), one[:5]
            assert two[6] == pytest.approx(one[6], rel=1e-7, abs=1e-12), one[:5]
            assert one[7] == two[7]


@pytest.mark.parametrize("name", ["tanh", "tied"])
def test_a_loader_gives_what_its_tensors_give(name):
    model, data = built(name)
    asked = {"measures": MEASURES, "method": "sampled", "precision": 0.2, "max_passes": 4, "seed": 7}
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=8)
    listed = [(x, y) for x, y in zip(data[0].split(17), data[1].split(17), strict=True)]
    first = numbers(flatness.measure(model, data, progress=False, **asked))
    for other in (loader, listed):
        for one, two in zip(
            first, numbers(flatness.measure(model, other, progress=False, **asked)), strict=True
        ):
            assert two[5] == pytest.approx(one[5], rel=1e-9, abs=1e-12), one[:5]


def test_the_data_s_error_does_not_change_the_value():
    for name in ("tanh", "tied"):
        plain, grouped = numbers(measured(name)), numbers(measured(name, data_stderr=True))
        for one, two in zip(plain, grouped, strict=True):
            assert two[5] == pytest.approx(one[5], rel=1e-9, abs=1e-12), (name, one[:5])


def test_a_process_with_another_hash_seed_gives_the_same_report():
    program = (
        "import json, torch, test_reproducibility as here\n"
        "torch.set_num_threads(1)\n"
        "print(json.dumps({name: here.numbers(here.measured(name)) for name in here.NETWORKS}))"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    paths = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    here = {name: numbers(measured(name)) for name in NETWORKS}
    assert json.loads(done.stdout) == json.loads(json.dumps(here))
