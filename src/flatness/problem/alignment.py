"""Which output predicts which label, and what a model is given of the labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

PREPARE = "prepare_decoder_input_ids_from_labels"
"""The method of encoder-decoders of transformers that makes the decoder's inputs."""

_GIVEN = {"labels": "them too", "decoder_input_ids": "decoder inputs made from them"}


@dataclass(frozen=True)
class Alignment:
    """How a dict with "labels" is given to a model, and which of its outputs predicts which label.

    Attributes:
        shift: How many places after its own an output predicts: 1 for causal language models.
        classes_last: Whether outputs are (n, …, K): shapes do not tell where K is also a length.
        given: What the model gets of the labels: "nothing", "decoder_input_ids" made from them, or "labels".
        known_by: What says so.
    """

    shift: int = 0
    classes_last: bool = False
    given: str = "nothing"
    known_by: str = "the model returns no loss of its own"

    def run(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        """Outputs of a batch and the labels that they predict."""
        return self.pairs(self.outputs(model, batch), batch["labels"])

    def outputs(self, model: nn.Module, batch: Mapping[str, Any]) -> Any:
        """What the model returns for what it is given of the batch."""
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        if self.given == "labels":
            inputs["labels"] = batch["labels"]
        elif self.given == "decoder_input_ids":
            inputs["decoder_input_ids"] = getattr(model, PREPARE)(labels=batch["labels"])
        return logits_of(model(**inputs))

    def pairs(self, output: Any, labels: Any) -> tuple[Any, Any]:
        """Outputs and the labels that they predict, of what the model returned and the batch holds."""
        if not (isinstance(output, Tensor) and isinstance(labels, Tensor)):
            return output, labels
        if self.shift and output.shape[:2] == labels.shape:
            output, labels = output[:, : -self.shift], labels[:, self.shift :]
        if self.classes_last and labels.shape == (len(output), *output.shape[2:]):
            output = output.movedim(-1, 1)
        return output, labels

    def __str__(self) -> str:
        """Say it, for reports and messages."""
        given = "" if self.given == "nothing" else f", the model given {_GIVEN[self.given]}"
        return f"{self.labels}{given}: {self.known_by}"

    @property
    def labels(self) -> str:
        """What is done to the labels."""
        return "labels shifted by one" if self.shift else "labels not shifted"


def logits_of(output: Any) -> Any:
    """The tensor of an output as transformers wrap it."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return getattr(output, "logits", output)
