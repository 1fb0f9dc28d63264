"""Problem: a model, its data and a loss, made safe to differentiate."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flatness.errors import DataError, LossError, ModelError, NotFiniteError, OptionError, OutOfMemoryError
from flatness.losses import Items, resolve_loss
from flatness.network.memory import batch_budget, fits
from flatness.problem import batches
from flatness.problem.batches import describe
from flatness.problem.guard import Guard, Suppressed, repeated_tokens
from flatness.problem.model import (
    DefaultForward,
    Forward,
    check_model,
    converted,
    line_for,
    refuse_missing_row,
    unwrap,
    usable_device,
)
from flatness.problem.process_state import PROCESS
from flatness.problem.progress import ProgressBar
from flatness.problem.ranks import Ranks
from flatness.problem.sources import Source, different_lengths

if TYPE_CHECKING:
    from flatness.problem.alignment import Alignment

_DEFAULT_BATCH = 256


class Problem:
    """Model + data + loss.

    Everything that touches the data goes through `stream`, which weights samples (never batches), splits
    batches to fit into memory, and checks that every pass sees the same samples. All work happens inside
    ``with problem.guarded():``.

    Args:
        model: Any torch module; never modified. With `device` or `dtype` a converted copy is measured.
        data: A DataLoader, a pair of tensors, a Dataset, or any re-iterable of batches.
        loss: A name, a torch loss module, or a callable that returns one loss per sample.
        forward: ``forward(model, batch) -> (output, target)`` for batches with another structure.
        weight_decay: Coefficient of torch's penalty; adds weight_decay·I to every Hessian.
        batch_size: Samples per micro-batch; chosen by memory when None.
        device: Where to measure; the model's device when None.
        dtype: In which precision; the model's when None.
        tf32: Whether a GPU multiplies float32 matrices as TF32.
        seed: Seed of everything random.
        progress: Whether to show a bar on long work.
        ranks: The processes that measure together, each on its part of the data; one alone by default.

    Attributes:
        notes: What the user should know.
        micro_batch: How many samples are worked on at a time.
        copy_batches: Whether the model gets copies of its inputs, because a run showed that it writes into
            them; None until it has run once, on a copy.
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
        tf32: bool = False,
        seed: int = 0,
        progress: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        resolved = resolve_loss(loss)
        check_options(weight_decay, batch_size, dtype, seed, forward)
        model, notes = unwrap(model) if isinstance(model, nn.Module) else (model, [])
        check_model(model)
        # Another thread may be at work on the model: it is looked at, and copied, as it is afterwards.
        with PROCESS.lock:
            if any(module.training for module in model.modules()):
                notes.append("the model was in training mode; measured in evaluation mode, then restored")
            self.model = converted(model, usable_device(device), dtype)
            self._original = None if self.model is model else model
        parameter = next(self.model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        if self.dtype in (torch.float16, torch.bfloat16):
            kind = str(self.dtype).removeprefix("torch.")
            notes.append(
                f"computed in {kind}, which leaves about two digits; pass dtype=torch.float32 for more"
            )
        if tf32:
            notes.append(tf32_note(self.device, self.dtype))
        self.tf32 = tf32
        self.notes = notes
        self.source = Source(data, seed)
        self.loss = resolved
        self.forward = forward or DefaultForward(resolved)
        self.weight_decay = float(weight_decay)
        self.seed = int(seed)
        self.progress = progress
        self.ranks = ranks or Ranks()
        self.micro_batch = int(batch_size or _DEFAULT_BATCH)
        self.copy_batches: bool | None = None
        self._fixed_batch = batch_size
        self._guard: Guard | None = None
        self._watch: Callable[[Tensor], None] | None = None
        # Where the samples at hand begin, for messages: number of the batch, place in it, place in the data.
        self._origin = (0, 0, 0)
        self._examples = 0

    def given_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the model as the user gave it, by name; those measured may be copies of them."""
        return dict((self._original or self.model).named_parameters())

    def beside(self, data: Any = None, loss: Any = None) -> Problem:
        """The same model with other data or another loss, to be used in the guarded context of this one."""
        other = copy.copy(self)
        if data is not None:
            other.source = Source(data, self.seed)
        if loss is not None:
            other.loss = resolve_loss(loss)
        if isinstance(self.forward, DefaultForward):
            other.forward = DefaultForward(other.loss)
        return other

    def guarded(self) -> Guard:
        """A context in which the model is in evaluation mode, and after which it is as it was."""
        if torch.is_autocast_enabled(self.device.type):
            self.notes.append("autocast was on; measured without it")
        self._guard = Guard(self.model, self.seed, self._original, tf32=self.tf32)
        self._guard.push(self._note_autocast)
        return self._guard

    @property
    def autocast(self) -> Suppressed:
        """Whether the model turned autocast on while it was measured, where it is off."""
        return Suppressed() if self._guard is None else self._guard.autocast

    def _note_autocast(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.autocast.seen:
            self.notes.append("the model turns autocast on; measured without it")

    def repeated_tokens(
        self, tables: Mapping[nn.Module, Tensor]
    ) -> AbstractContextManager[Callable[[], Any]]:
        """As the function `repeated_tokens`; calling what it returns keeps the hooks until the guard ends."""
        guard = self._guard
        assert guard is not None
        return repeated_tokens(tables, lambda: guard.samples)

    def watched_by(self, watch: Callable[[Tensor], None] | None) -> None:
        """Have every forward pass looked at: its outputs, laid out as predictions; None for no longer."""
        self._watch = watch

    def written_weights(self) -> list[str]:
        """Parameters that forward passes wrote to since the guarded context began or this was last asked."""
        return [] if self._guard is None else self._guard.written()

    @property
    def alignment(self) -> Alignment | None:
        """How outputs are paired with the labels of dict batches; None for others, or where the user says."""
        return self.forward.alignment if isinstance(self.forward, DefaultForward) else None

    @property
    def samples(self) -> int | None:
        """Number of samples of a full pass, known after the first."""
        return self.source.samples

    @property
    def fingerprint(self) -> int | None:
        """A fingerprint of the data, known after the first pass."""
        return self.source.fingerprint

    def sample_numbers(self, n: int) -> torch.Tensor:
        """Positions in the data of the samples of the current micro-batch, counted from 0: (n,)."""
        return torch.arange(n, device=self.device) + self._origin[2]

    def placed(self, batch: Any) -> Any:
        """The batch on the measuring device, floating-point parts in the measuring dtype."""
        return batches.place(batch, self.device, self.dtype)

    def example(self, size: int) -> Any:
        """The first samples of the first batch, placed, in memory of their own: what plans are made from.

        Before any other run they say what labels mean.
        """
        batch = self.source.first()
        self._check_lengths(batch)
        self._examples = min(size, batches.size_of(batch))
        batch = batches.copied(self.placed(batches.rows(batch, 0, size)))
        if isinstance(self.forward, DefaultForward):
            with self._located():
                self.notes += self.forward.settle(self.model, batch)
        return batch

    def items(self, batch: Any, *, look: bool = True, twice: bool = False) -> Items:
        """Run the model on a placed batch and lay its outputs out as predictions; see `laid_out`.

        Args:
            batch: The batch.
            look: Whether to look at their numbers, for which the device is waited for, and at the way there.
            twice: Whether the graph will be differentiated twice.
        """
        with _second_derivatives() if twice else nullcontext():
            output, target = self.outputs(batch)
        items = self.laid_out(output, target, look=look)
        if look and self._watch is not None:
            self._watch(items.logits)
        return items

    def outputs(self, batch: Any) -> tuple[Tensor, Any]:
        """Output and target of a placed batch."""
        if self.copy_batches is not False:
            batch = batches.copied(batch)
        before = batches.versions(batch)
        if self._guard is not None:
            self._guard.samples = batches.size_of(batch)
        try:
            returned = self.forward(self.model, batch)
        except IndexError as error:
            with self._located():
                refuse_missing_row(self.model, error)
            raise
        self.copy_batches = bool(self.copy_batches) or batches.versions(batch) != before
        if not (isinstance(returned, (tuple, list)) and len(returned) == 2):
            raise ModelError(
                f"Expected forward to return (output, target) but got {batches.describe(returned)}. "
                "For example forward=lambda model, batch: (model(batch[0]), batch[1])."
            )
        output, target = returned
        if not isinstance(output, Tensor):
            raise ModelError(
                f"Expected the model to return one tensor but got {batches.describe(output)}. Say which part "
                f"is the output, for example {line_for(batch, output)}."
            )
        n = batches.size_of(batch)
        if output.shape[:1] != (n,):
            raise ModelError(
                f"Expected one output row per sample, {n} here, but got outputs of shape "
                f"{list(output.shape)}. Pass forward= to arrange inputs and outputs with samples first."
            )
        if output.is_floating_point() and output.dtype != self.dtype:
            # Some networks in half precision return their outputs in single; engines compute in one type.
            output = output.to(self.dtype)
        return output, target

    def laid_out(self, output: Tensor, target: Any, *, look: bool = True) -> Items:
        """Outputs and targets as predictions; errors about samples say where in the data they are.

        Args:
            output: What the model returned.
            target: What the batch holds beside the inputs.
            look: Whether to look at their numbers, for which the device is waited for.
        """
        with self._located():
            return self.loss.items(output, target) if look else self.loss.lay_out(output, target)

    def locate_bad_loss(self) -> None:
        """Raise with the first sample whose loss is not finite; called when the total is not."""
        self._find_bad_loss()
        raise NotFiniteError(
            "Expected a finite risk but got NaN or infinity, though every sample's loss is finite on its "
            f"own. Look for outputs that overflow in {self.dtype}, or pass dtype=torch.float64."
        )

    def _find_bad_loss(self) -> None:
        """Raise with the first sample whose target is wrong or whose loss is not finite, if there is one."""

        def step(part: Any) -> None:
            with torch.no_grad():
                values = self.loss.values(self.items(part))
            bad = (~values.isfinite()).nonzero()
            if len(bad):
                first, (number, start, seen) = int(bad[0]), self._origin
                raise NotFiniteError(
                    f"Expected a finite loss for every sample but sample {start + first} of batch {number} "
                    f"(number {seen + first} of the data) has loss {float(values[first])}. Look for NaN or "
                    f"infinite inputs, or for outputs that overflow in {self.dtype}."
                )

        self._pass(step, "finding a sample", None)

    def fit_memory(self, bytes_per_sample: int, *, backward: bool) -> None:
        """Choose the micro-batch from what one sample takes, unless the user fixed it."""
        each = max(1, bytes_per_sample)
        few = min(8, batch_budget(self.device, backward=False) // each)
        # Longer batches are slower on a CPU: activations leave the caches.
        longest = 65536 if self.device.type == "cuda" else 512
        self.take_together(max(1, min(longest, max(few, batch_budget(self.device, backward) // each))))

    def take_together(self, samples: int) -> None:
        """Work on that many samples at a time, unless the user fixed it."""
        if self._fixed_batch is None:
            self.micro_batch = samples

    def stream(self, step: Callable[[Any], None], label: str, first: int | None = None) -> None:
        """One pass over the data, or over its first samples only.

        Args:
            step: Called with each placed micro-batch. It must add to its totals only at its very end: when
                memory runs out it is called again with half as many samples.
            label: What the progress bar says.
            first: How many samples to stop after.
        """
        before = self.micro_batch
        try:
            self._pass(step, label, first)
        except LossError:
            # A loss that refuses NaN in its own words: say which sample it was, if that is the cause.
            self._find_bad_loss()
            raise
        except OutOfMemoryError:
            self.micro_batch = before  # another step may take less
            raise
        if self.micro_batch < before:
            self.notes.append(f"out of memory: continued with micro-batches of {self.micro_batch}")

    def _pass(self, step: Callable[[Any], None], label: str, first: int | None) -> None:
        seen, length = 0, self.micro_batch
        if self._fixed_batch is None:
            length = self.source.evenly(length)
        with ProgressBar(label, self.source.expected_batches(length), self.progress) as bar:
            for number, batch in enumerate(self.source.batches(length)):
                size = batches.size_of(batch)
                self._steps(step, batch, size if first is None else min(size, first - seen), number, seen)
                seen += size
                bar.advance()
                if first is not None and seen >= first:
                    break

    def _steps(self, step: Callable[[Any], None], batch: Any, size: int, number: int, seen: int) -> None:
        start, self._examples = 0, 0
        self._check_lengths(batch)
        while start < size:
            stop = min(size, start + self.micro_batch)
            self._origin = (number, start, seen + start)
            if fits(lambda: step(self.placed(batches.rows(batch, start, stop))), self.device):  # noqa: B023 (called at once)
                start = stop
            elif stop - start == 1:
                raise OutOfMemoryError(
                    f"Expected one sample to fit into memory but it does not, on {self.device}. Measure "
                    "fewer layers at a time (layers=), fewer measures, a lower dtype, or use a device with "
                    "more memory."
                )
            else:
                self.micro_batch = max(1, (stop - start) // 2)

    @contextmanager
    def _located(self) -> Iterator[None]:
        """Errors about samples say where in the data they are."""
        try:
            yield
        except DataError as error:
            number, start, seen = self._origin
            if self._examples > 1:
                where = f"Seen on the first {self._examples} samples."
            elif seen and not self._examples:
                where = f"Counted from sample {start} of batch {number}, number {seen} of the data."
            else:
                raise
            raise DataError(f"{error} {where}") from error

    def _check_lengths(self, batch: Any) -> None:
        """Refuse a batch (input, target) whose tensors count different numbers of samples."""
        if isinstance(self.forward, DefaultForward) and isinstance(batch, (tuple, list)) and len(batch) == 2:
            x, y = batch
            if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape[:1] != y.shape[:1]:
                raise different_lengths(x, y)


def tf32_note(device: torch.device, dtype: torch.dtype) -> str:
    """What to say where the user asks for TF32."""
    if device.type != "cuda" or dtype != torch.float32:
        return f"tf32=True has no effect for {dtype} on {device.type}: it applies to torch.float32 on a GPU"
    return "matrix products and convolutions in TF32: about three digits, even for values called exact"


_PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_options(weight_decay: Any, batch_size: Any, dtype: Any, seed: Any, forward: Any) -> None:
    """Refuse values that the arguments of a `Problem` cannot have."""
    if not (isinstance(weight_decay, (int, float)) and 0 <= weight_decay < math.inf):
        raise OptionError(
            f"Expected weight_decay to be a finite number ≥ 0 but got {weight_decay!r}. Pass the optimiser's "
            "value."
        )
    if batch_size is not None and not _counts_from(1, batch_size):
        raise OptionError(
            f"Expected batch_size to be a positive integer or None but got {batch_size!r}. None chooses it "
            "by memory."
        )
    if dtype not in (None, *_PRECISIONS):
        raise OptionError(
            f"Expected dtype to be torch.float16, bfloat16, float32, float64 or None but got {dtype!r}. "
            "For example dtype=torch.float64."
        )
    if not _counts_from(0, seed):
        raise OptionError(f"Expected seed to be an integer ≥ 0 but got {seed!r}. For example seed=0.")
    if forward is not None and not callable(forward):
        raise OptionError(
            f"Expected forward to be a function of (model, batch) but got {describe(forward)}. "
            "For example forward=lambda model, batch: (model(batch[0]), batch[1])."
        )


def _counts_from(least: int, value: Any) -> bool:
    return hasattr(value, "__index__") and value >= least


def _second_derivatives() -> AbstractContextManager[object]:
    """Operators with second derivatives of their own, which most measurements need not even load."""
    from flatness.network.second_derivatives import SecondDerivatives

    return SecondDerivatives()
