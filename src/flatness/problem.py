"""Problem: a model, its data and a loss, made safe to differentiate and streamed in micro-batches that fit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from flatness import batches
from flatness.errors import DataError, ModelError, NondeterministicError, NotFiniteError, OptionError, OutOfMemoryError
from flatness.guard import check_model, converted, measuring, unwrap
from flatness.losses import Items, resolve_loss
from flatness.progress import ProgressBar

Forward = Callable[[nn.Module, Any], tuple[Tensor, Any]]
_EXAMPLE_SIZE = 8
_DEFAULT_BATCH = 256
_MEGABYTE = 2**20


class Problem:
    """Model + data + loss.

    Everything that touches the data goes through `stream`, which weighs samples (never batches), splits batches to fit
    into memory, and checks that every pass sees the same samples. All work happens inside ``with problem.guarded():``.

    Args:
        model: Any torch module; never modified. With `device` or `dtype` a converted copy is measured.
        data: A DataLoader, a pair of tensors, a Dataset, or any re-iterable of batches.
        loss: A name, a torch loss module, or a callable that returns one loss per sample.
        forward: ``forward(model, batch) -> (output, target)`` for batches of another structure.
        weight_decay: Coefficient of torch's penalty; adds weight_decay·I to every Hessian.
        batch_size: Samples per micro-batch; chosen by memory when None.
        device: Where to measure; the model's device when None.
        dtype: In which precision; the model's when None.
        seed: Seed of everything random.
        progress: Whether to show a bar on long work.

    Attributes:
        notes: What happened that the user should know.
        samples: Number of samples of a full pass, known after the first.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        loss: Any = "cross_entropy",
        *,
        forward: Forward | None = None,
        weight_decay: float = 0.0,
        batch_size: int | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        progress: bool = True,
    ) -> None:
        self.loss = resolve_loss(loss)
        _check_options(weight_decay, batch_size, dtype)
        model, self.notes = unwrap(model) if isinstance(model, nn.Module) else (model, [])
        check_model(model)
        if any(module.training for module in model.modules()):
            self.notes.append("the model was in training mode; measured in evaluation mode and set back")
        self.model = converted(model, torch.device(device) if device is not None else None, dtype)
        parameter = next(self.model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        if self.dtype in (torch.float16, torch.bfloat16):
            self.notes.append(f"computed in {self.dtype}: about two digits; pass dtype=torch.float32 for more")
        self.data = _reiterable(data)
        self.forward = forward or default_forward
        self.weight_decay = float(weight_decay)
        self.seed = seed
        self.progress = progress
        self.samples: int | None = None
        self.fingerprint: int | None = None
        self._fixed_batch = batch_size
        self.micro_batch = batch_size or _DEFAULT_BATCH

    def guarded(self) -> AbstractContextManager[None]:
        """A context in which the model is in evaluation mode, and after which it is as it was."""
        return measuring(self.model, self.seed)

    def items(self, batch: Any) -> Items:
        """Run the model on a placed batch and lay its outputs out as predictions."""
        output, target = self.forward(self.model, batch)
        if not isinstance(output, Tensor):
            raise ModelError(
                f"Expected the model to return one tensor but got {batches.describe(output)}. Say which part is the output, for example "
                "forward=lambda model, batch: (model(batch[0])[0], batch[1])."
            )
        if output.shape[:1] != (batches.size_of(batch),):
            raise ModelError(
                f"Expected one output row per sample, {batches.size_of(batch)}, but got outputs of shape {list(output.shape)}. "
                "Pass forward= to lay the output out with samples first."
            )
        return self.loss.items(output, target)

    def placed(self, batch: Any) -> Any:
        """The batch on the measuring device, floating-point parts in the measuring dtype."""
        return batches.place(batch, self.device, self.dtype)

    def example(self) -> Any:
        """A few samples of the first batch, placed: what plans and probes are made from."""
        for batch in self._raw_batches():
            if batches.size_of(batch) > 0:
                return self.placed(batches.rows(batch, 0, _EXAMPLE_SIZE))
        raise DataError("Expected at least one sample but the data is empty. Check the data set and the loader's drop_last.")

    def probe(self, example: Any) -> None:
        """Refuse a model that is random, that mixes samples, or whose loss is not finite on the example."""
        with torch.no_grad():
            first, again = self.items(example), self.items(example)
            self.loss.check(*self.forward(self.model, example))
            scale = float(first.logits.abs().max().clamp(min=1e-30))
            change = float((first.logits - again.logits).abs().max())
            if change > 1e-4 * scale:
                raise NondeterministicError(
                    f"Expected the same output for the same batch but two runs in evaluation mode differ by {change:.3g}. Look for "
                    "F.dropout(x) without training=self.training, for noise, or for random sampling inside forward."
                )
            if batches.size_of(example) > 1:
                alone = self.items(batches.rows(example, 0, 1)).logits
                change = float((first.logits[:1] - alone).abs().max()) if alone.shape == first.logits[:1].shape else float("inf")
                if change > 1e-2 * scale:
                    raise ModelError(
                        f"Expected each sample's output to depend on that sample alone but it changes by {change:.3g} when the rest of the "
                        "batch is left out. Samples must come first in every tensor, and no layer may use statistics of the batch."
                    )

    def fit_memory(self, bytes_per_sample: int, *, backward: bool) -> None:
        """Choose the micro-batch from what one sample takes, unless the user fixed it."""
        if self._fixed_batch is None:
            fitting = _memory_budget(self.device, backward) // max(1, bytes_per_sample)
            few = _memory_budget(self.device, backward=False) // max(1, bytes_per_sample)
            self.micro_batch = max(1, min(65536, max(fitting, min(8, few))))

    def stream(self, step: Callable[[Any], None], label: str) -> None:
        """One pass over the data.

        Args:
            step: Called with each placed micro-batch. It must add to its totals only at its very end: when memory runs out it
                is called again with half as many samples.
            label: What the progress bar says.
        """
        seen, codes = 0, torch.zeros((), dtype=torch.int64)
        with ProgressBar(label, self._expected_batches(), self.progress) as bar:
            for batch in self._raw_batches():
                size = batches.size_of(batch)
                codes = codes.to(next(batches.tensors_in(batch)).device) + batches.fingerprint(batch)
                self._steps(step, batch, size)
                seen += size
                bar.advance()
        self._check_pass(seen, int(codes))

    def locate_bad_loss(self) -> None:
        """Find the first sample whose loss is not finite and raise; called when the total is not."""
        index = 0
        for number, batch in enumerate(self._raw_batches()):
            size = batches.size_of(batch)
            for start in range(0, size, self.micro_batch):
                part = self.placed(batches.rows(batch, start, start + self.micro_batch))
                with torch.no_grad():
                    values = self.loss.values(self.items(part))
                bad = (~values.isfinite()).nonzero()
                if len(bad):
                    sample = start + int(bad[0])
                    raise NotFiniteError(
                        f"Expected a finite loss for every sample but sample {sample} of batch {number} (number {index + sample} of the data) has "
                        f"loss {float(values[bad[0]])}. Look for NaN or infinite inputs, or outputs that overflow in {self.dtype}."
                    )
            index += size

    def _steps(self, step: Callable[[Any], None], batch: Any, size: int) -> None:
        start = 0
        while start < size:
            stop = min(size, start + self.micro_batch)
            part = self.placed(batches.rows(batch, start, stop)) if stop - start < size else self.placed(batch)
            if self._fits(step, part):
                start = stop
            elif stop - start == 1:
                raise OutOfMemoryError(
                    f"Expected one sample to fit into memory but it does not, on {self.device}. Measure fewer layers at a time (layers=), "
                    "fewer measures, a lower dtype, or use a device with more memory."
                )
            else:
                self.micro_batch = max(1, (stop - start) // 2)
                self.notes.append(f"out of memory: went on with micro-batches of {self.micro_batch}")

    def _fits(self, step: Callable[[Any], None], part: Any) -> bool:
        try:
            step(part)
            return True
        except (torch.OutOfMemoryError, MemoryError):
            pass
        except RuntimeError as error:
            if "can't allocate memory" not in str(error) and "not enough memory" not in str(error):
                raise
        # Outside the handler, so that the traceback no longer holds the tensors of the failed step.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return False

    def _raw_batches(self) -> Iterator[Any]:
        """One iteration over the data; reseeded, so that a shuffling loader gives the same order every time."""
        if isinstance(self.data, _TensorPair):
            yield from self.data.batches(self.micro_batch)
            return
        generator = getattr(self.data, "generator", None)
        state = generator.get_state() if isinstance(generator, torch.Generator) else None
        torch.manual_seed(self.seed)
        try:
            yield from self.data
        finally:
            if state is not None:
                generator.set_state(state)  # type: ignore[union-attr]

    def _expected_batches(self) -> int | None:
        try:
            steps = self.micro_batch if isinstance(self.data, _TensorPair) else 1
            return -(-len(self.data) // steps)
        except TypeError:
            return None

    def _check_pass(self, seen: int, code: int) -> None:
        if seen == 0:
            raise DataError("Expected at least one sample but the data is empty. Check the data set and the loader's drop_last.")
        if self.samples is None:
            self.samples, self.fingerprint = seen, code
        elif (seen, code) != (self.samples, self.fingerprint):
            raise DataError(
                f"Expected every pass over the data to see the same samples but got {self.samples} first and then {seen if seen != self.samples else 'different ones'}. "
                "Random augmentation, or shuffle=True with drop_last=True, changes the data: measure on a loader without them."
            )


class _TensorPair:
    """Inputs and targets held as two tensors."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        if x.dim() == 0 or y.dim() == 0 or x.shape[0] != y.shape[0]:
            raise DataError(
                f"Expected as many targets as inputs but got inputs of shape {list(x.shape)} and targets of shape {list(y.shape)}. "
                "The first dimension of both counts samples."
            )
        self.x, self.y = x, y

    def __len__(self) -> int:
        return self.x.shape[0]

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self), size):
            yield self.x[start : start + size], self.y[start : start + size]


def default_forward(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """(output, target) of an (input, target) batch, or of a dict with "labels"."""
    if isinstance(batch, Mapping) and "labels" in batch:
        return _logits(model(**{key: value for key, value in batch.items() if key != "labels"})), batch["labels"]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        x, target = batch
        output = model(**x) if isinstance(x, Mapping) else model(*x) if isinstance(x, (tuple, list)) else model(x)
        return _logits(output), target
    raise DataError(
        f"Expected batches (input, target) or dicts with 'labels' but got {batches.describe(batch)}. "
        "Say how to use them, for example forward=lambda model, batch: (model(batch['image']), batch['class'])."
    )


def _logits(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return getattr(output, "logits", output)


def _reiterable(data: Any) -> Any:
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        return _TensorPair(*data)
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return _TensorPair(*data.tensors)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=_DEFAULT_BATCH)
    if hasattr(data, "__next__"):
        raise DataError(
            f"Expected data that can be iterated more than once but got a one-shot {type(data).__name__}. "
            "Pass a DataLoader, a pair of tensors, or list(batches)."
        )
    if not hasattr(data, "__iter__") or isinstance(data, (str, bytes, Mapping)):
        raise DataError(
            f"Expected a DataLoader, a pair of tensors or an iterable of batches but got {batches.describe(data)}. For example "
            "flatness.measure(model, (inputs, targets))."
        )
    return data


def _check_options(weight_decay: float, batch_size: int | None, dtype: torch.dtype | None) -> None:
    if not weight_decay >= 0:
        raise OptionError(f"Expected weight_decay ≥ 0 but got {weight_decay!r}.")
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise OptionError(f"Expected batch_size to be a positive integer or None but got {batch_size!r}.")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise OptionError(f"Expected a floating-point torch dtype but got {dtype!r}. For example dtype=torch.float64.")


def _memory_budget(device: torch.device, backward: bool) -> int:
    """Bytes that one micro-batch may take: a share of what is free, and no more than speed needs.

    On a CPU, backward passes are fastest when their working set stays near the caches; a forward pass wants long rows.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return min(free // 4, 16_384 * _MEGABYTE)
    return (64 if backward else 384) * _MEGABYTE


def kept_budget(device: torch.device) -> int:
    """Bytes that signals kept between passes may take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 4
    return 1024 * _MEGABYTE
