"""transformers: models and tokenised data on disk, and flatness during training with the Trainer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import nn

from flatness.errors import DataError, FlatnessError, ModelError, library, listed, nearest
from flatness.integrations.monitor import Monitor


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
    transformers = library("transformers", "this callback", "transformers")

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


def load_model(path: str | os.PathLike[str], **options: Any) -> nn.Module:
    """A model that ``save_pretrained`` wrote, of the class that its ``config.json`` names.

    Nothing is downloaded, and no code in the folder is run. A folder of PEFT gives the adapted model, its
    adapters trainable, if its base model is on disk, too.

    Args:
        path: The folder.
        **options: Passed on to ``from_pretrained``, such as ``attn_implementation="eager"``.

    Raises:
        ModelError: If transformers is not installed, or there is no such model.
    """
    folder = _folder(path, "a model", "model.save_pretrained", ModelError)
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        return _adapted(folder, _read(adapter, "base_model_name_or_path"), options)
    transformers = _package("transformers", folder, ModelError)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"Expected config.json in {folder} but it is not there. Pass a folder that "
            "model.save_pretrained wrote."
        )
    name = next(iter(_read(folder / "config.json", "architectures") or ()), None)
    kind = getattr(transformers, str(name), None)
    if kind is None:
        raise ModelError(
            f"Expected a class of transformers in {folder / 'config.json'} but got {name!r}, whose code is "
            "not part of transformers and is not run here. Build the model in a function of your own and "
            "pass package.module:function."
        )
    return _loaded(folder, lambda: kind.from_pretrained(folder, local_files_only=True, **options))


def _adapted(folder: Path, base: str | None, options: dict[str, Any]) -> nn.Module:
    """The model of a folder of PEFT: adapters around a base model that is on disk."""
    peft = _package("peft", folder, ModelError)
    places = [Path(base), folder / base] if base else []
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise ModelError(
            f"Expected the base model of the adapters in {folder} on disk but there is no folder {base!r}. "
            "Save it with model.save_pretrained and set base_model_name_or_path in adapter_config.json to "
            "that folder."
        )
    model = load_model(found, **options)
    return _loaded(folder, lambda: peft.PeftModel.from_pretrained(model, folder, is_trainable=True))


def load_data(path: str | os.PathLike[str], split: str = "train", limit: int | None = None) -> Any:
    """Tokenised data that ``save_to_disk`` wrote, as `flatness.measure` takes it.

    Args:
        path: The folder, of a `datasets.Dataset` or of a `DatasetDict`.
        split: Which split of the latter.
        limit: Only the first rows.

    Raises:
        DataError: If datasets is not installed, or there are no such data.
    """
    folder = _folder(path, "tokenised data", "dataset.save_to_disk", DataError)
    datasets = _package("datasets", folder, DataError)
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(
            f"Expected data that dataset.save_to_disk wrote in {folder} but it raised "
            f"{type(error).__name__}: {error}"
        ) from error
    if isinstance(found, dict):
        if split not in found:
            one = folder / next(iter(found), split)
            raise DataError(
                f"Expected a split of {folder} but got {split!r}.{nearest(split, found)} There are "
                f"{listed(found)}; the folder of one, such as {one}, works, too."
            )
        found = found[split]
    return found if limit is None else found.select(range(min(limit, len(found))))


def _folder(path: str | os.PathLike[str], what: str, writer: str, refusal: type[FlatnessError]) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise refusal(
            f"Expected a folder with {what} but there is none at {os.fspath(path)!r}. Nothing is downloaded: "
            f"write it first, with {writer}({os.fspath(path)!r})."
        )
    return folder


def _package(name: str, folder: Path, refusal: type[FlatnessError]) -> Any:
    return library(name, f"'hf:{folder}'", "transformers", refusal=refusal)


def _read(file: Path, key: str) -> Any:
    """An entry of a JSON file; None where it has none."""
    try:
        return json.loads(file.read_text(encoding="utf-8")).get(key)
    except (ValueError, AttributeError) as error:
        raise ModelError(f"Expected a JSON object in {file} but it is none: {error}") from error


def _loaded(folder: Path, load: Any) -> nn.Module:
    try:
        return load().eval()
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ModelError(
            f"Expected a model that can be loaded from {folder} but that raised {type(error).__name__}: "
            f"{reason}"
        ) from error
