"""Flatness during training with Lightning: a callback that logs through all of the trainer's loggers."""

from __future__ import annotations

from functools import partial
from typing import Any

from flatness.errors import library
from flatness.integrations.monitor import Monitor


def flatness_callback(monitor: Monitor, network: str | None = None, *, start: bool = False) -> Any:
    """A callback for ``Trainer(callbacks=[...])``.

    Steps are those of the optimizer: batches whose gradients are accumulated count once.

    Args:
        monitor: What to measure, how often, and within what share of the time; values go to its own ``log``,
            if it has one, and to every logger of the trainer. With ``optimizer=True`` it measures the
            trainer's first optimizer.
        network: Attribute of the LightningModule that holds the network; None measures the module itself,
            whose forward must then return the outputs.
        start: Whether to measure before the first step too.
    """
    lightning = library("Lightning", "this callback", "lightning", "lightning.pytorch", "pytorch_lightning")

    class FlatnessCallback(lightning.Callback):
        """Measures after training batches."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Measure what training begins with, if that was asked for."""
            if start:
                self._measure(trainer, pl_module)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
            """Measure if it is due; before the optimizer's first step nothing is."""
            if trainer.global_step > 0:
                self._measure(trainer, pl_module)

        def _measure(self, trainer: Any, pl_module: Any) -> None:
            model = pl_module if network is None else getattr(pl_module, network)
            optimizer = next(iter(getattr(trainer, "optimizers", ())), None)
            monitor.step(model, trainer.global_step, optimizer, log=partial(_log, trainer))

    return FlatnessCallback()


def _log(trainer: Any, values: dict[str, float], step: int) -> None:
    """Log through all loggers of a trainer; early versions of Lightning had one."""
    one = [trainer.logger] if getattr(trainer, "logger", None) is not None else []
    for logger in getattr(trainer, "loggers", one):
        logger.log_metrics(values, step=step)
