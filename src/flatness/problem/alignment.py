"""Which output of a model predicts which label, where a batch is a dict with "labels": as in its own loss."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from flatness.errors import FlatnessError, LossError, ModelError
from flatness.losses import Loss
from flatness.losses.base import refuse
from flatness.losses.elementwise import BinaryCrossEntropy, MeanSquaredError
from flatness.losses.softmax import CrossEntropy
from flatness.network.memory import attempt
from flatness.problem.batches import copied, logits_of
from flatness.problem.guard import differentiable

# The method of encoder-decoders of transformers that makes the decoder's inputs.
_PREPARE = "prepare_decoder_input_ids_from_labels"
_GIVEN = {"labels": "them too", "decoder_input_ids": "decoder inputs made from them"}
# Largest accepted distance from the model's own loss and its gradient, relative to these. Models compute
# their loss in single precision, whatever theirs, or in half.
_CLOSE, _CLOSE_IN_HALF = 1e-4, 3e-2
# What to write for a risk that is not the model's own loss.
_INSTEAD = (
    "forward=lambda model, batch: (model(**{key: batch[key] for key in batch if key != 'labels'}).logits, "
    "batch['labels'])"
)
_OR_SAY = f"or say what the risk is, for example {_INSTEAD}."
# The value of a loss on a few outputs, and its gradient in them.
_Risk = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Alignment:
    """How a dict with "labels" is given to a model, and which of its outputs predicts which label.

    Attributes:
        shift: How many places after its own an output predicts: 1 for causal language models.
        classes_last: Whether outputs are (n, …, K): shapes do not tell where K is also a length.
        given: What the model gets of the labels: "nothing", "decoder_input_ids" made from them, or "labels".
        known_by: What says so.
        note: What the user should know about it.
    """

    shift: int = 0
    classes_last: bool = False
    given: str = "nothing"
    known_by: str = "the model returns no loss of its own"
    note: str = ""

    def run(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        """Outputs of a batch and the labels that they predict."""
        return self.pairs(self.outputs(model, batch), batch["labels"])

    def outputs(self, model: nn.Module, batch: Mapping[str, Any]) -> Any:
        """What the model returns for what it is given of the batch."""
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        if self.given == "labels":
            inputs["labels"] = batch["labels"]
        elif self.given == "decoder_input_ids":
            inputs["decoder_input_ids"] = getattr(model, _PREPARE)(labels=batch["labels"])
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


@dataclass(frozen=True)
class OwnLoss:
    """What a model returns when it is given labels.

    Attributes:
        value: Its loss.
        logits: Its outputs.
        gradient: Of the loss in the outputs; None where autograd does not connect them.
        given: As in `Alignment`.
    """

    value: Tensor
    logits: Tensor
    gradient: Tensor | None
    given: str

    def __str__(self) -> str:
        """Say how large it is, for messages."""
        n = len(self.logits)
        return f"{float(self.value):.6g} for the first {f'{n} samples' if n > 1 else 'sample'}"

    def equals(self, value: Tensor, gradient: Tensor) -> bool:
        """Whether a loss of the same outputs, and its gradient in them, are the model's own."""
        close = _close(self.value, self.logits)
        rounding = close * 1e-2 * (1 + float(self.logits.abs().max()))
        if not abs(float(value - self.value)) <= close * abs(float(self.value)) + rounding:
            return False
        if self.gradient is None:
            return True
        distance, size = float((gradient - self.gradient).norm()), float(self.gradient.norm())
        return distance <= close * (size + 1e-2)


def run_given(given: str, model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """What the model returns, given so much of the labels as `Alignment` says; None where it does not run."""
    with torch.no_grad():
        # Without labels, or with them, a model need not run; its code may raise anything then.
        return attempt(lambda: Alignment(given=given).outputs(model, copied(batch)), Exception)[0]


def own_loss(model: nn.Module, batch: Mapping[str, Any], plain: Any) -> OwnLoss | None:
    """Call the model with labels; None where it returns no loss for them.

    Args:
        model: The model.
        batch: A few samples: a dict with "labels".
        plain: What `run_given` gave for them.

    Raises:
        ModelError: If the model fails only with labels though its forward takes them.
    """
    if not _has_rows(batch["labels"]):
        return None
    with differentiable(model):
        with torch.enable_grad():
            returned, error = attempt(lambda: model(**copied(batch)), Exception)
        # Without an argument of that name it may hand labels on to what takes none.
        hidden = isinstance(error, TypeError) and "labels" not in _arguments(model)
        if error is not None and plain is not None and not hidden:
            reason = (str(error).splitlines() or [""])[0].rstrip(".")
            raise ModelError(
                "Expected the model to return a loss of its own for labels, as its forward takes them, but "
                f"it raised {type(error).__name__}: {reason}. Call it on one batch yourself, or say what the "
                f"risk is, for example {_INSTEAD}."
            ) from error
        value, logits = _loss_of(returned), logits_of(returned)
        if value is None:
            return None
        if not _has_rows(logits):
            return OwnLoss(value.detach(), plain, None, "nothing") if isinstance(plain, Tensor) else None
        gradient = _gradient(value, logits)
        given = _least_given(model, batch, plain, logits.detach())
    return OwnLoss(value.detach(), logits.detach(), gradient, given)


def _has_rows(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() > 0


def _gradient(value: Tensor, logits: Tensor) -> Tensor | None:
    """The gradient of a loss in the outputs; None where autograd does not connect them."""
    if not (value.requires_grad and logits.requires_grad):
        return None
    return torch.autograd.grad(value, logits, allow_unused=True)[0]


def takes_labels(model: nn.Module) -> bool:
    """Whether the model's forward can be given labels."""
    arguments = _arguments(model)
    return "labels" in arguments or inspect.Parameter.VAR_KEYWORD in arguments.values()


def _arguments(model: nn.Module) -> dict[str, Any]:
    """The kinds of the arguments of a model's forward; any are taken where that is not known."""
    try:
        parameters = inspect.signature(model.forward).parameters
    except ValueError:
        return {"anything": inspect.Parameter.VAR_KEYWORD}
    return {name: parameter.kind for name, parameter in parameters.items()}


def _loss_of(returned: Any) -> Tensor | None:
    """The loss in what a model returned: ``.loss``, ``["loss"]``, a number by itself or in a tuple."""
    if isinstance(returned, Mapping):
        found = returned.get("loss")
    elif hasattr(returned, "loss"):
        found = returned.loss
    else:
        parts = returned if isinstance(returned, (tuple, list)) else [returned]
        found = next((part for part in parts if isinstance(part, Tensor) and part.dim() == 0), None)
    return found.mean() if isinstance(found, Tensor) and found.is_floating_point() and found.numel() else None


def _least_given(model: nn.Module, batch: Mapping[str, Any], plain: Any, logits: Tensor) -> str:
    """The least that the model must get of the labels for the outputs that it has when it gets them."""
    prepares = hasattr(model, _PREPARE) and "decoder_input_ids" not in batch
    if prepares and _alike(run_given("decoder_input_ids", model, batch), logits):
        return "decoder_input_ids"
    # Inputs may happen to be what is made from the labels: other labels must make no difference.
    others = {**batch, "labels": batch["labels"].flip(-1)}
    same = _alike(plain, logits) and _alike(run_given("labels", model, others), logits)
    return "nothing" if same else "labels"


def _alike(output: Any, logits: Tensor) -> bool:
    """Whether outputs are the same, up to kernels."""
    if not isinstance(output, Tensor) or output.shape != logits.shape:
        return False
    return bool((output - logits).abs().max() <= _close(logits) * logits.abs().max())


def _close(*computed: Tensor) -> float:
    """How far apart, relative to their size, numbers may be that are the same up to rounding."""
    half = any(value.dtype in (torch.float16, torch.bfloat16) for value in computed)
    return _CLOSE_IN_HALF if half else _CLOSE


def find_alignment(model: nn.Module, batch: Mapping[str, Any], loss: Loss) -> Alignment:
    """The alignment with which a loss is the model's own on a few samples.

    The model is called with labels. Both the loss that it returns and, where autograd connects them, the
    gradient of that loss in the outputs have to be reproduced.

    Args:
        model: A model in evaluation mode.
        batch: A few samples: a dict with "labels".
        loss: The loss that is going to be measured.

    Raises:
        LossError: If no alignment reproduces the model's own loss, or more than one does, or if another loss
            than the given one does and that is the default.
    """
    if not takes_labels(model):
        return _by_name(model, batch)
    plain = run_given("nothing", model, batch)
    _refuse_labels(loss, plain, batch["labels"])
    own = own_loss(model, batch, plain)
    if own is None or not own.logits.isfinite().all():  # the latter has an error of its own
        return _by_name(model, batch)
    return _chosen(own, batch["labels"], loss)


def _refuse_labels(loss: Loss, output: Any, labels: Any) -> None:
    """Refuse labels that are not classes before the model's own loss sees them: that would break a GPU."""
    try:
        items = loss.lay_out(output, labels)
    except FlatnessError:  # shapes may be others when the model gets labels
        return
    refuse(loss.checks(items))


def _by_name(model: nn.Module, batch: Mapping[str, Any]) -> Alignment:
    """Causal language models of transformers predict the next token: their labels are the tokens."""
    kinds = [kind for kind in type(model).__mro__ if kind.__module__.split(".")[0] == "transformers"]
    if any(kind.__name__.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds):
        return Alignment(shift=1, known_by="according to the model's class")
    inputs = [name for name, value in batch.items() if name != "labels" and _is(value, batch["labels"])]
    if not inputs:
        return Alignment()
    return Alignment(
        note=f"labels are {inputs[0]} itself and were not shifted, since the model returns no loss of "
        "its own: if it predicts the next token, pass a forward= that returns (output[:, :-1], "
        "batch['labels'][:, 1:])"
    )


def _is(value: Any, labels: Any) -> bool:
    """Whether an input is the labels, up to those that do not count."""
    if not (isinstance(value, Tensor) and isinstance(labels, Tensor) and labels.dim() == 2):
        return False
    return value.shape == labels.shape and bool(((value == labels) | (labels < 0)).all())


def _chosen(own: OwnLoss, labels: Tensor, loss: Loss) -> Alignment:
    """The one alignment that reproduces the model's own loss."""
    losses = {str(each): each for each in (loss, CrossEntropy(), MeanSquaredError(), BinaryCrossEntropy())}
    fitting = list(_alignments(own, labels))
    risks = {name: _risks(each, fitting, own.logits, labels) for name, each in losses.items()}
    if any(risks.values()) and not own.value.isfinite():
        raise LossError(
            f"Expected a finite loss from the model itself but got {own}, which does not show which "
            f"output predicts which label. Put samples whose labels count (-100 does not) first, {_OR_SAY}"
        )
    for name, found in risks.items():
        same = [alignment for alignment, risk in found.items() if own.equals(*risk)]
        if len(same) > 1:
            raise LossError(
                "Expected one way of pairing outputs and labels to give the model's own loss, "
                f"{own}, but got it for {name} both with labels shifted by one and with labels "
                f"not shifted. Put samples on which they differ first, {_OR_SAY}"
            )
        if same:
            return _agreed(own, same[0], name, loss)
    return _unlike(own, fitting, loss, risks[str(loss)])


def _agreed(own: OwnLoss, alignment: Alignment, name: str, loss: Loss) -> Alignment:
    """The alignment with which a loss of that name is the model's own; the user may ask for another loss."""
    other = name != str(loss)
    if other and _is_default(loss):
        raise LossError(
            f"Expected to measure the model's own loss, {own}, which is {name}, but got loss={str(loss)!r}. "
            f"Pass loss={name!r}, {_OR_SAY}"
        )
    note = f"measured with {loss}; the model's own loss is {name}" if other else ""
    return replace(alignment, known_by="as in the model's own loss", note=note)


def _unlike(own: OwnLoss, fitting: list[Alignment], loss: Loss, risks: dict[Alignment, _Risk]) -> Alignment:
    """The alignment where no loss is the model's own, if the user asks for another and shapes tell."""
    if not risks:
        return Alignment(given=own.given)  # measuring says why this loss cannot be computed
    if _is_default(loss) or len(fitting) > 1:
        arrived = [f"{float(value):.6g} ({alignment.labels})" for alignment, (value, _) in risks.items()]
        raise LossError(
            f"Expected to measure the model's own loss, {own}, but got {loss} {' or '.join(arrived)}. Pass "
            "the loss that the model computes, with its class weights or label smoothing, as loss=, "
            f"{_OR_SAY}"
        )
    note = f"measured with {loss}, which is not the model's own loss"
    return replace(fitting[0], known_by="no other fits the shapes", note=note)


def _is_default(loss: Loss) -> bool:
    """Whether this is what is measured when the user does not say."""
    return str(loss) == str(CrossEntropy())


def _alignments(own: OwnLoss, labels: Tensor) -> Iterator[Alignment]:
    """The alignments that shapes allow."""
    output = own.logits
    last = output.dim() > 2 and labels.shape == output.shape[:-1] and not labels.is_floating_point()
    if last:
        yield Alignment(classes_last=True, given=own.given)
        if labels.dim() == 2 and labels.shape[1] > 1:
            yield Alignment(shift=1, classes_last=True, given=own.given)
    if not last or labels.shape == (len(output), *output.shape[2:]):
        yield Alignment(given=own.given)


def _risks(loss: Loss, alignments: list[Alignment], logits: Tensor, labels: Tensor) -> dict[Alignment, _Risk]:
    """The risks by alignment, where they can be computed."""

    def risk(alignment: Alignment) -> _Risk:
        leaf = logits.clone().requires_grad_()
        with torch.enable_grad():
            items = loss.items(*alignment.pairs(leaf, labels))
            value = loss.values(items).sum() / loss.normaliser(items)
            return value.detach(), torch.autograd.grad(value, leaf)[0]

    kinds = (FlatnessError, RuntimeError, ValueError, LookupError)
    found = {alignment: attempt(partial(risk, alignment), *kinds)[0] for alignment in alignments}
    return {alignment: own for alignment, own in found.items() if own is not None}
