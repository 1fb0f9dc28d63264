"""Flatness during training with the HuggingFace Trainer: a callback that logs where the Trainer logs."""

from __future__ import annotations

from typing import Any

from flatness.integrations.monitor import Monitor, library, values_of


def flatness_callback(monitor: Monitor) -> Any:
    """A callback for ``Trainer(callbacks=[...])``.

    The monitor's data are dictionaries with "labels", as the Trainer's are; `flatness.measure` takes them as
    they come. Values also go to the Trainer's history (``trainer.state.log_history``).
    """
    transformers = library("transformers", "transformers", "transformers")

    class FlatnessCallback(transformers.TrainerCallback):
        """Measures after optimizer steps."""

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            """Measure if it is due."""
            report = monitor.step(model, state.global_step)
            if report is not None:
                state.log_history.append({**values_of(report), "step": state.global_step})

    return FlatnessCallback()
