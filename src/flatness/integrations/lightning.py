"""Flatness during training with Lightning: a callback that logs through the trainer's loggers."""

from __future__ import annotations

from typing import Any

from flatness.integrations.monitor import Monitor, library, values_of


def flatness_callback(monitor: Monitor, network: str | None = None) -> Any:
    """A callback for ``Trainer(callbacks=[...])``.

    Args:
        monitor: What to measure, how often, and within what share of the time. Without a ``log`` of its own,
            values go to the trainer's logger.
        network: Attribute of the LightningModule that holds the network; None measures the module itself,
            whose forward must then return the outputs.
    """
    lightning = library("Lightning", "lightning", "lightning.pytorch", "pytorch_lightning")

    class FlatnessCallback(lightning.Callback):
        """Measures after training batches."""

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
            """Measure if it is due."""
            model = pl_module if network is None else getattr(pl_module, network)
            report = monitor.step(model, trainer.global_step)
            if report is not None and trainer.logger is not None:
                trainer.logger.log_metrics(values_of(report), step=trainer.global_step)

    return FlatnessCallback()
