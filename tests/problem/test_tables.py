"""Tables of `datasets` as data; stand-ins with its interface, as it need not be installed."""

import pytest
import torch
from torch import nn

import flatness
from flatness.errors import DataError
from flatness.problem.sources import Source
from labelled_models import TOKENS, Tokens


class Table:
    """What `datasets.Dataset` is asked for: columns of rows, as tensors where they are numbers."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def with_format(self, kind):
        assert kind == "torch"
        return self

    def __getitem__(self, places):
        chosen = self.rows[places]
        return {name: self._column([row[name] for row in chosen]) for name in (chosen or [{}])[0]}

    def _column(self, values):
        if isinstance(values[0], str):
            return values
        values = [torch.as_tensor(value) for value in values]
        return torch.stack(values) if len({value.shape for value in values}) == 1 else values


Table.__module__ = "datasets.arrow_dataset"


class Splits(dict):
    pass


class Stream:
    def __iter__(self):
        return iter([])


Splits.__module__ = Stream.__module__ = "datasets.others"
Splits.__name__, Stream.__name__ = "DatasetDict", "IterableDataset"


def rows(n=70, lengths=(4, 5, 6)):
    generator = torch.Generator().manual_seed(0)
    found = []
    for row in range(n):
        tokens = torch.randint(TOKENS, (lengths[row % len(lengths)],), generator=generator).tolist()
        found.append({"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": tokens})
    return found


def padded(rows):
    """The same, padded by hand: one batch."""
    longest = max(len(row["labels"]) for row in rows)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])
        for name, value in fill.items()
    }


def test_a_table_is_measured_as_its_padded_batches_are():
    model, table = Tokens(), rows()
    asked = {"measures": ["hessian_trace", "relative_flatness"], "layers": "last", "progress": False}
    found = flatness.measure(model, Table(table), **asked)
    expected = flatness.measure(model, [padded(table)], **asked)
    assert found.meta["samples"] == 70
    for name in asked["measures"]:
        assert found.value(name, layer="head") == pytest.approx(expected.value(name, layer="head"), rel=1e-12)


def test_rows_of_one_length_need_no_mask_and_label_means_labels():
    class Pixels(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(12, 3)

        def forward(self, pixel_values):
            return self.fc(pixel_values.flatten(1))

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 3, 2, 2, generator=generator), torch.randint(3, (9,), generator=generator)
    table = Table([{"pixel_values": one, "label": label} for one, label in zip(x, y, strict=True)])
    model = Pixels()
    found = flatness.measure(model, table, measures="hessian_trace", progress=False)
    expected = flatness.measure(
        model, [{"pixel_values": x, "labels": y}], measures="hessian_trace", progress=False
    )
    assert found.value("hessian_trace", layer="fc") == expected.value("hessian_trace", layer="fc")
    source = Source(table, 0)
    assert (source.expected_samples(), source.expected_batches(3)) == (9, 1)


@pytest.mark.parametrize(
    "data, message",
    [
        (
            Splits(train=Table(rows()), test=Table(rows())),
            "Expected one split of a data set but got a DatasetDict with train, test. Pass data['train'].",
        ),
        (
            Stream(),
            "Expected a datasets.Dataset but got IterableDataset, which can be read only once. Pass "
            "datasets.Dataset.from_list(list(data)).",
        ),
        (
            Table([{"text": "a", "labels": 1}]),
            "Expected columns of numbers but these hold something else: text. Pass "
            "data.remove_columns(['text']).",
        ),
        (
            Table([{"input_ids": [1] * length, "labels": [1] * length} for length in (2, 3)]),
            "Expected sequences of one length in the column 'input_ids', or a column 'attention_mask' that "
            "marks padding, but there is neither. Pad when tokenising: tokenizer(text, "
            "padding=True).",
        ),
        (
            Table([{"pixel_values": torch.ones(3, size, size), "labels": 1} for size in (2, 3)]),
            "Expected entries of one shape in the column 'pixel_values' but got [3, 2, 2], [3, 3, 3]. Give "
            "them one shape with data.map(...), or pass a DataLoader with your own collate_fn.",
        ),
        (
            Table([]),
            "Expected at least one sample but the data is empty. Check the data set and the loader's "
            "drop_last.",
        ),
    ],
)
def test_what_is_no_table_of_numbers_is_refused_with_the_line_to_write(data, message):
    with pytest.raises(DataError) as caught:
        flatness.measure(Tokens(), data, progress=False)
    assert str(caught.value) == message
