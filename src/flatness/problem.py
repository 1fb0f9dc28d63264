"""Problem: a model, its data and a loss, made safe to differentiate, streamed in micro-batches that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flatness import batches
from flatness.errors import (
    DataError,
    FlatnessError,
    LossError,
    ModelError,
    NotFiniteError,
    OutOfMemoryError,
)
from flatness.forward import Forward, default_forward, line_for
from flatness.guard import check_model, converted, measuring, unwrap
from flatness.journal import Loop, journal_in_force, loop
from flatness.journal_state import digest_of
from flatness.losses import Items, resolve_loss
from flatness.losses.base import refuse
from flatness.memory import batch_budgets, fits
from flatness.parts import modules
from flatness.progress import ProgressBar
from flatness.ranks import Ranks
from flatness.repeating import FirstOutputs
from flatness.screen import Screen, screens
from flatness.settings import check_options, usable_device
from flatness.sources import Source, different_lengths

_DEFAULT_BATCH = 256


class Problem:
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

    Attributes:
        notes: What happened that the user should know.
        copy_batches: Whether the model gets copies of its inputs, because it writes into them.
        first_outputs: What the samples gave that were looked at first, if any were; passes that run the model
            as it is hold their outputs against it.
        ranks: The processes that measure together, each on its part of the data; one alone by default.
        watch: Called with the output of every differentiable forward pass; a plan checks here what it relies
        on.
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
        check_options(weight_decay, batch_size, dtype, seed, forward)
        model, self.notes = unwrap(model) if isinstance(model, nn.Module) else (model, [])
        check_model(model)
        if any(module.training for module in modules(model)):
            self.notes.append("the model was in training mode; measured in evaluation mode and set back")
        self.model = converted(model, usable_device(device), dtype)
        parameter = next(self.model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        if self.dtype in (torch.float16, torch.bfloat16):
            self.notes.append(
                f"computed in {self.dtype}: about two digits; pass dtype=torch.float32 for more"
            )
        self.source = Source(data, seed, self.device)
        self.ranks = Ranks()
        self.forward = forward or default_forward
        self.weight_decay = float(weight_decay)
        self.seed = int(seed)
        self.progress = progress
        self.copy_batches = False
        self.first_outputs: FirstOutputs | None = None
        self.watch: Callable[[Tensor], None] | None = None
        self._screening = screens(self.device)
        self._screen: Screen | None = None
        self._fixed_batch = batch_size
        self.micro_batch = int(batch_size or _DEFAULT_BATCH)
        # Where the samples at hand begin, for messages: number of the batch, place in it, place in the data.
        self._origin = (0, 0, 0)
        self._examples = 0
        self._identity: str | None = None
        if journal_in_force() and isinstance(loss, str) and forward is None and self.source.is_pair:
            setting = [loss, self.weight_decay, batch_size, self.seed, str(self.device)]
            self._identity = digest_of([self.model.state_dict(), self.source.excerpt(), setting])

    @property
    def samples(self) -> int | None:
        """Number of samples of a full pass, known after the first."""
        return self.source.samples

    @property
    def fingerprint(self) -> int | None:
        """What tells the data apart from other data, known after the first pass."""
        return self.source.fingerprint

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """A context in which the model is in evaluation mode, and after which it is as it was."""
        if torch.is_autocast_enabled(self.device.type):
            self.notes.append("autocast was on; measured without it")
        with measuring(self.model, self.seed):
            yield

    def items(self, batch: Any, *, look: bool = True) -> Items:
        """Run the model on a placed batch and lay its outputs out as predictions; see `laid_out`."""
        return self.laid_out(*self.outputs(batch), look=look)

    def items_again(self, batch: Any) -> Items:
        """`items` in a pass with the model as it is: `stream` checks that the first samples give the same."""
        items = self.items(batch)
        if self.first_outputs is not None:
            self.first_outputs.compare(batch, items.logits)
        return items

    def outputs(self, batch: Any) -> tuple[Tensor, Any]:
        """Output and target of a placed batch."""
        returned = self.forward(self.model, batches.copied(batch) if self.copy_batches else batch)
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
        if self.watch is not None and torch.is_grad_enabled():
            self.watch(output)
        return output, target

    def laid_out(self, output: Tensor, target: Any, *, look: bool = True) -> Items:
        """Outputs and targets as predictions; errors about samples say where in the data they are.

        Args:
            output: What the model returned.
            target: What the batch holds beside the inputs.
            look: Whether to look at their numbers, for which the device is waited for; a pass over the data
            collects
                what it finds wrong and looks later.
        """
        with self._located():
            if not look:
                return self.loss.lay_out(output, target)
            if self._screen is not None:
                return self._screen.items(output, target)
            return self.loss.items(output, target)

    def look(self, items: Items) -> None:
        """Look at the numbers of what was laid out without; the device is waited for."""
        with self._located():
            refuse(self.loss.checks(items))

    @contextmanager
    def _located(self) -> Iterator[None]:
        """Errors about samples say where in the data they are."""
        try:
            yield
        except DataError as error:
            number, start, seen = self._origin
            if self._examples:
                where = f" Seen on the first {self._examples} samples." if self._examples > 1 else ""
            else:
                where = (
                    f" Counted from sample {start} of batch {number}, number {seen} of the data."
                    if seen
                    else ""
                )
            if not where:
                raise
            raise DataError(f"{error}{where}") from error

    def placed(self, batch: Any) -> Any:
        """The batch on the measuring device, floating-point parts in the measuring dtype."""
        return batches.place(batch, self.device, self.dtype)

    def example(self, size: int) -> Any:
        """The first samples of the first batch, placed, in memory of their own: what plans are made from."""
        batch = self.source.first()
        self._check_lengths(batch)
        self._examples = min(size, batches.size_of(batch))
        return batches.copied(self.placed(batches.rows(batch, 0, size)))

    def fit_memory(self, bytes_per_sample: int, *, backward: bool) -> None:
        """Choose the micro-batch from what one sample takes, unless the user fixed it."""
        if self._fixed_batch is None:
            each = max(1, bytes_per_sample)
            forward, budget = batch_budgets(self.device, backward)
            few = min(8, forward // each)
            # Longer batches are slower on a CPU: activations leave the caches.
            longest = 65536 if self.device.type == "cuda" else 1024
            self.micro_batch = max(1, min(longest, max(few, budget // each)))

    def stream(
        self,
        step: Callable[[Any], None],
        label: str,
        first: int | None = None,
        *,
        state: Any = None,
        depends_on: Any = (),
    ) -> bool:
        """One pass over the data, or over its first samples only.

        Args:
            step: Called with each placed micro-batch. It must add to its totals only at its very end: when
            memory runs
                out it is called again with half as many samples.
            label: What the progress bar says.
            first: How many samples to stop after.
            state: All that the step changes, for a `flatness.journal`; without it the pass is not resumed.
            depends_on: What the sums depend on beside the network, the data and the loss.

        Returns:
            Whether the sums of some samples, or all, come from a journal: the step has not seen those.
        """
        before = self.micro_batch
        screen = self._screen = Screen(self.loss, self.device) if self._screening else None
        work = self.loop(label, state, [first, depends_on])
        try:
            with work:
                self._recall(work)
                if not work.done:
                    self._pass(work, step, label, first, screen)
                    self._ask(screen)
                    if self.first_outputs is not None:
                        self.first_outputs.check()
        except LossError:
            # A loss that refuses NaN in its own words: say which sample it was, if that is the cause.
            self._screen = None
            self._find_bad_loss()
            raise
        except FlatnessError:
            self._ask(screen)
            raise
        finally:
            self._screen = None
        if self.micro_batch < before:
            self.notes.append(f"out of memory: went on with micro-batches of {self.micro_batch}")
        return bool(work.done or work.start)

    def loop(self, label: str, state: Any, depends_on: Any) -> Loop:
        """Long work on this problem that a `flatness.journal` can resume.

        Models and pairs of tensors can be told from others, as can losses by name; all else is not resumed.

        Args:
            label: What it does.
            state: All that it changes; None for what cannot be resumed.
            depends_on: What decides its outcome beside the network, the data and the loss.
        """
        if state is None or self._identity is None or self.ranks.count > 1:
            return Loop(state)
        return loop(label, state, [self._identity, depends_on])

    def _pass(
        self,
        work: Loop,
        step: Callable[[Any], None],
        label: str,
        first: int | None,
        screen: Screen | None,
    ) -> None:
        seen, length = 0, self.micro_batch
        if self._fixed_batch is None:
            length = self.source.evenly(length)
        length = work.facts.get("length", length)
        with ProgressBar(label, self.source.expected_batches(length), self.progress) as bar:
            for number, batch in enumerate(self.source.batches(length)):
                size = batches.size_of(batch)
                if number >= work.start:
                    self._steps(step, batch, size if first is None else min(size, first - seen), number, seen)
                seen += size
                bar.advance()
                if screen is not None and (screen.due or work.due):
                    self._ask(screen)
                if number >= work.start:
                    work.reached(number + 1, length=length, **self._facts())
                if first is not None and seen >= first:
                    break
        work.facts = self._facts()

    def _facts(self) -> dict[str, Any]:
        """What a pass finds out about memory and data."""
        source = self.source
        return {"micro_batch": self.micro_batch, "data": [source.samples, source.fingerprint]}

    def _recall(self, work: Loop) -> None:
        """Know what an earlier run of a pass found out."""
        if work.facts:
            self.micro_batch = min(self.micro_batch, work.facts["micro_batch"])
            if self.source.samples is None:
                self.source.samples, self.source.fingerprint = work.facts["data"]
        if work.done and self.source.meanwhile is not None:
            # Now, as in the pass itself: in a later one the network may be elsewhere.
            meanwhile, self.source.meanwhile = self.source.meanwhile, None
            meanwhile()

    def _ask(self, screen: Screen | None) -> None:
        """Raise with the first wrong target if the screen has seen one."""
        if screen is not None and self._screen is not None and screen.found():
            self._screen = None
            self._find_bad_loss()
            raise DataError(
                "Expected the same targets on every pass but got wrong ones on one pass and none on the "
                "next. Measure on data that stays the same."
            )

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
        if self.forward is default_forward and isinstance(batch, (tuple, list)) and len(batch) == 2:
            x, y = batch
            if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape[:1] != y.shape[:1]:
                raise different_lengths(x, y)

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
