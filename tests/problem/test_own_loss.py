"""What is measured is the loss that the model returns by itself, or nothing."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
import oracle
from flatness.errors import DataError, LossError, ModelError
from labelled_models import (
    TOKENS,
    Classifier,
    Preparing,
    Tokens,
    Translator,
    Wrapper,
    cut,
    mean_cross_entropy,
    sentences,
    shifted,
)
from untouched import refusal, untouched

SHIFTED = "labels shifted by one: as in the model's own loss"
NOT_SHIFTED = "labels not shifted: as in the model's own loss"
INSTEAD = (
    "forward=lambda model, batch: (model(**{key: batch[key] for key in batch if key != 'labels'}).logits, "
    "batch['labels'])."
)


def measure(model, batches, loss="cross_entropy", **options):
    with untouched(model):
        return flatness.measure(
            model, batches, loss, measures=["hessian_trace", "fisher_rao"], progress=False, **options
        )


def assert_own_loss(report, model, batch, name="head", own=None):
    """The risk and the trace of the layer are those of what the model returns for all samples at once.

    Losses of the model in single precision: 1e-6.
    """

    def risk(model):
        return (own or (lambda returned: returned.loss))(model(**batch))

    H = oracle.layer_hessian(model, risk, name)
    assert report.meta["risk"] == pytest.approx(risk(model).item(), rel=1e-6)
    assert report.value("hessian_trace", layer=name) == pytest.approx(oracle.hessian_trace(H), rel=1e-6)


def as_causal(kind, name="TinyForCausalLM"):
    """A class that is called like those of transformers that shift."""
    return type(name, (kind,), {"__module__": "transformers.models.tiny"})


@pytest.mark.parametrize("wrap", [SimpleNamespace, dict, lambda loss, logits: (loss, logits)])
@pytest.mark.parametrize(
    "own, alignment", [(shifted, SHIFTED), (mean_cross_entropy, NOT_SHIFTED)], ids=["shifted", "not"]
)
@pytest.mark.parametrize("kind", [Tokens, as_causal(Tokens)], ids=["remote code", "named causal"])
def test_labels_are_paired_as_in_the_models_own_loss_whatever_its_class(kind, own, alignment, wrap):
    if wrap not in (SimpleNamespace, dict):

        class Tuple(kind):
            def forward(self, input_ids, attention_mask=None, labels=None):
                returned = super().forward(input_ids, attention_mask, labels)
                return returned.logits if labels is None else (returned.loss, returned.logits)

        model, own_of = Tuple(own), lambda returned: returned[0]
    else:
        model = kind(own, wrap=wrap)
        own_of = (lambda returned: returned["loss"]) if wrap is dict else (lambda returned: returned.loss)
    batch = sentences()
    report = measure(model, cut(batch, 9))
    assert report.meta["alignment"] == alignment
    assert_own_loss(report, model, batch, own=own_of)


def test_a_module_around_a_language_model_is_measured_with_its_loss():
    model, batch = Wrapper(Tokens()), sentences()
    report = measure(model, cut(batch, 9))
    assert report.meta["alignment"] == SHIFTED
    assert_own_loss(report, model, batch, "inner.head")


@pytest.mark.parametrize(
    "model, name, given",
    [
        (Preparing(), "head", "decoder inputs made from them"),
        (Preparing(fall_back=False), "head", "decoder inputs made from them"),
        (Translator(), "head", "them too"),
        (Translator(fall_back=False), "head", "them too"),
        (Wrapper(Preparing()), "inner.head", "them too"),
    ],
    ids=["Bart", "T5", "no method", "T5 without method", "wrapped"],
)
def test_the_inputs_of_a_decoder_are_made_from_the_labels(model, name, given):
    batch = sentences() | {"labels": sentences(length=5)["labels"].flip(0)}
    del batch["attention_mask"]
    report = measure(model, cut(batch, 9), precision=0.3)
    made = f"labels not shifted, the model given {given}"
    assert report.meta["alignment"] == f"{made}: as in the model's own loss"
    assert_own_loss(report, model, batch, name)


def test_a_source_that_happens_to_be_the_target_first_does_not_pass_for_it_later():
    batch = sentences()
    del batch["attention_mask"]
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][9:] = batch["labels"][9:].flip(1)
    model = Translator()
    report = measure(model, cut(batch, 9))
    assert_own_loss(report, model, batch)


def test_classes_and_places_of_the_same_number_are_told_apart():
    """Outputs (n, 5, 5): torch's convention would take the places for classes."""
    model, batch = Tokens(mean_cross_entropy), sentences(length=TOKENS)
    report = measure(model, cut(batch, 9))
    assert report.meta["alignment"] == NOT_SHIFTED
    assert_own_loss(report, model, batch)


def test_lengths_that_are_the_number_of_classes_in_some_batches_only_make_no_difference():
    model, short, long = Tokens(mean_cross_entropy), sentences(length=TOKENS), sentences(length=7)
    report = measure(model, [long, short])
    count = [int((batch["labels"] >= 0).sum()) for batch in (long, short)]
    risks = [model(**batch).loss.item() for batch in (long, short)]
    mean = sum(n * risk for n, risk in zip(count, risks, strict=True)) / sum(count)
    assert report.meta["risk"] == pytest.approx(mean, rel=1e-9)


def test_a_sequence_classifier_has_its_own_loss():
    batch = {"input_ids": sentences()["input_ids"], "labels": torch.arange(12) % TOKENS}
    model = Classifier(F.cross_entropy)
    report = measure(model, cut(batch, 9))
    assert report.meta["alignment"] == NOT_SHIFTED
    assert_own_loss(report, model, batch)


@pytest.mark.parametrize(
    "own, labels, classes, name",
    [
        (lambda z, y: F.mse_loss(z.squeeze(), y), torch.linspace(-1, 1, 12).double(), 1, "mse"),
        (F.binary_cross_entropy_with_logits, torch.eye(12, 3).double(), 3, "bce"),
    ],
    ids=["regression", "several labels"],
)
def test_another_loss_than_the_default_is_named(own, labels, classes, name):
    batch = {"input_ids": sentences()["input_ids"], "labels": labels}
    model = Classifier(own, classes)
    few = {key: value[:8] for key, value in batch.items()}
    assert refusal(LossError, model, [batch]) == (
        f"Expected to measure the model's own loss, {model(**few).loss.item():.6g} for the first 8 samples, "
        f"which is {name}, but got loss='cross_entropy'. Pass loss='{name}', or say what the risk is, for "
        f"example {INSTEAD}"
    )
    assert_own_loss(measure(model, cut(batch, 9), name), model, batch)


def not_reproduced(model, batch):
    """What is said when no pairing gives the model's own loss."""
    few = {key: value[:8] for key, value in batch.items()}
    with torch.no_grad():
        returned, y = model(**few), few["labels"]
        as_given = mean_cross_entropy(returned.logits, y)
        moved = mean_cross_entropy(returned.logits[:, :-1], y[:, 1:])
    return (
        f"Expected to measure the model's own loss, {returned.loss:.6g} for the first 8 samples, but got "
        f"cross_entropy {as_given:.6g} (labels not shifted) or {moved:.6g} (labels shifted by one). Pass the "
        "loss that the model computes, with its class weights or label smoothing, as loss=, or say what the "
        f"risk is, for example {INSTEAD}"
    )


WEIGHT = torch.linspace(0.5, 2, TOKENS).double()


@pytest.mark.parametrize(
    "own, loss",
    [
        ({"label_smoothing": 0.1}, nn.CrossEntropyLoss(label_smoothing=0.1)),
        ({"weight": WEIGHT}, nn.CrossEntropyLoss(weight=WEIGHT)),
    ],
    ids=["smoothing", "weights"],
)
def test_a_loss_with_smoothing_or_weights_must_be_given(own, loss):
    batch = sentences()
    model = Tokens(lambda z, y: mean_cross_entropy(z[:, :-1], y[:, 1:], **own))
    assert refusal(LossError, model, [batch]) == not_reproduced(model, batch)
    report = measure(model, [batch], loss)
    assert report.meta["alignment"] == SHIFTED
    assert_own_loss(report, model, batch)


def test_a_mean_over_another_number_of_tokens_is_refused():
    """As transformers have it with num_items_in_batch, which is about all batches of a step."""
    model = Tokens(lambda z, y: mean_cross_entropy(z[:, :-1], y[:, 1:], reduction="sum") / 100)
    assert refusal(LossError, model, [sentences()]) == not_reproduced(model, sentences())


def test_a_loss_that_the_user_asks_for_is_measured_with_the_models_pairing_and_noted():
    model, batch = Tokens(), sentences()
    report = measure(model, [batch], nn.CrossEntropyLoss(label_smoothing=0.1))
    assert report.meta["alignment"] == SHIFTED
    assert (
        "measured with cross_entropy(label_smoothing=0.1); the model's own loss is cross_entropy"
    ) in report.notes
    assert_own_loss(
        report,
        model,
        batch,
        own=lambda z: mean_cross_entropy(z.logits[:, :-1], batch["labels"][:, 1:], label_smoothing=0.1),
    )


def test_where_shapes_leave_no_choice_any_loss_may_be_asked_for():
    batch = {"input_ids": sentences()["input_ids"], "labels": torch.arange(12) % TOKENS}
    model = Classifier(lambda z, y: F.multi_margin_loss(z, y))
    report = measure(model, [batch], nn.CrossEntropyLoss(label_smoothing=0.1))
    assert report.meta["alignment"] == "labels not shifted: no other fits the shapes"
    assert (
        "measured with cross_entropy(label_smoothing=0.1), which is not the model's own loss"
    ) in report.notes


def test_measures_with_a_loss_of_their_own_pair_labels_as_the_users_does():
    model, batch = (
        Tokens(lambda z, y: mean_cross_entropy(z[:, :-1], y[:, 1:], label_smoothing=0.1)),
        sentences(),
    )
    options = {"measures": "normalized_sharpness", "progress": False, "layers": "head"}
    report = flatness.measure(model, [batch], nn.CrossEntropyLoss(label_smoothing=0.1), **options)
    expected = flatness.measure(
        model,
        [batch],
        forward=lambda model, batch: (
            model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1],
            batch["labels"][:, 1:],
        ),
        **options,
    )
    names = {"layer": "head"}
    assert report.value("normalized_sharpness", **names) == expected.value("normalized_sharpness", **names)


def test_outputs_that_no_gradient_connects_with_the_loss_are_compared_by_value():
    class Apart(Tokens):
        def forward(self, input_ids, attention_mask=None, labels=None):
            returned = super().forward(input_ids, attention_mask, labels)
            return SimpleNamespace(logits=returned.logits.clone(), loss=returned.loss)

    model, batch = Apart(), sentences()
    report = measure(model, cut(batch, 9))
    assert report.meta["alignment"] == SHIFTED
    assert_own_loss(report, model, batch)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
    assert refusal(LossError, model, [batch]) == (
        "Expected one way of pairing outputs and labels to give the model's own loss, 1.60944 for the first "
        "8 samples, but got it for cross_entropy both with labels shifted by one and with labels "
        f"not shifted. Put samples on which they differ first, or say what the risk is, for example {INSTEAD}"
    )


def test_equal_outputs_for_all_tokens_are_told_apart_by_gradients():
    model, batch = Tokens(), sentences()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
    report = measure(model, cut(batch, 9))
    assert report.meta["alignment"] == SHIFTED
    assert_own_loss(report, model, batch)


def test_frozen_weights_and_half_precision_do_not_hide_the_pairing():
    batch = sentences()
    for dtype in (torch.float64, torch.bfloat16):
        model = Tokens().to(dtype).requires_grad_(False)
        assert measure(model, [batch], layers="last").meta["alignment"] == SHIFTED


def test_labels_that_do_not_count_say_nothing():
    model, batch = Tokens(), sentences(8)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    assert refusal(LossError, model, [batch, sentences()]) == (
        "Expected a finite loss from the model itself but got nan for the first 8 samples, which does not "
        "show which output predicts which label. Put samples whose labels count (-100 does not) first, or "
        f"say what the risk is, for example {INSTEAD}"
    )


def test_labels_out_of_range_are_refused_before_the_model_sees_them():
    model, batch = Tokens(), sentences(8)
    batch["labels"][2, 3] = 9
    assert refusal(DataError, model, [batch]) == (
        "Expected class indices from 0 to 4, since the model has 5 outputs, but got 9 for sample 2, "
        "prediction 3 of the batch. Number the classes from 0, or give the model 10 outputs. Seen on the "
        "first 8 samples."
    )
    assert not any(model.given)


def test_a_model_that_fails_with_labels_only_is_refused():
    def own(logits, labels):
        raise NotImplementedError("labels are for training.")

    assert refusal(ModelError, Tokens(own), [sentences()]) == (
        "Expected the model to return a loss of its own for labels, as its forward takes them, but it raised "
        "NotImplementedError: labels are for training. Call it on one batch yourself, or say what the risk "
        f"is, for example {INSTEAD}"
    )


def test_modules_that_hand_labels_on_to_what_takes_none_have_no_loss_of_their_own():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 4).double()

        def forward(self, x):
            return self.fc(x)

    x, y = torch.randn(9, 3).double(), torch.arange(9) % 4
    report = measure(Wrapper(Plain()), [{"x": x, "labels": y}])
    assert report.meta["alignment"] == "labels not shifted: the model returns no loss of its own"


def test_tokens_that_are_their_own_labels_are_noted_where_no_loss_says_whether_they_are_shifted():
    class Plain(Tokens):
        def forward(self, input_ids):
            return super().forward(input_ids).logits

    tokens = sentences()["input_ids"]
    report = measure(Plain(), [{"input_ids": tokens, "labels": tokens}])
    assert report.meta["alignment"] == "labels not shifted: the model returns no loss of its own"
    assert (
        "labels are input_ids itself and were not shifted, since the model returns no loss of its "
        "own: if it predicts the next token, pass a forward= that returns (output[:, :-1], "
        "batch['labels'][:, 1:])"
    ) in report.notes
    other = measure(Plain(), [{"input_ids": tokens, "labels": tokens.flip(1)}])
    assert not any("itself" in note for note in other.notes)


def test_the_model_is_called_with_labels_only_where_nothing_else_says_what_is_measured():
    model, batch = Tokens(), sentences()
    flatness.measure(model, [batch], measures="hessian_trace", layers="last", progress=False)
    assert model.given.count(True) == 0  # the list is as it was
    seen = []
    model.register_forward_pre_hook(
        lambda *arguments: seen.append("labels" in arguments[2]), with_kwargs=True
    )
    flatness.measure(model, [batch], measures="hessian_trace", layers="last", progress=False)
    assert seen.count(True) == 2  # the second with other labels, which must make no difference
    seen.clear()
    pairs = (batch["input_ids"], batch["labels"])
    report = flatness.measure(
        model,
        [pairs],
        measures="hessian_trace",
        layers="last",
        progress=False,
    )
    assert "alignment" not in report.meta
    assert not any(seen)
    report = flatness.measure(
        model,
        [batch],
        measures="hessian_trace",
        layers="last",
        progress=False,
        forward=lambda model, batch: (model(batch["input_ids"]).logits, batch["labels"]),
    )
    assert "alignment" not in report.meta
    assert not any(seen)


def test_what_a_model_writes_into_its_configuration_is_taken_back():
    class Noting(Classifier):
        def forward(self, input_ids, labels=None):
            if labels is not None:
                self.config.problem_type = "single_label_classification"
            return super().forward(input_ids, labels)

    model = Noting(F.cross_entropy)
    model.config = SimpleNamespace(problem_type=None)
    measure(model, [{"input_ids": sentences()["input_ids"], "labels": torch.arange(12) % TOKENS}])
    assert vars(model.config) == {"problem_type": None}
