"""On a GPU: the same numbers, and the device's random state and switches left as they were."""

import pytest
import torch
from torch.utils.data import DataLoader

import flatness
from flatness.errors import DataError
from flatness.landscape.points import Points
from flatness.problem.problem import Problem
from flatness.zoo.models import lenet5
from labelled_models import Tokens, sentences
from networks import CASES
from small import assert_same, data, dataset, measure, network, reference
from untouched import refusal, untouched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's own, once per process, when a backward pass is the first to multiply matrices on its thread
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]


@pytest.mark.parametrize("data_on", ["cpu", "cuda"])
@pytest.mark.parametrize("model_on", ["cpu", "cuda"])
@pytest.mark.parametrize("device", [None, "cpu", "cuda", "cuda:0"])
def test_model_and_data_anywhere_are_measured_where_asked(data_on, model_on, device):
    model = network().to(model_on)
    given = tuple(part.to(data_on) for part in data())
    with untouched(model, *given):
        report = measure(model, given, device=device, batch_size=5)
    assert report.meta["device"] == (device or model_on)[:4].rstrip(":")
    assert_same(report, reference())


@pytest.mark.parametrize("data_on", ["cpu", "cuda"])
def test_fingerprints_do_not_depend_on_the_device(data_on):
    given = tuple(part.to(data_on) for part in data())
    there = measure(network().to("cuda"), given, batch_size=5).meta
    assert there["data_fingerprint"] == reference().meta["data_fingerprint"]
    assert there["model_fingerprint"] == reference().meta["model_fingerprint"]


@pytest.mark.parametrize("name", ["mlp_tanh", "cnn_grouped"])
def test_white_features_and_metrics_have_the_values_of_the_cpu(name):
    case = CASES[name]
    measures = ["relative_flatness_whitened", "relative_spectral_norm", "soft_rank"]
    options = {
        "relative_spectral_norm": {"whitened": True, "tolerance": 1e-9},
        "soft_rank": {"metric": "whitened", "ridge": 0.1, "steps": 20},
    }
    asked = {"measures": measures, "options": options, "method": "exact", "progress": False}
    data = case.x, case.y
    here, there = (flatness.measure(case.build(), data, device=on, **asked) for on in ("cpu", "cuda"))
    for row, other in zip(here.results, there.results, strict=True):
        assert other.value == pytest.approx(row.value, rel=1e-6), row
    for metric in ("relative", "whitened"):
        found = (
            flatness.network_spectrum(case.build(), data, metric=metric, device=on, progress=False).largest
            for on in ("cpu", "cuda")
        )
        assert next(found) == pytest.approx(next(found), rel=1e-5)


def test_many_classes_have_the_risk_and_curvature_of_the_cpu():
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 3000).double()
    given = 4 * torch.randn(300, 16).double(), torch.randint(3000, (300,))
    asked = {"measures": "relative_flatness", "layers": "last", "progress": False}
    here = flatness.measure(model, given, **asked)
    there = flatness.measure(model, given, device="cuda", **asked)
    assert there.meta["risk"] == pytest.approx(here.meta["risk"], rel=1e-12)
    values = [report.value("relative_flatness", layer="") for report in (there, here)]
    assert values[0] == pytest.approx(values[1], rel=1e-10)


@pytest.mark.parametrize(
    "name", ["cnn_grouped", "residual_batch_norm", "token_mixer", "dense_prediction", "mlp_prelu"]
)
def test_networks_of_the_zoo_give_the_same_numbers(name):
    case = CASES[name]
    here = measure(case.build(), (case.x, case.y))
    there = measure(case.build(), (case.x, case.y), device="cuda")
    assert_same(there, here, rel=1e-8)


def test_convolutions_in_single_precision_do_not_round_to_tf32():
    case = CASES["cnn_padding_reflect"]
    exact = measure(case.build(), (case.x, case.y))
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        single = measure(case.build(), (case.x, case.y), device="cuda", dtype=torch.float32)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert_same(single, exact, rel=2e-5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_random_state_of_the_device_is_left_alone(device):
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    measure(network().to(device), DataLoader(dataset(), batch_size=5, shuffle=True))
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_pinned_batches_and_workers():
    loader = DataLoader(dataset(), batch_size=5, pin_memory=True, num_workers=2)
    assert_same(measure(network().cuda(), loader), reference())


def test_running_out_of_memory_halves_the_micro_batch():
    model = network(torch.float32).cuda()
    x, y = data(4096, torch.float32)

    class Wasteful(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x):
            # a gigabyte for every two samples
            ballast = torch.empty(len(x), 2**27, device=x.device)
            return self.net(x) + 0 * ballast[:, :1]

    report = measure(Wasteful(), (x, y), measures=["hessian_trace", "relative_flatness"])
    (note,) = [
        note for note in report.notes if note.startswith("out of memory: continued with micro-batches of ")
    ]
    assert 8 <= int(note.split()[-1]) <= 256
    expected = measure(model, (x, y), measures=["hessian_trace", "relative_flatness"])
    for layer in ("fc1", "head"):
        assert report.value("relative_flatness", layer=f"net.{layer}") == pytest.approx(
            expected.value("relative_flatness", layer=layer), rel=1e-5
        )


def test_a_default_device_is_respected():
    model, given = network().cuda(), tuple(part.cuda() for part in data())
    torch.set_default_device("cuda")
    try:
        report = measure(model, given)
    finally:
        torch.set_default_device("cpu")
    assert_same(report, reference())


def test_autocast_is_off_where_the_model_turns_it_on():
    model = network(torch.float32).cuda()
    given = [part.cuda() for part in data(dtype=torch.float32)]
    expected = measure(model, given)
    inner = model.forward
    model.forward = torch.autocast("cuda", dtype=torch.bfloat16)(inner)
    report = measure(model, given)
    assert "the model turns autocast on; measured without it" in report.notes
    assert_same(report, expected, 1e-5)


def test_labels_out_of_range_never_reach_the_loss_of_a_model_on_a_gpu():
    """There the device would stop for good."""
    model, batch = Tokens().cuda(), sentences(8)
    batch["labels"][2, 3] = 9
    assert refusal(DataError, model, [batch]) == (
        "Expected class indices from 0 to 4, since the model has 5 outputs, but got 9 for sample 2, "
        "prediction 3 of the batch. Number the classes from 0, or give the model 10 outputs. Seen on the "
        "first 8 samples."
    )
    report = flatness.measure(model, [sentences()], measures="hessian_trace", progress=False)
    assert report.meta["alignment"] == "labels shifted by one: as in the model's own loss"
    assert report.meta["risk"] == pytest.approx(Tokens()(**sentences()).loss.item(), rel=1e-6)


def test_autocast_is_off_inside():
    model, given = network(torch.float32).cuda(), data(dtype=torch.float32)
    plain = measure(model, given)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        report = measure(model, given)
    assert report.notes == ("autocast was on; measured without it",)
    assert_same(report, plain, rel=1e-6)


def test_fused_attention_is_measured_where_it_is_exact():
    case = CASES["attention_fused"]
    report = measure(case.build(), (case.x, case.y), layers="last", device="cuda")
    expected = measure(case.build(), (case.x, case.y), layers="last")
    assert_same(report, expected)
    assert flatness.plan(case.build(), (case.x, case.y), layers="last", device="cuda").layers == ["head"]


@pytest.mark.parametrize("engine", [None, "looped", "together"])
def test_points_of_a_plane_have_the_losses_of_the_cpu(engine):
    """In double precision there."""
    torch.manual_seed(0)
    model = lenet5(seed=0)
    given = torch.randn(61, 3, 32, 32), torch.randint(10, (61,))
    directions = [{name: torch.randn_like(p) / 20 for name, p in model.named_parameters()} for _ in "ab"]
    coefficients = torch.tensor([[0.3, -0.2], [0.0, 0.5], [-1.0, 1.0]], dtype=torch.float64)

    def losses(problem, engine):
        with problem.guarded():
            return Points(problem, engine=engine).along(directions)(coefficients)[:, 0]

    there = losses(Problem(lenet5(seed=0), given, device="cuda", progress=False), engine)
    here = losses(Problem(lenet5(seed=0), given, dtype=torch.float64, progress=False), "looped")
    torch.testing.assert_close(there, here, rtol=1e-5, atol=0)
