"""Data that comes the same way on every pass, and data that does not."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import flatness
from flatness.errors import DataError
from flatness.problem.sources import Source, check_second_reading
from small import assert_same, data, dataset, measure, network, reference
from untouched import refusal, untouched


class Augmented(Dataset):
    """Inputs with noise that is drawn anew whenever they are read."""

    def __init__(self, noise):
        self.x, self.y = data()
        self.noise = noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + self.noise(), self.y[index]


@pytest.mark.parametrize(
    "given",
    [
        lambda: DataLoader(dataset(), batch_size=5),
        lambda: DataLoader(dataset(), batch_size=5, shuffle=True),
        lambda: DataLoader(dataset(), batch_size=5, sampler=RandomSampler(dataset())),
        lambda: DataLoader(dataset(), batch_size=1),
        lambda: DataLoader(dataset(), batch_size=100, num_workers=0, shuffle=True),
        dataset,
        lambda: list(zip(*(part.split([1, 9, 10, 3]) for part in data()), strict=True)),
        lambda: [(x.float(), y.int()) for x, y in DataLoader(dataset(), batch_size=8)],
        lambda: [list(data())],
    ],
    ids=[
        "loader",
        "shuffled",
        "sampler",
        "ones",
        "one batch",
        "dataset",
        "ragged",
        "other dtypes",
        "one list",
    ],
)
def test_every_kind_of_data_gives_the_same_numbers(given, request):
    rel = 1e-5 if "other dtypes" in request.node.name else 1e-9
    model, given = network(), given()
    with untouched(model):
        report = measure(model, given)
    if rel == 1e-5:
        assert report.value("hessian_trace") == pytest.approx(reference().value("hessian_trace"), rel=rel)
    else:
        assert_same(report, reference(), rel)
    assert report.meta["samples"] == 23


@pytest.mark.parametrize("where", ["loader", "sampler"])
def test_a_shuffling_loader_with_its_own_generator_is_left_where_it_was(where):
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    if where == "loader":
        loader = DataLoader(dataset(), batch_size=5, shuffle=True, generator=generator)
    else:
        loader = DataLoader(dataset(), batch_size=5, sampler=RandomSampler(dataset(), generator=generator))
    assert_same(measure(network(), loader), reference())
    assert torch.equal(generator.get_state(), before)


def test_a_random_choice_of_samples_is_made_once():
    """Shuffled, the last ragged batch dropped: which samples are left out is drawn, once for all passes."""
    loader = DataLoader(dataset(), batch_size=5, shuffle=True, drop_last=True)
    report, again = measure(network(), loader), measure(network(), loader)
    assert report.meta["samples"] == 20
    assert_same(report, again)
    assert report.meta["data_fingerprint"] == again.meta["data_fingerprint"]
    other = measure(network(), loader, seed=1)
    assert other.meta["data_fingerprint"] != report.meta["data_fingerprint"]


def test_sampling_with_replacement_is_made_once():
    sampler = WeightedRandomSampler(torch.arange(1.0, 24.0), 30, generator=torch.Generator().manual_seed(3))
    report = measure(network(), DataLoader(dataset(), batch_size=8, sampler=sampler))
    assert report.meta["samples"] == 30


AUGMENTED = (
    "Expected the same samples whenever the data are read but the first {samples}, read twice, {change}. "
    "Measure without random augmentation: switch off random crops, flips, noise and mixing in the data set "
    "and its collation, or pass list(loader), which draws the samples once."
)
OWN = np.random.default_rng(0)
# Signs: of 20 samples some change theirs, so that the largest change is 2, unless all 20 agree (1 in 10^6).
SIGNS = {
    "torch": lambda: float(torch.randn(()).sign()),
    "python": lambda: random.choice([-1.0, 1.0]),
    "numpy": lambda: float(np.random.choice([-1.0, 1.0])),  # noqa: NPY002
    "a generator of its own": lambda: float(OWN.choice([-1.0, 1.0])),
    "the system": lambda: random.SystemRandom().choice([-1.0, 1.0]),
}


@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("noise", SIGNS)
def test_augmentation_is_refused_whatever_it_draws_from(noise, shuffle):
    loader = DataLoader(Augmented(SIGNS[noise]), batch_size=5, shuffle=shuffle)
    assert refusal(DataError, network(), loader) == AUGMENTED.format(samples=20, change="differ by up to 2")


def test_augmentation_of_a_data_set_without_a_loader_is_refused():
    expected = AUGMENTED.format(samples=23, change="differ by up to 2")
    assert refusal(DataError, network(), Augmented(SIGNS["torch"])) == expected


def test_augmentation_in_worker_processes_is_refused():
    loader = DataLoader(Augmented(SIGNS["numpy"]), batch_size=5, num_workers=2)
    assert refusal(DataError, network(), loader) == AUGMENTED.format(samples=20, change="differ by up to 2")


class Rewritten(Dataset):
    """Samples as a function of their number gives them."""

    def __init__(self, sample):
        self.samples = list(zip(*data(), strict=True))
        self.sample = sample

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.sample(index, *self.samples[index])


def mixed(samples):
    """Collation that mixes every sample with another."""
    x, y = torch.utils.data.default_collate(samples)
    return x + (random.random() < 0.5) * 2.0, y


BUFFER = torch.zeros(8, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    "make, samples, change",
    [
        (lambda: Rewritten(lambda i, x, y: (x.flip(0) if random.random() < 0.5 else x, y)), 16, None),
        (lambda: Rewritten(lambda i, x, y: (x, y if random.random() < 0.5 else (y + 1) % 3)), 16, None),
        (
            lambda: DataLoader(
                Rewritten(lambda i, x, y: (BUFFER.fill_(random.choice([0.0, 2.0])), y.expand(8))),
                batch_size=None,
            ),
            128,
            "differ by up to 2",
        ),
        (
            lambda: DataLoader(
                Rewritten(lambda i, x, y: (x[: random.choice([3, 4])], y)), batch_size=1, collate_fn=None
            ),
            16,
            "have different shapes",
        ),
        (lambda: DataLoader(dataset(), batch_size=1, collate_fn=mixed), 16, "differ by up to 2"),
    ],
    ids=["flips", "labels", "memory used again", "crops", "collation"],
)
def test_augmentation_of_every_kind_is_refused(make, samples, change):
    given = make()
    given = given if isinstance(given, DataLoader) else DataLoader(given, batch_size=4, shuffle=True)
    message = refusal(DataError, network(), given)
    if change is None:
        change = message.split("read twice, ")[1].split(". Measure")[0]
        assert float(change.removeprefix("differ by up to ")) > 0
    assert message == AUGMENTED.format(samples=samples, change=change)


def test_what_depends_on_the_number_of_a_sample_alone_is_no_augmentation():
    def sample(index, x, y):
        return x + torch.randn(4, generator=torch.Generator().manual_seed(index)), y

    loader = DataLoader(Rewritten(sample), batch_size=5, shuffle=True)
    assert_same(measure(network(), loader), measure(network(), list(DataLoader(Rewritten(sample), 23))))


def test_workers_read_the_same_samples():
    assert_same(measure(network(), DataLoader(dataset(), batch_size=5, num_workers=2)), reference())


def test_a_list_of_a_loader_is_one_draw():
    torch.manual_seed(3)
    drawn = list(DataLoader(Augmented(SIGNS["torch"]), batch_size=5))
    x, y = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    assert_same(measure(network(), drawn), measure(network(), (x, y)))


def test_numbers_that_are_none_are_the_same_when_read_again():
    nothing = torch.full((4,), torch.nan)
    check_second_reading(DataLoader(Rewritten(lambda i, x, y: (x, nothing, y)), batch_size=8))


class Stream(IterableDataset):
    """Samples in an order, and with noise, that are drawn from the states that all share."""

    def __init__(self, shuffle=False, noise=False):
        self.shuffle, self.noise = shuffle, noise

    def __iter__(self):
        samples = list(zip(*data(), strict=True))
        if self.shuffle:
            random.shuffle(samples)
        for x, y in samples:
            yield x + (random.random() if self.noise else 0), y


class Noisy(DataLoader):
    """A loader that adds to what it read."""

    def __iter__(self):
        for x, y in super().__iter__():
            yield x + torch.randn(()), y


BEGIN_ANEW = (
    "Expected the data to start again on every iteration, but the first sample was not seen "
    "again. Pass data that can be iterated repeatedly and whose samples stay the same: a DataLoader without "
    "random augmentation, a pair of tensors, or list(batches)."
)


@pytest.mark.parametrize(
    "given",
    [
        lambda: DataLoader(Stream(noise=True), batch_size=5),
        lambda: DataLoader(Stream(noise=True), batch_size=5, num_workers=1),
        lambda: DataLoader(Stream(noise=True, shuffle=True), batch_size=5),
        lambda: Noisy(dataset(), batch_size=5),
    ],
    ids=["stream", "stream in a worker", "shuffled stream", "loader"],
)
def test_noise_of_data_without_numbers_is_refused_also_where_one_pass_would_do(given):
    assert refusal(DataError, network(), given(), measures="hessian_trace") == BEGIN_ANEW


@pytest.mark.parametrize("option", ["drop_last", "sampler"])
def test_a_loader_of_its_own_kind_may_choose_samples(option):
    """Which others are left out when it begins with another random state says nothing against it."""

    class Counting(DataLoader):
        def __iter__(self):
            self.batches = 0
            for batch in super().__iter__():
                self.batches += 1
                yield batch

    sampler = RandomSampler(dataset(), replacement=True)
    options = {"drop_last": {"shuffle": True, "drop_last": True}, "sampler": {"sampler": sampler}}[option]
    report = measure(network(), Counting(dataset(), batch_size=5, **options))
    assert report.meta["samples"] == (20 if option == "drop_last" else 23)


def test_noise_on_some_samples_of_a_stream_is_refused():
    class Rare(Stream):
        def __iter__(self):
            for number, (x, y) in enumerate(super().__iter__()):
                yield (x + random.random() if number == 3 else x), y

    assert refusal(DataError, network(), DataLoader(Rare(), batch_size=5)) == BEGIN_ANEW


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_shuffles_gives_the_same_numbers(workers):
    loader = DataLoader(Stream(shuffle=True), batch_size=5, num_workers=workers)
    assert_same(measure(network(), loader), reference())


class Changing:
    """Batches of which the last is not the same on every pass."""

    def __init__(self, change):
        self.passes = 0
        self.change = change

    def __iter__(self):
        self.passes += 1
        x, y = data()
        yield x[:8], y[:8]
        yield self.change(x[8:], self.passes), y[8:]


def test_samples_that_change_between_passes_are_refused():
    changing = Changing(lambda x, passes: x + passes)
    assert refusal(DataError, network(), changing) == (
        "Expected every pass over the data to see the same samples but got 23 samples first and 23 others "
        "later. Measure on data without random augmentation and without a random choice of samples."
    )


def test_another_number_of_samples_in_a_later_pass_is_refused():
    class Growing(Changing):
        def __iter__(self):
            batches = list(super().__iter__())
            return iter(batches + batches[: self.passes - 2])

    assert refusal(DataError, network(), Growing(lambda x, passes: x)) == (
        "Expected every pass over the data to see the same samples but got 23 samples first and 31 samples "
        "later. Measure on data without random augmentation and without a random choice of samples."
    )


def test_a_generator_is_refused():
    x, y = data()
    assert refusal(DataError, network(), ((x, y) for _ in range(2))) == (
        "Expected data that can be iterated more than once but got a one-shot generator. Pass a DataLoader, "
        "a pair of tensors, or list(batches)."
    )


class OneShot:
    def __init__(self):
        self.batches = iter([tuple(part[:9] for part in data()), tuple(part[9:] for part in data())])

    def __iter__(self):
        return self.batches


class OneShotDataset(IterableDataset):
    def __init__(self):
        self.samples = iter(list(zip(*data(), strict=True)))

    def __iter__(self):
        return self.samples


@pytest.mark.parametrize("given", [OneShot, lambda: DataLoader(OneShotDataset(), batch_size=5)])
def test_hidden_one_shot_data_is_refused_also_where_one_pass_would_do(given):
    """What was looked at beforehand would be missing from the pass."""
    assert refusal(DataError, network(), given(), measures="hessian_trace") == (
        "Expected the data to start again on every iteration, but the first sample was not "
        "seen again. Pass data that can be iterated repeatedly and whose samples stay the same: a "
        "DataLoader without random augmentation, a pair of tensors, or list(batches)."
    )


EMPTY = "Expected at least one sample but the data is empty. Check the data set and the loader's drop_last."


@pytest.mark.parametrize(
    "given",
    [
        lambda: tuple(part[:0] for part in data()),
        list,
        lambda: [tuple(part[:0] for part in data())],
        lambda: DataLoader(dataset(4), batch_size=5, drop_last=True),
        lambda: dataset(0),
    ],
    ids=["pair", "no batches", "empty batch", "dropped", "dataset"],
)
def test_empty_data_is_refused(given):
    assert refusal(DataError, network(), given()) == EMPTY


def test_empty_batches_count_nothing():
    x, y = data()
    assert_same(
        measure(network(), [(x[:0], y[:0]), (x[:9], y[:9]), (x[:0], y[:0]), (x[9:], y[9:])]), reference()
    )


@pytest.mark.parametrize(
    "given, arrived",
    [
        (lambda: tuple(part.numpy() for part in data()), "tuple(ndarray, ndarray)"),
        (lambda: data()[0], "float64[23, 4]"),
        (lambda: {"x": "mnist"}, "dict(x: str)"),
        (lambda: "mnist", "str"),
        (lambda: 3, "int"),
        (lambda: None, "NoneType"),
    ],
    ids=["arrays", "inputs only", "dict of no tensors", "name", "number", "none"],
)
def test_what_is_no_data_is_refused(given, arrived):
    assert refusal(DataError, network(), given()) == (
        "Expected a DataLoader, a pair of tensors, a dict of tensors or an iterable of batches but got "
        f"{arrived}. For example flatness.measure(model, (inputs, targets)) with two tensors; "
        "torch.as_tensor converts an array, flatness.data.load loads a data set by name."
    )


class Named(nn.Module):
    """The small network for an input with a name."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("one_batch", [lambda x, y: {"x": x, "labels": y}, lambda x, y: ({"x": x}, y)])
@pytest.mark.parametrize("batch_size", [None, 5])
def test_one_dict_is_one_batch_of_all_samples(one_batch, batch_size):
    x, y = data()
    found = measure(Named(), one_batch(x, y), measures=["relative_flatness"], batch_size=batch_size)
    assert found.meta["samples"] == 23
    for layer in ("fc1", "head"):
        expected = reference().value("relative_flatness", layer=layer)
        assert found.value("relative_flatness", layer=f"net.{layer}") == pytest.approx(expected, rel=1e-12)


def test_one_dict_without_labels_is_refused_with_what_to_write():
    assert refusal(DataError, Named(), {"x": data()[0]}) == (
        "Expected batches (input, target) or dicts with 'labels' but got dict(x: float64[8, 4]). Say how to "
        "use them, for example forward=lambda model, batch: (model(batch['image']), batch['class'])."
    )


LENGTHS = (
    "Expected as many targets as inputs but got inputs of shape [23, 4] and targets of shape [22]. The "
    "first dimension of both counts samples."
)


@pytest.mark.parametrize("batched", [False, True])
def test_inputs_and_targets_of_different_length_are_refused(batched):
    x, y = data()
    assert refusal(DataError, network(), [(x, y[1:])] if batched else (x, y[1:])) == LENGTHS


def test_different_lengths_in_a_later_batch_are_refused():
    x, y = data()
    assert refusal(DataError, network(), [(x, y), (x, y[1:])]) == LENGTHS


@pytest.mark.parametrize("write", [torch.Tensor.zero_, lambda x: x.data.zero_()], ids=["seen", "unseen"])
@pytest.mark.parametrize("batches", [False, True], ids=["tensors", "batches"])
def test_inputs_that_the_model_overwrites_on_later_samples_only_are_no_longer_the_data(write, batches):
    """Nothing shows on the samples looked at first; what a pass sees is noted before the model runs."""

    def forward(model, batch):
        if len(batch[0]) > 8:
            write(batch[0][8:])
        return model(batch[0]), batch[1]

    given = [(x, y) for x, y in zip(*(part.split([12, 11]) for part in data()), strict=True)]
    with pytest.raises(DataError) as caught:
        measure(network(), given if batches else data(), forward=forward)
    assert str(caught.value) == (
        "Expected every pass over the data to see the same samples but got 23 samples first and 23 others "
        "later. Measure on data without random augmentation and without a random choice of samples."
    )


def test_a_list_of_batches_is_counted_before_the_first_pass():
    x, y = torch.randn(7, 3), torch.zeros(7)
    assert Source([(x[:4], y[:4]), (x[4:], y[4:])], 0).expected_samples() == 7
    assert Source([{"x": x, "y": y}], 0).expected_samples() == 7
    assert Source((x, y), 0).expected_samples() == 7
    assert Source(DataLoader(TensorDataset(x, y), 2), 0).expected_samples() == 7
    assert Source([("a", "b")], 0).expected_samples() is None


def test_the_same_samples_are_measured_in_the_same_way_as_tensors_and_as_a_list():
    """Exactly, as there are few of them; without their number the choice would fall on sampling."""
    torch.manual_seed(0)
    hidden = nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh()
    model = nn.Sequential(*hidden, nn.Linear(40, 3)).double()
    x, y = torch.randn(20, 6, dtype=torch.float64), torch.arange(20) % 3
    reports = [
        flatness.measure(model, data, measures="normalized_sharpness", progress=False)
        for data in ((x, y), [(x[:12], y[:12]), (x[12:], y[12:])])
    ]
    values = [[(result.method, result.layer) for result in report.results] for report in reports]
    assert values[0] == values[1]
    assert {result.method for result in reports[1].results} == {"exact"}
    for one, other in zip(*(report.results for report in reports), strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-10)
