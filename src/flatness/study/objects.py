"""What a study file names, as objects: models, data sets, and the labels that a network trains on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flatness.errors import DataError, SpecError, StudyError, nearest
from flatness.files import digest
from flatness.study.configuration import Configuration
from flatness.zoo.data import Dataset, load
from flatness.zoo.models import MODELS, build, initialize
from flatness.zoo.models.initial import seeded
from flatness.zoo.objects import blamed_on_code, build_named, import_object, names_code


@dataclass(frozen=True, eq=False)
class Split:
    """Training and test data on one device.

    Attributes:
        train: Inputs and targets.
        test: Inputs and targets.
        digest: Of their content, because a file of the same name may have been rewritten.
        source: Where they come from, for messages: a folder, a file or a factory.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    digest: str = ""
    source: str = ""

    @property
    def classes(self) -> int:
        """Number of classes; 0 for real targets."""
        targets = self.train[1]
        return 0 if targets.is_floating_point() else int(max(targets.max(), self.test[1].max())) + 1

    def to(self, device: torch.device) -> Split:
        """The same on another device."""
        moved = [tuple(tensor.to(device) for tensor in pair) for pair in (self.train, self.test)]
        return replace(self, train=moved[0], test=moved[1])

    @property
    def mark(self) -> dict[str, str]:
        """What tells these data from others of the same name: ``digest`` and ``source``."""
        return {"digest": self.digest, "source": self.source}


def check_same_data(mark: Mapping[str, str], digest: str | None, whose: str) -> None:
    """Refuse to go on with other data than something was made with.

    Args:
        mark: Of the data at hand, see `Split.mark`.
        digest: Of the data that it was made with; None where that is not known.
        whose: What was made with them, for the message.

    Raises:
        StudyError: The data have changed.
    """
    if digest is not None and digest != mark["digest"]:
        raise StudyError(
            f"Expected the data of {whose} but {mark['source']} has changed: digest "
            f"{mark['digest']} instead of {digest}. Restore the old content, or run the study in another "
            "folder."
        )


def load_split(data: Mapping[str, Any]) -> Split:
    """The data of a table [data].

    `name` is that of a data set, the path of an ``.npz`` file, or ``package.module:factory``; the factory
    gets ``split="train"`` or ``"test"`` and the table's options, and returns inputs and targets.
    """
    name, own = data["name"], names_code(data["name"])
    for key in ("standardize", "shift", "scale", "data_dir") if own else ("options",):
        if data.get(key):
            raise SpecError(
                f"Expected no {key} in [data] but there is one beside {name!r}, which does not take it. "
                + ("Give it as one of options." if own else "Options are for package.module:factory.")
            )
    if own:
        factory = import_object(name, "name in [data]", SpecError)
        pairs = [_pair(factory, name, split, data) for split in ("train", "test")]
        return Split(pairs[0], pairs[1], digest(pairs), name)
    train, test = (_loaded(data, split) for split in ("train", "test"))
    mark = [train.digest, test.digest]
    if "shift" in data or "scale" in data:
        mark += [float(data.get("shift", 0.0)), float(data.get("scale", 1.0))]
    return Split(_moved(train, data), _moved(test, data), digest(mark), train.source)


Corrupted = tuple[str, int, tuple[Tensor, Tensor]]
"""Kind and strength of a corruption, and the test data with it."""


def load_corrupted(data: Mapping[str, Any], corruptions: Mapping[str, Sequence[int]]) -> Iterator[Corrupted]:
    """The test data of a table [data] with each kind and strength of a table [corruptions]."""
    if corruptions and names_code(data["name"]):
        raise SpecError(
            f"Expected the name of a data set in [data] beside [corruptions] but it has {data['name']!r}, "
            "whose pixels may have any range. Leave [corruptions] out, or put the data into a file: FILE.npz."
        )
    for kind, strengths in corruptions.items():
        for strength in strengths:
            yield kind, strength, _moved(_loaded(data, "test", (kind, strength)), data)


def _loaded(data: Mapping[str, Any], split: str, corruption: tuple[str, int] | None = None) -> Dataset:
    return load(
        data["name"],
        split=split,
        data_dir=data.get("data_dir"),
        limit=data.get("limit" if split == "train" else "test_limit"),
        standardize=bool(data.get("standardize", False)),
        corruption=corruption,
    )


def _moved(loaded: Dataset, data: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Inputs as a published script has them: (inputs − shift) · scale, where pixels go from 0 to 1."""
    if "shift" not in data and "scale" not in data:
        return loaded.pair
    if data.get("standardize"):
        raise SpecError(
            "Expected standardize, or shift and scale, in [data] but got both. "
            "Each says how inputs are scaled."
        )
    shift, scale = float(data.get("shift", 0.0)), float(data.get("scale", 1.0))
    return (loaded.inputs - shift) * scale, loaded.targets


def _pair(factory: Any, name: str, split: str, data: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    limit = data.get("limit" if split == "train" else "test_limit")
    with blamed_on_code(DataError, f"Expected {name} to give data"):
        made = factory(split=split, **data.get("options", {}))
    tensors = isinstance(made, (tuple, list)) and len(made) == 2 and all(isinstance(t, Tensor) for t in made)
    if not tensors or len(made[0]) != len(made[1]) or len(made[0]) == 0:
        raise DataError(
            f"Expected {name}(split={split!r}) to give inputs and targets, two tensors of one length, "
            f"but got {type(made).__name__}. Return (inputs, targets)."
        )
    return made[0][:limit], made[1][:limit]


def make_model(configuration: Configuration) -> nn.Module:
    """The network as it starts: built from its seed, redrawn by its scheme."""
    name, options = configuration.model["name"], dict(configuration.model.get("options", {}))
    seed, scheme = configuration.axes.get("seed", 0), configuration.axes.get("initialization", "default")
    if names_code(name):
        # What the module draws as it is imported does not move the network's random numbers.
        import_object(name, "name in [model]", SpecError)
        with seeded(seed):
            model = build_named(name, "name in [model]", SpecError, **options)
    else:
        if name.replace("-", "_") not in MODELS:
            raise SpecError(
                "Expected name in [model] to be package.module:factory or one of flatness.models but got "
                f"{name!r}.{nearest(name.lower().replace('-', '_'), MODELS)} Known: {', '.join(MODELS)}."
            )
        model = build(name, **options, seed=seed)
    return model if scheme == "default" else initialize(model, scheme, seed)


def training_targets(split: Split, configuration: Configuration) -> Tensor:
    """The targets a network trains on: the data's, a share of them replaced by uniformly random classes.

    Which ones and by what depends on the seed alone. A random class may be the right one, as in Zhang et al.
    2017: at share 1 one in ten labels of ten classes is still right.
    """
    targets, share = split.train[1], float(configuration.axes.get("random_labels", 0.0))
    if share == 0:
        return targets
    if split.classes == 0:
        raise DataError(
            "Expected classes, since random_labels is not 0, but the targets are real numbers. "
            "Leave random_labels out."
        )
    generator = torch.Generator().manual_seed(stream_seed(configuration.axes.get("seed", 0), "labels"))
    count = round(share * len(targets))
    chosen = torch.randperm(len(targets), generator=generator)[:count].to(targets.device)
    drawn = torch.randint(split.classes, (count,), generator=generator).to(targets)
    return targets.index_copy(0, chosen, drawn)


def stream_seed(seed: int, *purpose: object) -> int:
    """A seed for one purpose of one network: draws for different purposes do not depend on each other."""
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
