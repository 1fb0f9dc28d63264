"""Flatness during training with the HuggingFace Trainer: a callback that logs where the Trainer logs."""

from __future__ import annotations

from typing import Any

from flatness.integrations.monitor import Monitor, library


def flatness_callback(monitor: Monitor, trainer: Any = None, *, start: bool = False) -> Any:
    """A callback for ``trainer.add_callback(...)`` or ``Trainer(callbacks=[...])``.

    The monitor's data are dictionaries with "labels", as the Trainer's are; `flatness.measure` takes them as
    they come. Steps are those of the optimizer: batches whose gradients are accumulated count once.

    Args:
        monitor: What to measure, how often, and within what share of the time. With ``optimizer=True`` it
            measures the Trainer's optimizer.
        trainer: The Trainer, whose ``log`` takes the values to TensorBoard and all else that it reports to;
            callbacks do not know it by themselves. Without it values go to ``trainer.state.log_history``.
        start: Whether to measure before the first step too.
    """
    transformers = library("transformers", "transformers", "transformers")

    class FlatnessCallback(transformers.TrainerCallback):
        """Measures after optimizer steps."""

        def on_train_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
        ) -> None:
            """Measure what training begins with, if that was asked for."""
            if start:
                self._measure(state, model, optimizer)

        def on_step_end(
            self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
        ) -> None:
            """Measure if it is due."""
            self._measure(state, model, optimizer)

        def _measure(self, state: Any, model: Any, optimizer: Any) -> None:
            def log(values: dict[str, float], step: int) -> None:
                if trainer is None:
                    state.log_history.append({**values, "step": step})
                else:
                    trainer.log(values)

            monitor.step(model, state.global_step, optimizer, log=log)

    return FlatnessCallback()
