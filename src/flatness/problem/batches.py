"""Batches of any structure: moved, sliced, described, fingerprinted, and made of a table's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flatness.errors import DataError, listed
from flatness.losses.softmax import CrossEntropy

_SAMPLED_ENTRIES = 64
_MIX = 0x5DEECE66D1B5A4B3
_PLACE = 0x1E3779B97F4A7C15
_ROWS = 64  # of a table in a batch


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch, in a fixed order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, tuple, list)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(part)


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor replaced by `function` of it."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(part, function) for part in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(part, function) for part in batch)
    return batch


def size_of(batch: Any) -> int:
    """Number of samples: the first dimension of the first tensor that has one."""
    for tensor in tensors_in(batch):
        if tensor.dim() > 0:
            return tensor.shape[0]
    raise DataError(
        f"Expected batches that hold tensors with one row per sample but got {describe(batch)}. "
        "Pass a DataLoader, a pair of tensors, or an iterable of (input, target) batches."
    )


def rows(batch: Any, start: int, stop: int) -> Any:
    """Samples start to stop of a batch; tensors that do not have one row per sample stay whole."""
    return picked(batch, slice(start, stop))


def picked(batch: Any, index: slice | Tensor) -> Any:
    """The samples of a batch with these places; tensors without one row per sample stay whole."""
    n = size_of(batch)

    def pick(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != n:
            return tensor
        return tensor[index if isinstance(index, slice) else index.to(tensor.device)]

    return map_tensors(batch, pick)


def place(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Move a batch to a device, and its floating-point tensors to a dtype."""

    def move(tensor: Tensor) -> Tensor:
        # Only copies towards an accelerator may be left unfinished: whatever reads them there waits for them.
        pending = device.type == "cuda" and tensor.device.type == "cpu"
        tensor = tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=pending)
        return tensor.clone() if tensor.is_inference() else tensor

    return map_tensors(batch, move)


def on_host(values: list[Tensor]) -> list[Tensor]:
    """Tensors brought to the host; a GPU is waited for once, not for each of them."""
    found = [value.to("cpu", non_blocking=value.is_cuda) for value in values]
    for device in {value.device for value in values if value.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return found


def copied(batch: Any) -> Any:
    """The same batch in memory of its own."""
    return map_tensors(batch, Tensor.clone)


def versions(batch: Any) -> list[int]:
    """Counters that grow when a tensor of the batch is written to."""
    return [tensor._version for tensor in tensors_in(batch)]


def describe(value: Any) -> str:
    """What a value looks like, for messages.

    >>> describe((torch.ones(2, 3), [1, "a"]))
    'tuple(float32[2, 3], list(int, str))'
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        parts = ", ".join(f"{key}: {describe(part)}" for key, part in list(value.items())[:6])
        return f"{type(value).__name__}({parts})"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(describe(part) for part in value[:6])})"
    return type(value).__name__


def sample_codes(batch: Any) -> Tensor:
    """A number for each sample that depends on its values, not on its place in the batch: (n,) int64.

    Up to 64 evenly spaced entries of each tensor of a sample are hashed. Sums of codes, modulo 2^64, tell
    data sets apart whatever the order and the batches.
    """
    n = size_of(batch)
    device = next(tensor.device for tensor in tensors_in(batch) if tensor.dim() > 0)
    codes = torch.zeros(n, dtype=torch.int64, device=device)
    for position, tensor in enumerate(tensors_in(batch)):
        if tensor.dim() == 0 or tensor.shape[0] != n or tensor.numel() == 0:
            continue
        flat = tensor.detach().reshape(n, -1)
        if flat.shape[1] > _SAMPLED_ENTRIES:
            spaced = torch.arange(_SAMPLED_ENTRIES, device=flat.device)
            flat = flat[:, spaced * (flat.shape[1] - 1) // (_SAMPLED_ENTRIES - 1)]
        bits = _as_integers(flat)
        # Every place has a number of its own: values that change places change the code.
        places = torch.arange(bits.shape[1], device=bits.device) + _SAMPLED_ENTRIES * position + 1
        own = _mixed(torch.add(places * _PLACE, bits, alpha=_MIX)).sum(1).to(device)
        codes = torch.add(own, codes, alpha=_MIX)
    return _mixed(codes * _MIX)


def _mixed(codes: Tensor) -> Tensor:
    """Spread the high bits over the low ones, in place, so that sums of codes do not cancel."""
    codes.bitwise_xor_(codes >> 31).mul_(_MIX)
    return codes.bitwise_xor_(codes >> 29)


def _as_integers(values: Tensor) -> Tensor:
    if values.is_complex():
        values = torch.view_as_real(values).flatten(1)
    if not values.is_floating_point():
        return values.long()
    return values.double().view(torch.int64)


def logits_of(output: Any) -> Any:
    """The tensor of an output as transformers wrap it."""
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return getattr(output, "logits", output)


class Table:
    """A `datasets.Dataset` as batches, every pass the same.

    A column "label" is handed on as "labels", as the collators of transformers do. Sequences are padded to
    the longest of their batch: labels with −100, which does not count, the rest with 0.

    Args:
        dataset: The table. Its columns must be numbers.

    Raises:
        DataError: If it is not a single table, or holds what no tensor can.
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
