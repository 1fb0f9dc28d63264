"""Tables of `datasets`, Hugging Face's, as batches: dicts of tensors, rows of different length padded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flatness.errors import DataError, listed
from flatness.losses.softmax import CrossEntropy

_ROWS = 64


class Table:
    """A `datasets.Dataset` as batches, every pass the same.

    A column "label" is handed on as "labels", as the collators of transformers do. Sequences are padded to
    the longest of their batch: labels with −100, which does not count, the rest with 0.

    Args:
        dataset: The table. Its columns must be numbers.

    Raises:
        DataError: If it is no single table, or holds what no tensor can.
    """

    def __init__(self, dataset: Any) -> None:
        if isinstance(dataset, Mapping):
            splits = list(dataset)
            raise DataError(
                f"Expected one split of a data set but got a {type(dataset).__name__} with {listed(splits)}. "
                f"Pass data[{next(iter(splits), 'train')!r}]."
            )
        if not hasattr(dataset, "__getitem__"):
            raise DataError(
                f"Expected a datasets.Dataset but got {type(dataset).__name__}, which can be read only once. "
                "Pass datasets.Dataset.from_list(list(data))."
            )
        self.dataset = dataset.with_format("torch")
        rows = self.dataset[:1]
        words = [name for name, values in rows.items() if not all(isinstance(one, Tensor) for one in values)]
        if words:
            raise DataError(
                f"Expected columns of numbers but these hold something else: {listed(words)}. Pass "
                f"data.remove_columns({words!r})."
            )

    def __len__(self) -> int:
        return -(-len(self.dataset) // _ROWS)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Batches of rows, in order."""
        for start in range(0, len(self.dataset), _ROWS):
            rows = self.dataset[start : start + _ROWS]
            yield {_renamed(name, rows): self._column(name, rows) for name in rows}

    def _column(self, name: str, rows: Mapping[str, Any]) -> Tensor:
        values = rows[name]
        if isinstance(values, Tensor):
            return values
        if any(value.dim() != 1 for value in values):
            shapes = listed(dict.fromkeys(str(list(value.shape)) for value in values), 3)
            raise DataError(
                f"Expected entries of one shape in the column {name!r} but got {shapes}. Give them one "
                "shape with data.map(...), or pass a DataLoader with your own collate_fn."
            )
        if "attention_mask" not in rows:
            raise DataError(
                f"Expected sequences of one length in the column {name!r}, or a column 'attention_mask' that "
                "marks padding, but there is neither. Pad when tokenising: tokenizer(text, "
                "padding=True)."
            )
        labels = _renamed(name, rows) == "labels"
        return pad_sequence(list(values), True, CrossEntropy().ignore_index if labels else 0)


def _renamed(name: str, rows: Mapping[str, Any]) -> str:
    return "labels" if name == "label" and "labels" not in rows else name
