"""Problem: how batches meet the model and the loss, in pieces that fit into memory."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import flatness
from flatness.curvature.sums import spread
from flatness.errors import DataError, LossError, ModelError, NotFiniteError, OptionError, OutOfMemoryError
from flatness.problem.problem import Problem
from small import Net, assert_same, data, dataset, measure, network, reference
from untouched import refusal, untouched


def plain(self, x):
    return self.head(self.fc1(x).relu())


# Pieces


@pytest.mark.parametrize("batch_size", [1, 2, 7, 22, 23, 24, 1000])
def test_the_micro_batch_changes_no_number(batch_size):
    assert_same(measure(network(), data(), batch_size=batch_size), reference())
    assert_same(measure(network(), DataLoader(dataset(), batch_size=9), batch_size=batch_size), reference())


def test_a_stream_cuts_batches_and_keeps_their_order():
    problem = Problem(network(), DataLoader(dataset(), batch_size=9), batch_size=4)
    seen = []
    with problem.guarded():
        problem.stream(lambda batch: seen.append(batch), "test")
    assert [len(x) for x, _ in seen] == [4, 4, 1, 4, 4, 1, 4, 1]
    assert torch.equal(torch.cat([x for x, _ in seen]), data()[0])
    assert problem.samples == 23


def test_memory_decides_the_micro_batch_unless_the_user_does():
    problem = Problem(network(), data())
    problem.fit_memory(2**20, backward=False)
    assert problem.micro_batch == 384
    problem.fit_memory(2**20, backward=True)
    assert problem.micro_batch == 64
    problem.fit_memory(2**40, backward=True)
    assert problem.micro_batch == 1
    problem.fit_memory(1, backward=True)
    assert problem.micro_batch == 512
    fixed = Problem(network(), data(), batch_size=5)
    fixed.fit_memory(1, backward=True)
    assert fixed.micro_batch == 5


# Out of memory


class Hungry(nn.Module):
    """Runs out of memory above a number of samples."""

    def __init__(self, largest, error):
        super().__init__()
        self.net = network()
        self.largest, self.error = largest, error
        failures = []
        # Known to a function only: what a model holds is restored after measuring.
        self.fail = failures.append
        self.seen_failures = lambda: failures

    def forward(self, x):
        if len(x) > self.largest:
            self.fail(len(x))
            raise self.error
        return self.net(x)


ERRORS = {
    "torch": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "python": MemoryError(),
    "cpu": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory"
    ),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
}


@pytest.mark.parametrize(
    "largest, error, went_on, failures",
    [
        (9, "cpu", 5, [23, 11]),
        (12, "torch", 11, [23]),
        (3, "cudnn", 2, [8, 4, 23, 11, 5]),
        (1, "python", 1, [8, 4, 2, 23, 11, 5, 2]),
    ],
)
def test_out_of_memory_halves_the_micro_batch_and_goes_on(largest, error, went_on, failures):
    model, (x, y) = Hungry(largest, ERRORS[error]), data()
    with untouched(model, x, y):
        report = measure(model, (x, y))
    assert model.seen_failures() == failures
    assert [note for note in report.notes if "memory" in note] == [
        f"out of memory: continued with micro-batches of {went_on}"
    ]
    names = {"net.fc1": "fc1", "net.head": "head"}
    for row in report.results:
        other = reference().value(
            row.measure, layer=names.get(row.layer), unit=row.unit, reduction=row.reduction
        )
        assert row.value == pytest.approx(other, rel=1e-6), row.where()
    assert report.meta["samples"] == 23


def test_running_out_between_two_layers_counts_no_sample_twice(monkeypatch):
    """Feature spreads add up layer by layer: memory may run out between two of them."""
    measured = spread._Moments.of
    calls = []

    def of(values):
        calls.append(len(values))
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no")
        return measured(values)

    monkeypatch.setattr(spread._Moments, "of", of)
    report = measure(network(), data(), measures="relative_flatness_normalized")
    assert calls == [23, 23, 11, 11, 11, 11, 1, 1]
    for layer in ("fc1", "head"):
        expected = reference().value("relative_flatness_normalized", layer=layer)
        assert report.value("relative_flatness_normalized", layer=layer) == pytest.approx(expected, rel=1e-10)


def test_a_sample_that_does_not_fit_is_an_error():
    model = Hungry(0, ERRORS["torch"])
    assert refusal(OutOfMemoryError, model, data()) == (
        "Expected one sample to fit into memory but it does not, on cpu. Use a lower dtype, or a device "
        "with more memory."
    )


def test_a_sample_whose_curvature_does_not_fit_is_an_error():
    problem = Problem(network(), data(), batch_size=8)
    sizes = []

    def step(batch):
        sizes.append(len(batch[0]))
        raise torch.OutOfMemoryError("no")

    with problem.guarded(), pytest.raises(OutOfMemoryError) as caught:
        problem.stream(step, "test")
    assert str(caught.value) == (
        "Expected one sample to fit into memory but it does not, on cpu. Measure fewer layers at a time "
        "(layers=), fewer measures, a lower dtype, or use a device with more memory."
    )
    assert sizes == [8, 4, 2, 1]


def test_other_runtime_errors_of_a_step_are_not_taken_for_memory():
    problem = Problem(network(), data())

    def step(batch):
        raise RuntimeError("something else")

    with problem.guarded(), pytest.raises(RuntimeError) as caught:
        problem.stream(step, "test")
    assert str(caught.value) == "something else"


# Structures of batches

Pair = namedtuple("Pair", "x y")


class Two(nn.Module):
    """Adds two inputs, positional or by name; returns what transformers return, or a dict, or a tensor."""

    def __init__(self, wrap=lambda logits: logits):
        super().__init__()
        self.net = network()
        self.wrap = wrap

    def forward(self, a, b=None):
        return self.wrap(self.net(a if b is None else a + b))


def two():
    x, y = data()
    return x - 1, torch.ones_like(x), y


STRUCTURES = {
    "tuples of inputs": (lambda a, b, y: [((a, b), y)], Two(), None),
    "dicts of inputs": (lambda a, b, y: [({"b": b, "a": a}, y)], Two(), None),
    "labels": (lambda a, b, y: [{"a": a, "b": b, "labels": y}], Two(), None),
    "named tuples": (lambda a, b, y: [Pair(a + b, y)], Two(), None),
    "lists": (lambda a, b, y: [[a + b, y]], Two(), None),
    "logits attribute": (
        lambda a, b, y: [(a + b, y)],
        Two(lambda f: namedtuple("Output", "loss logits")(None, f)),
        None,
    ),
    "logits entry": (lambda a, b, y: [(a + b, y)], Two(lambda f: {"hidden": None, "logits": f}), None),
    "own forward": (
        lambda a, b, y: [{"image": a, "shift": b, "class": y, "name": ["n"] * len(y)}],
        Two(lambda f: (f, 0)),
        lambda model, batch: (model(batch["image"], batch["shift"])[0], batch["class"]),
    ),
    "triples": (lambda a, b, y: [(a, b, y)], Two(), lambda model, batch: (model(*batch[:2]), batch[2])),
}


@pytest.mark.parametrize("structure", list(STRUCTURES))
@pytest.mark.parametrize("batch_size", [None, 5])
def test_batches_of_many_structures(structure, batch_size):
    lay_out, model, forward = STRUCTURES[structure]
    report = measure(model, lay_out(*two()), forward=forward, batch_size=batch_size)
    for layer in ("fc1", "head"):
        for name in ("hessian_trace", "relative_flatness_normalized"):
            expected = reference().value(name, layer=layer)
            assert report.value(name, layer=f"net.{layer}") == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "batch, arrived, example",
    [
        (lambda x, y: (x, y, y), "tuple(float64[23, 4], int64[23], int64[23])", "model(batch[0]), batch[1]"),
        (lambda x, y: x, "float64[23, 4]", "model(batch[0]), batch[1]"),
        (
            lambda x, y: {"image": x, "class": y},
            "dict(image: float64[23, 4], class: int64[23])",
            "model(batch['image']), batch['class']",
        ),
    ],
    ids=["triple", "inputs only", "dict"],
)
def test_batches_of_unknown_structure_are_refused(batch, arrived, example):
    arrived = arrived.replace("23", "8")
    assert refusal(DataError, network(), [batch(*data())]) == (
        f"Expected batches (input, target) or dicts with 'labels' but got {arrived}. Say how to use them, "
        f"for example forward=lambda model, batch: ({example})."
    )


def test_batches_without_tensors_are_refused():
    assert refusal(DataError, network(), [(["a"], [1])]) == (
        "Expected batches that hold tensors with one row per sample but got tuple(list(str), list(int)). "
        "Pass a DataLoader, a pair of tensors, or an iterable of (input, target) batches."
    )


# What a model returns


@pytest.mark.parametrize(
    "compute, arrived, choice",
    [
        (lambda self, x: (plain(self, x), x), "tuple(float64[8, 3], float64[8, 4])", "[0]"),
        (lambda self, x: (None, plain(self, x)), "tuple(NoneType, float64[8, 3])", "[1]"),
        (lambda self, x: {"out": plain(self, x)}, "dict(out: float64[8, 3])", "['out']"),
        (lambda self, x: SimpleNamespace(n=3, out=plain(self, x)), "SimpleNamespace", ".out"),
        (lambda self, x: None, "NoneType", "[0]"),
    ],
)
def test_outputs_that_are_no_tensor_are_refused_with_the_line_to_write(compute, arrived, choice):
    model = Net(compute)
    assert refusal(ModelError, model, data()) == (
        f"Expected the model to return one tensor but got {arrived}. Say which part is the output, for "
        f"example forward=lambda model, batch: (model(batch[0]){choice}, batch[1])."
    )
    if arrived != "NoneType":
        forward = eval(f"lambda model, batch: (model(batch[0]){choice}, batch[1])")
        assert measure(model, data(), forward=forward).layers() == ["fc1", "head"]


def test_the_line_to_write_for_dict_batches():
    x, y = data()
    model = Net(lambda self, x: (plain(self, x), x))
    call = "model(**{key: batch[key] for key in batch if key != 'labels'})"
    line = f"lambda model, batch: ({call}[0], batch['labels'])"
    assert refusal(ModelError, model, [{"x": x, "labels": y}]) == (
        "Expected the model to return one tensor but got tuple(float64[8, 3], float64[8, 4]). Say which part "
        f"is the output, for example forward={line}."
    )
    assert measure(model, [{"x": x, "labels": y}], forward=eval(line)).layers() == ["fc1", "head"]


def test_labels_of_causal_language_models_of_transformers_are_shifted():
    """Their labels are the tokens themselves: the prediction at a place is of the token after it."""
    kind = type("TinyLMHeadModel", (nn.Module,), {"__module__": "transformers.models.tiny"})
    kind.forward = lambda self, tokens: {"logits": self.head(self.table(tokens))}
    model = kind()
    model.table, model.head = nn.Embedding(5, 4).double(), nn.Linear(4, 5).double()
    tokens = torch.randint(5, (6, 7), generator=torch.Generator().manual_seed(0))
    report = measure(model, [{"tokens": tokens, "labels": tokens}])

    def by_hand(model, batch):
        return model(batch["tokens"])["logits"][:, :-1], batch["labels"][:, 1:]

    expected = measure(model, [{"tokens": tokens, "labels": tokens}], forward=by_hand)
    assert report.value("hessian_trace", layer="head") == expected.value("hessian_trace", layer="head")
    plain_kind = type("Tagger", (nn.Module,), {"forward": kind.forward})
    tagger = plain_kind()
    tagger.table, tagger.head = model.table, model.head
    aligned = measure(tagger, [{"tokens": tokens, "labels": tokens}])
    assert aligned.value("hessian_trace", layer="head") != report.value("hessian_trace", layer="head")


def test_a_forward_that_forgets_the_target_is_refused():
    assert refusal(ModelError, network(), data(), forward=lambda model, batch: model(batch[0])) == (
        "Expected forward to return (output, target) but got float64[8, 3]. For example forward=lambda "
        "model, batch: (model(batch[0]), batch[1])."
    )


@pytest.mark.parametrize(
    "compute", [lambda self, x: plain(self, x).T, lambda self, x: plain(self, x).mean(0)]
)
def test_outputs_without_a_row_per_sample_are_refused(compute):
    shape = "[3, 8]" if compute.__code__.co_names[-1] == "T" else "[3]"
    assert refusal(ModelError, Net(compute), data()) == (
        f"Expected one output row per sample, 8 here, but got outputs of shape {shape}. Pass forward= to "
        "arrange inputs and outputs with samples first."
    )


def test_samples_in_the_second_dimension_are_refused():
    """Sequences first: (T, n, features) with as many steps as samples, so that no length gives it away."""
    model = Net(lambda self, x: self.head(self.fc1(x).relu().mean(0)))
    x, y = torch.randn(8, 8, 4, dtype=torch.float64), torch.randint(3, (8,))
    assert refusal(ModelError, model, [(x, y)]) == (
        "Expected one output row per sample, 1 here, but got outputs of shape [8, 3]. Pass forward= to "
        "arrange inputs and outputs with samples first."
    )


def test_samples_in_the_second_dimension_are_measured_with_forward():
    model = Net(lambda self, x: self.head(self.fc1(x).relu().mean(0)))
    x, y = torch.randn(5, 9, 4, dtype=torch.float64), torch.randint(3, (9,))
    report = flatness.measure(
        model,
        [(x.transpose(0, 1), y)],
        forward=lambda m, batch: (m(batch[0].transpose(0, 1)), batch[1]),
        layers="last",
        progress=False,
    )
    risk = F.cross_entropy(model(x), y)
    assert report.meta["risk"] == pytest.approx(risk.item(), rel=1e-12)
    assert report.layers() == ["head"]


def test_a_model_that_fails_on_a_batch_shows_what_it_was_given():
    x, y = data()
    # Newer versions of torch name the operator.
    assert refusal(ModelError, network(), (x[:, :3], y)).replace("addmm: ", "") == (
        "Expected the model to take batches like tuple(float64[8, 3], int64[8]) but it raised RuntimeError: "
        "mat1 and mat2 shapes cannot be multiplied (8x3 and 4x6). Try it on one batch yourself, or pass "
        "forward= to say how to use a batch."
    )
    images = (torch.zeros(9, 4, dtype=torch.uint8), y[:9])
    assert refusal(ModelError, network(), images) == (
        "Expected the model to take batches like tuple(uint8[8, 4], int64[8]) but it raised RuntimeError: "
        "mat1 and mat2 must have the same dtype, but got Byte and Double. Try it on one batch yourself, "
        "or pass forward= to say how to use a batch."
    )


# Outputs of one number, two classes, one sample


class Tokens(nn.Module):
    """Tokens and their positions, looked up in tables of 20 and 4 rows."""

    def __init__(self):
        super().__init__()
        self.token, self.place, self.head = nn.Embedding(20, 3), nn.Embedding(4, 3), nn.Linear(3, 5)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(torch.tanh(self.token(x) + self.place(places)).mean(1))


@pytest.mark.parametrize(
    ("shape", "index", "table", "row", "where"),
    [
        ((30, 4), 25, "token", 4, " Counted from sample 0 of batch 1, number 15 of the data."),
        ((30, 4), -100, "token", 4, " Counted from sample 0 of batch 1, number 15 of the data."),
        ((30, 5), 4, "place", 4, " Seen on the first 8 samples."),
    ],
)
def test_an_index_beyond_an_embedding_table_is_named_with_the_table(shape, index, table, row, where):
    x, y = torch.zeros(shape, dtype=torch.int64), torch.arange(30) % 5
    x[19, 2] = index
    assert refusal(DataError, Tokens(), (x, y), batch_size=15) == (
        f"Expected indices from 0 to {19 if table == 'token' else 3} for the embedding table {table!r} but "
        f"row {row} of its input has {index}. Use the tokenizer that the model was trained with; for a table "
        f"of positions, cut samples to its length.{where}"
    )


@pytest.mark.parametrize(
    "loss, reference_loss", [("mse", F.mse_loss), ("bce", F.binary_cross_entropy_with_logits)]
)
@pytest.mark.parametrize("squeezed", [True, False])
def test_one_output_per_sample(loss, reference_loss, squeezed):
    body = Net(
        lambda self, x: self.out(self.fc1(x).relu()).squeeze(1) if squeezed else self.out(self.fc1(x).relu())
    )
    body.out = nn.Linear(6, 1).double()
    x, y = data()
    targets = (y > 0).double()
    report = measure(body, (x, targets), loss)
    output = body(x).reshape(-1)
    assert report.meta["risk"] == pytest.approx(reference_loss(output, targets).item(), rel=1e-12)
    features = body.fc1(x).relu().detach()
    second = 2.0 if loss == "mse" else (output.sigmoid() * (1 - output.sigmoid())).detach()
    expected = (second * features.square().sum(1)).mean()
    assert report.value("hessian_trace", layer="out") == pytest.approx(expected.item(), rel=1e-10)


def test_two_classes():
    model = Net(lambda self, x: self.out(self.fc1(x).relu()))
    model.out = nn.Linear(6, 2).double()
    x, y = data()
    report = measure(model, (x, y.clamp(max=1)))
    p = model(x).softmax(1)[:, 0].detach()
    expected = (2 * p * (1 - p) * model.fc1(x).relu().detach().square().sum(1)).mean()
    assert report.value("hessian_trace", layer="out") == pytest.approx(expected.item(), rel=1e-10)
    W = model.out.weight.detach()
    relative = (
        p * (1 - p) * (W[0] - W[1]).square().sum() * model.fc1(x).relu().detach().square().sum(1)
    ).mean()
    assert report.value("relative_flatness", layer="out") == pytest.approx(relative.item(), rel=1e-10)


def test_one_sample_is_the_whole_data_set():
    x, y = data()
    report = measure(network(), (x[:1], y[:1]))
    p = network()(x[:1]).softmax(1).detach()
    phi = network().fc1(x[:1]).relu().detach()
    assert report.value("hessian_trace", layer="head") == pytest.approx(
        float((p * (1 - p)).sum() * phi.square().sum())
    )
    # The Hessian is (diag p − ppᵀ) ⊗ φφᵀ.
    top = torch.linalg.eigvalsh(torch.diag(p[0]) - p.T @ p)[-1] * phi.square().sum()
    assert report.value("hessian_top_eigenvalue", layer="head") == pytest.approx(float(top), rel=1e-6)
    assert all(row.converged for row in report.results)


def test_one_class_only():
    x, _ = data()
    y = torch.zeros(23, dtype=torch.long)
    report = measure(network(), (x, y))
    assert report.value("hessian_trace", layer="head") == pytest.approx(
        reference().value("hessian_trace", layer="head")
    )
    assert report.meta["risk"] == pytest.approx(F.cross_entropy(network()(x), y).item())


# Losses and targets


def test_targets_out_of_range_are_refused():
    x, y = data()
    y[3] = 7
    assert refusal(DataError, network(), (x, y)) == (
        "Expected class indices from 0 to 2, since the model has 3 outputs, but got 7 for sample 3 of the "
        "batch. Number the classes from 0, or give the model 8 outputs. Seen on the first 8 samples."
    )


def test_targets_out_of_range_in_a_later_batch_are_located():
    x, y = data()
    y[18] = -1
    batches = [(x[:10], y[:10]), (x[10:], y[10:])]
    message = (
        "Expected class indices from 0 to 2, since the model has 3 outputs, but got -1 for sample {} of the "
        "batch. Number the classes from 0, or mark targets to skip with -100. Counted from sample {} of "
        "batch {}, number {} of the data."
    )
    assert refusal(DataError, network(), batches) == message.format(8, 0, 1, 10)
    assert refusal(DataError, network(), batches, batch_size=6) == message.format(2, 6, 1, 16)


def test_targets_of_the_wrong_type_are_refused():
    x, y = data()
    assert refusal(DataError, network(), (x, y.double())) == (
        "Expected integer class indices of shape (8,), or floating point class probabilities of shape (8, "
        "3), for outputs of shape (8, 3) but got torch.float64 targets of shape (8,). Write target.long() "
        "if they are class indices, or use loss='mse'. Seen on the first 8 samples."
    )
    assert refusal(DataError, network(), [(x, y.tolist())]) == (
        "Expected the targets as a torch.Tensor but got list. Convert them with torch.as_tensor(target), or "
        "pass a forward= that returns (output, target). Seen on the first 8 samples."
    )


def test_targets_that_are_all_ignored_are_refused():
    x, y = data()
    assert refusal(DataError, network(), (x, torch.full_like(y, -100))) == (
        "No target counts: all 23 samples weigh 0: every target is ignored, or its class has "
        "weight 0. Check ignore_index and the class weights of the loss."
    )


def test_ignored_targets_in_the_first_batch_do_not_matter():
    x, y = data()
    ignored = torch.cat([torch.full((9,), -100), y])
    report = measure(
        network(), (torch.cat([x[:9] + 1, x]), ignored), measures=["hessian_trace", "relative_flatness"]
    )
    for layer in ("fc1", "head"):
        for name in ("hessian_trace", "relative_flatness"):
            assert report.value(name, layer=layer) == pytest.approx(
                reference().value(name, layer=layer), rel=1e-10
            )


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_loss_that_is_not_finite_is_located(value, batch_size):
    x, y = data()
    x[17, 2] = float(value)
    batches = [(x[:10], y[:10]), (x[10:], y[10:])]
    assert refusal(NotFiniteError, network(), batches, batch_size=batch_size) == (
        "Expected a finite loss for every sample but sample 7 of batch 1 (number 17 of the data) has loss "
        "nan. Look for NaN or infinite inputs, or for outputs that overflow in torch.float64."
    )


def test_a_loss_that_is_not_finite_on_the_first_samples_is_located():
    x, y = data()
    x[2, 0] = float("nan")
    assert refusal(NotFiniteError, network(), (x, y)) == (
        "Expected a finite loss for every sample but sample 2 of batch 0 (number 2 of the data) has loss "
        "nan. Look for NaN or infinite inputs, or for outputs that overflow in torch.float64."
    )


def test_a_function_of_infinite_value_is_located_before_its_second_derivatives_are_blamed():
    x, y = data()
    x[17] *= 1e6

    def exponential(output, target):
        return output.exp().sum(1)

    assert refusal(NotFiniteError, network(), [(x[:10], y[:10]), (x[10:], y[10:])], exponential) == (
        "Expected a finite loss for every sample but sample 7 of batch 1 (number 17 of the data) has loss "
        "inf. Look for NaN or infinite inputs, or for outputs that overflow in torch.float64."
    )


def test_curvature_that_overflows_is_refused():
    model = network(torch.float16)
    with torch.no_grad():
        model.head.weight.mul_(0.01)
        model.head.bias.zero_()
    x, y = data()
    assert refusal(NotFiniteError, model, (300 * x, y), measures="hessian_trace", layers="head") == (
        "Expected finite curvature but got NaN or infinity in fc1, head, though every loss is finite: "
        "numbers overflow in torch.float16. Pass dtype=torch.float64."
    )


def test_unknown_losses_are_refused_with_the_nearest_name():
    assert refusal(LossError, network(), data(), "cross_entropie") == (
        "Expected one of the losses cross_entropy, nll, mse, squared_error, bce, normalized_cross_entropy "
        "but got 'cross_entropie'. Did you mean 'cross_entropy'? For any other loss pass a function of "
        "(output, "
        "target) that returns one loss per sample."
    )
    assert refusal(LossError, network(), data(), 3) == (
        "Expected a loss name, a torch loss or a function but got int. Use one of cross_entropy, nll, mse, "
        "squared_error, bce, normalized_cross_entropy, or a function of (output, target) that returns one "
        "loss per sample."
    )


def test_a_loss_of_the_whole_batch_is_refused():
    assert refusal(LossError, network(), data(), lambda output, target: output.square().mean()) == (
        "Expected lambda to return one loss per sample, shape (8,), but got a single number. Use "
        "reduction='none' and average over the trailing dimensions of each sample: "
        "losses.flatten(1).mean(1)."
    )


# Options


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"weight_decay": -0.1},
            "Expected weight_decay to be a finite number ≥ 0 but got -0.1. Pass the optimiser's value.",
        ),
        (
            {"weight_decay": float("inf")},
            "Expected weight_decay to be a finite number ≥ 0 but got inf. Pass the optimiser's value.",
        ),
        (
            {"weight_decay": "0.1"},
            "Expected weight_decay to be a finite number ≥ 0 but got '0.1'. Pass the optimiser's value.",
        ),
        (
            {"batch_size": 0},
            "Expected batch_size to be a positive integer or None but got 0. None chooses it by memory.",
        ),
        (
            {"batch_size": 2.5},
            "Expected batch_size to be a positive integer or None but got 2.5. None chooses it by memory.",
        ),
        (
            {"dtype": torch.int64},
            "Expected dtype to be torch.float16, bfloat16, float32, float64 or None but got torch.int64. "
            "For example dtype=torch.float64.",
        ),
        (
            {"dtype": "float64"},
            "Expected dtype to be torch.float16, bfloat16, float32, float64 or None but got 'float64'. For "
            "example dtype=torch.float64.",
        ),
        ({"seed": "a"}, "Expected seed to be an integer ≥ 0 but got 'a'. For example seed=0."),
        ({"seed": -1}, "Expected seed to be an integer ≥ 0 but got -1. For example seed=0."),
        (
            {"forward": "logits"},
            "Expected forward to be a function of (model, batch) but got str. For example forward=lambda "
            "model, batch: (model(batch[0]), batch[1]).",
        ),
        (
            {"device": "meta"},
            "Expected a device that torch can use but got 'meta': it holds no values. For example "
            "device='cpu'.",
        ),
        (
            {"precision": 0},
            "Expected precision to be a relative standard error between 0 and 1 but got 0. For example "
            "precision=0.01.",
        ),
    ],
)
def test_options_with_values_they_cannot_have_are_refused(options, message):
    assert refusal(OptionError, network(), data(), **options) == message


def test_a_device_that_does_not_exist_is_refused():
    with pytest.raises(RuntimeError) as reason:
        torch.device("gpu")
    assert refusal(OptionError, network(), data(), device="gpu") == (
        f"Expected a device that torch can use but got 'gpu': {reason.value}. For example device='cpu'."
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_absent_is_refused():
    with pytest.raises((AssertionError, RuntimeError)) as reason:
        torch.empty(0, device="cuda")
    assert refusal(OptionError, network(), data(), device="cuda") == (
        f"Expected a device that torch can use but got 'cuda': {str(reason.value).splitlines()[0]}. For "
        "example device='cpu'."
    )
