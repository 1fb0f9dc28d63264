"""Which output of a model predicts which label, where a batch is a dict with "labels"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flatness.errors import FlatnessError, LossError
from flatness.losses import Loss
from flatness.losses.base import refuse
from flatness.losses.elementwise import BinaryCrossEntropy, MeanSquaredError
from flatness.losses.softmax import CrossEntropy
from flatness.network.memory import ran_out
from flatness.problem.own_loss import INSTEAD, Alignment, OwnLoss, own_loss, run_given, takes_labels

_OR_SAY = f"or say what the risk is, for example {INSTEAD}."

Risk = tuple[Tensor, Tensor]
"""The value of a loss on a few outputs, and its gradient in them."""


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
    """Refuse labels that are no classes before the model's own loss sees them: a GPU stops there for good."""
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


def _unlike(own: OwnLoss, fitting: list[Alignment], loss: Loss, risks: dict[Alignment, Risk]) -> Alignment:
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


def _risks(loss: Loss, alignments: list[Alignment], logits: Tensor, labels: Tensor) -> dict[Alignment, Risk]:
    """The risks by alignment, where they can be computed."""
    found: dict[Alignment, Risk] = {}
    for alignment in alignments:
        leaf = logits.clone().requires_grad_()
        try:
            with torch.enable_grad():
                items = loss.items(*alignment.pairs(leaf, labels))
                value = loss.values(items).sum() / loss.normaliser(items)
                (gradient,) = torch.autograd.grad(value, leaf)
        except (FlatnessError, RuntimeError, ValueError, LookupError) as error:
            if ran_out(error):
                raise
            continue
        found[alignment] = value.detach(), gradient
    return found
