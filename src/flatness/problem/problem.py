"""Problem: a model, its data and a loss, made safe to differentiate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flatness.errors import ModelError, NotFiniteError, OptionError
from flatness.losses import Items, resolve_loss
from flatness.losses.base import refuse
from flatness.problem import batches
from flatness.problem.batches import describe
from flatness.problem.forward import DefaultForward, Forward, line_for
from flatness.problem.guard import Guard, Suppressed
from flatness.problem.model import check_model, converted, unwrap
from flatness.problem.own_loss import Alignment
from flatness.problem.process_state import PROCESS
from flatness.problem.ranks import Ranks
from flatness.problem.sources import Source, different_lengths
from flatness.problem.stream import StreamedData


class Problem(StreamedData):
    """Model + data + loss.

    Everything that touches the data goes through `stream`, which weighs samples (never batches), splits
    batches to fit into memory, and checks that every pass sees the same samples. All work happens inside
    ``with problem.guarded():``.

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
        ranks: The processes that measure together, each on its part of the data; one alone by default.

    Attributes:
        notes: What happened that the user should know.
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
        self._guard: Guard | None = None
        parameter = next(self.model.parameters())
        if parameter.dtype in (torch.float16, torch.bfloat16):
            notes.append(
                f"computed in {parameter.dtype}: about two digits; pass dtype=torch.float32 for more"
            )
        source = Source(data, seed)
        super().__init__(
            source,
            resolved,
            parameter.device,
            parameter.dtype,
            batch_size=batch_size,
            progress=progress,
            ranks=ranks,
        )
        self.notes += notes
        self.forward = forward or DefaultForward(resolved)
        self.weight_decay = float(weight_decay)
        self.seed = int(seed)
        self.copy_batches: bool | None = None
        self._watch: Callable[[Tensor], None] | None = None

    def guarded(self) -> Guard:
        """A context in which the model is in evaluation mode, and after which it is as it was."""
        if torch.is_autocast_enabled(self.device.type):
            self.notes.append("autocast was on; measured without it")
        self._guard = Guard(self.model, self.seed, self._original)
        self._guard.push(self._note_autocast)
        return self._guard

    @property
    def autocast(self) -> Suppressed:
        """Whether the model turned autocast on while it was measured, where it is off."""
        return Suppressed() if self._guard is None else self._guard.autocast

    def _note_autocast(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.autocast.seen:
            self.notes.append("the model turns autocast on; measured without it")

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

    def example(self, size: int) -> Any:
        """The first samples of the first batch, placed; before any other run they say what labels mean."""
        batch = super().example(size)
        if isinstance(self.forward, DefaultForward):
            with self._located():
                self.notes += self.forward.settle(self.model, batch)
        return batch

    def items(self, batch: Any, *, look: bool = True) -> Items:
        """Run the model on a placed batch and lay its outputs out as predictions; see `laid_out`."""
        items = self.laid_out(*self.outputs(batch), look=look)
        if self._watch is not None:
            self._watch(items.logits)
        return items

    def outputs(self, batch: Any) -> tuple[Tensor, Any]:
        """Output and target of a placed batch."""
        if self.copy_batches is not False:
            batch = batches.copied(batch)
        before = batches.versions(batch)
        returned = self.forward(self.model, batch)
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
                f"{list(output.shape)}. Pass forward= to lay inputs and outputs out with samples first."
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

    def look(self, items: Items) -> None:
        """Look at the numbers of what was laid out without; the device is waited for."""
        with self._located():
            refuse(self.loss.checks(items))

    def locate_bad_loss(self) -> None:
        """Raise with the first sample whose loss is not finite; called when the total is not."""
        self._find_bad_loss()
        raise NotFiniteError(
            "Expected a finite risk but got NaN or infinity, though every sample's loss is finite on its "
            f"own. Look for outputs that overflow in {self.dtype}, or pass dtype=torch.float64."
        )

    def _find_bad_loss(self) -> None:
        index = 0
        for number, batch in enumerate(self.source.batches(self.micro_batch)):
            size = batches.size_of(batch)
            for start in range(0, size, self.micro_batch):
                self._origin, self._examples = (number, start, index + start), 0
                part = self.placed(batches.rows(batch, start, start + self.micro_batch))
                with torch.no_grad():
                    values = self.loss.values(self.items(part))
                bad = (~values.isfinite()).nonzero()
                if len(bad):
                    first = int(bad[0])
                    raise NotFiniteError(
                        f"Expected a finite loss for every sample but sample {start + first} of batch "
                        f"{number} (number {index + start + first} of the data) has loss "
                        f"{float(values[first])}. Look for NaN or infinite inputs, or outputs that overflow "
                        f"in {self.dtype}."
                    )
            index += size

    def _check_lengths(self, batch: Any) -> None:
        """Refuse a batch (input, target) whose tensors count different numbers of samples."""
        if isinstance(self.forward, DefaultForward) and isinstance(batch, (tuple, list)) and len(batch) == 2:
            x, y = batch
            if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape[:1] != y.shape[:1]:
                raise different_lengths(x, y)


_PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def usable_device(device: Any) -> torch.device | None:
    """The device that was asked for, if torch can use it."""
    if device is None:
        return None
    try:
        chosen = torch.device(device)
        if chosen.type == "meta":
            raise RuntimeError("it holds no values")
        torch.empty(0, device=chosen)
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(
            f"Expected a device that torch can use but got {device!r}: {reason}. For example device='cpu'."
        ) from error
    return chosen


def check_options(weight_decay: Any, batch_size: Any, dtype: Any, seed: Any, forward: Any) -> None:
    """Refuse values that the arguments of a `Problem` cannot have."""
    if not isinstance(weight_decay, (int, float)) or not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise OptionError(
            f"Expected weight_decay to be a finite number ≥ 0 but got {weight_decay!r}. Pass the optimiser's "
            "value."
        )
    if batch_size is not None and (not hasattr(batch_size, "__index__") or batch_size < 1):
        raise OptionError(
            f"Expected batch_size to be a positive integer or None but got {batch_size!r}. None chooses it "
            "by memory."
        )
    if dtype is not None and dtype not in _PRECISIONS:
        raise OptionError(
            f"Expected dtype to be torch.float16, bfloat16, float32, float64 or None but got {dtype!r}. "
            "For example dtype=torch.float64."
        )
    if not hasattr(seed, "__index__") or seed < 0:
        raise OptionError(f"Expected seed to be an integer ≥ 0 but got {seed!r}. For example seed=0.")
    if forward is not None and not callable(forward):
        raise OptionError(
            f"Expected forward to be a function of (model, batch) but got {describe(forward)}. "
            "For example forward=lambda model, batch: (model(batch[0]), batch[1])."
        )
