"""Losses: means against torch's, factors against dense float64 Hessians, refusals word for word."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatness.errors import DataError, LossError
from flatness.losses import LOSS_NAMES, Items, Loss, resolve_loss
from flatness.losses.custom import CustomLoss
from flatness.losses.normalized import NormalizedCrossEntropy


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(K: int, *shape: int, ignored: int | None = None) -> Tensor:
    """Random class indices; if asked, a middle sample is ignored, and the last prediction of the first."""
    target = torch.randint(K, shape, generator=torch.Generator().manual_seed(1))
    if ignored is not None:
        target[len(target) // 2] = ignored
        target[0].view(-1)[-1] = ignored if target.dim() > 1 else target[0]
    return target


def probabilities(*shape: int, dim: int = 1) -> Tensor:
    return normal(*shape, seed=2).softmax(dim)


def binary(*shape: int) -> Tensor:
    return (normal(*shape, seed=3) > 0).double()


# The cases: what the user passes, a batch, and the same risk as torch's own mean or written out


@dataclass(frozen=True)
class Case:
    """One loss on one layout.

    Attributes:
        name: the test's id.
        loss: what a user passes.
        output: a whole data set's outputs, float64.
        target: its targets.
        risk: (output, target) → the mean, independent of the library.
        K: the outputs of one prediction.
        dense: whether the classes are in dimension 1 of more than two.
        smooth: a risk with the same Hessian, where that of `risk` is inside the model.
    """

    name: str
    loss: Any
    output: Tensor
    target: Tensor
    risk: Callable[[Tensor, Tensor], Tensor]
    K: int
    dense: bool = False
    smooth: Callable[[Tensor, Tensor], Tensor] | None = None


def signed_limit() -> NormalizedCrossEntropy:
    """Normalized cross-entropy by its signed vectors, whatever K."""
    loss = NormalizedCrossEntropy(weight=W5, ignore_index=2, label_smoothing=0.2)
    loss.dense_limit = 0
    return loss


def normalized(output: Tensor, target: Tensor, dim: int = 1, **options: Any) -> Tensor:
    """Tsuzuku et al. 2020, eq. 20–22, written out."""
    return F.cross_entropy(output / output.std(dim, correction=0, keepdim=True), target, **options)


def language(risk: Callable[..., Tensor], **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The risk of outputs (n, T, K), all predictions in one row."""
    return lambda output, target: risk(output.flatten(0, -2), target.flatten(), **options)


def given(risk: Callable[..., Tensor], **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return functools.partial(risk, **options)


def saddle(output: Tensor, target: Tensor) -> Tensor:
    """Indefinite, coupled, of rank 3 in 4 outputs."""
    a, b, c = output[:, 0], output[:, 1] - output[:, 3], output[:, 2]
    return a.sin() * b + (a * b * c).exp() / 9 + target * c**2


W4 = torch.tensor([0.5, 2.0, 0.0, 1.5], dtype=torch.float64)
W5 = torch.tensor([0.5, 2.0, 1.0, 0.3, 1.5], dtype=torch.float64)
EVERY = {"weight": W4, "ignore_index": 1, "label_smoothing": 0.2}
SOFT = {"weight": W4, "label_smoothing": 0.2}
POSITIVE = torch.tensor([3.0, 0.5, 2.0], dtype=torch.float64)

CROSS_ENTROPIES = [
    Case("plain", "cross_entropy", normal(7, 4), classes(4, 7), F.cross_entropy, 4),
    Case(
        "function",
        F.cross_entropy,
        normal(7, 4),
        classes(4, 7).int(),
        lambda f, y: F.cross_entropy(f, y.long()),
        4,
    ),
    Case("two classes", "cross_entropy", normal(7, 2), classes(2, 7), F.cross_entropy, 2),
    Case(
        "weight", nn.CrossEntropyLoss(W4), normal(7, 4), classes(4, 7), given(F.cross_entropy, weight=W4), 4
    ),
    Case(
        "ignore_index",
        nn.CrossEntropyLoss(ignore_index=1, reduction="none"),
        normal(7, 4),
        classes(4, 7, ignored=1),
        given(F.cross_entropy, ignore_index=1),
        4,
    ),
    Case(
        "smoothing",
        nn.CrossEntropyLoss(label_smoothing=0.3),
        normal(7, 4),
        classes(4, 7, ignored=-100),
        given(F.cross_entropy, label_smoothing=0.3),
        4,
    ),
    Case(
        "every option",
        nn.CrossEntropyLoss(**EVERY),
        normal(7, 4),
        classes(4, 7, ignored=1),
        given(F.cross_entropy, **EVERY),
        4,
    ),
    Case("soft", "cross_entropy", normal(7, 4), probabilities(7, 4), F.cross_entropy, 4),
    Case(
        "soft, not summing to 1",
        nn.CrossEntropyLoss(**SOFT),
        normal(7, 4),
        3 * probabilities(7, 4),
        given(F.cross_entropy, **SOFT),
        4,
    ),
    Case(
        "dense, every option",
        nn.CrossEntropyLoss(**EVERY),
        normal(5, 4, 2, 3),
        classes(4, 5, 2, 3, ignored=1),
        given(F.cross_entropy, **EVERY),
        4,
        dense=True,
    ),
    Case(
        "dense, soft",
        nn.CrossEntropyLoss(**SOFT),
        normal(5, 4, 3),
        probabilities(5, 4, 3),
        given(F.cross_entropy, **SOFT),
        4,
        dense=True,
    ),
    Case(
        "language, every option",
        nn.CrossEntropyLoss(**EVERY),
        normal(5, 3, 4),
        classes(4, 5, 3, ignored=1),
        language(F.cross_entropy, **EVERY),
        4,
    ),
    Case(
        "both conventions fit",
        "cross_entropy",
        normal(5, 3, 3),
        classes(3, 5, 3),
        F.cross_entropy,
        3,
        dense=True,
    ),
    Case(
        "nll",
        nn.NLLLoss(W4, ignore_index=1),
        normal(7, 4).log_softmax(1),
        classes(4, 7, ignored=1),
        given(F.nll_loss, weight=W4, ignore_index=1),
        4,
        smooth=given(F.cross_entropy, weight=W4, ignore_index=1),
    ),
    Case(
        "nll, language",
        F.nll_loss,
        normal(5, 3, 4).log_softmax(2),
        classes(4, 5, 3, ignored=-100),
        language(F.nll_loss),
        4,
        smooth=language(F.cross_entropy),
    ),
]

NORMALIZED = [
    Case("normalized", "normalized_cross_entropy", normal(7, 5), classes(5, 7), normalized, 5),
    Case("normalized, three classes", "normalized_cross_entropy", normal(7, 3), classes(3, 7), normalized, 3),
    Case(
        "normalized, many classes", "normalized_cross_entropy", normal(2, 70), classes(70, 2), normalized, 70
    ),
    Case(
        "normalized, every option",
        NormalizedCrossEntropy(W5, ignore_index=2, label_smoothing=0.2),
        normal(7, 5),
        classes(5, 7, ignored=2),
        given(normalized, weight=W5, ignore_index=2, label_smoothing=0.2),
        5,
    ),
    Case(
        "normalized, every option, signed",
        signed_limit(),
        normal(7, 5),
        classes(5, 7, ignored=2),
        given(normalized, weight=W5, ignore_index=2, label_smoothing=0.2),
        5,
    ),
    Case(
        "normalized, soft, dense",
        NormalizedCrossEntropy(W5),
        normal(4, 5, 2),
        probabilities(4, 5, 2),
        given(normalized, weight=W5),
        5,
        dense=True,
    ),
    Case(
        "normalized, soft, dense, signed",
        signed_limit(),
        normal(4, 5, 2),
        probabilities(4, 5, 2),
        given(normalized, weight=W5, label_smoothing=0.2),
        5,
        dense=True,
    ),
    Case(
        "normalized, language",
        "normalized_cross_entropy",
        normal(4, 3, 5),
        classes(5, 4, 3),
        language(normalized),
        5,
    ),
]

ELEMENTWISE = [
    Case("mse", "mse", normal(7, 3), normal(7, 3, seed=1), F.mse_loss, 3),
    Case("mse, one output", nn.MSELoss(), normal(7), normal(7, seed=1), F.mse_loss, 1),
    Case(
        "mse, (n, 1) and (n,)",
        F.mse_loss,
        normal(7, 1),
        normal(7, seed=1),
        lambda f, y: F.mse_loss(f[:, 0], y),
        1,
    ),
    Case(
        "mse, (n,) and (n, 1)", "mse", normal(7), normal(7, 1, seed=1), lambda f, y: F.mse_loss(f, y[:, 0]), 1
    ),
    Case("mse, images", nn.MSELoss(), normal(4, 2, 2, 3), normal(4, 2, 2, 3, seed=1), F.mse_loss, 3),
    Case("mse, integers", "mse", normal(7, 3), classes(9, 7, 3), lambda f, y: F.mse_loss(f, y.double()), 3),
    Case(
        "squared", "squared_error", normal(7, 3), normal(7, 3, seed=1), lambda f, y: 3 * F.mse_loss(f, y), 3
    ),
    Case(
        "squared, sequences",
        "squared_error",
        normal(4, 2, 3),
        normal(4, 2, 3, seed=1),
        lambda f, y: (f - y).square().flatten(1).sum(1).mean(),
        3,
    ),
    Case("bce", "bce", normal(7, 3), binary(7, 3), F.binary_cross_entropy_with_logits, 3),
    Case(
        "bce, soft",
        F.binary_cross_entropy_with_logits,
        normal(7),
        normal(7, seed=1).sigmoid(),
        F.binary_cross_entropy_with_logits,
        1,
    ),
    Case(
        "bce, integers, (n, 1) and (n,)",
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0])),
        normal(7, 1),
        binary(7).long(),
        lambda f, y: F.binary_cross_entropy_with_logits(f[:, 0], y.double(), pos_weight=torch.tensor(3.0)),
        1,
    ),
    Case(
        "bce, weights, sequences",
        nn.BCEWithLogitsLoss(weight=torch.tensor([[0.5], [2.0]]).double(), pos_weight=POSITIVE),
        normal(4, 2, 3),
        binary(4, 2, 3),
        given(
            F.binary_cross_entropy_with_logits,
            weight=torch.tensor([[0.5], [2.0]]).double(),
            pos_weight=POSITIVE,
        ),
        3,
    ),
    Case(
        "bce, weight (1, K)",
        nn.BCEWithLogitsLoss(weight=POSITIVE[None]),
        normal(7, 3),
        binary(7, 3),
        given(F.binary_cross_entropy_with_logits, weight=POSITIVE),
        3,
    ),
]

CUSTOM = [
    Case("saddle", saddle, normal(7, 4), normal(7), lambda f, y: saddle(f, y).mean(), 4),
    Case(
        "huber",
        nn.HuberLoss(delta=0.7),
        normal(7, 4),
        normal(7, 4, seed=1),
        given(F.huber_loss, delta=0.7),
        4,
    ),
    Case("huber, images", F.huber_loss, normal(4, 2, 3), normal(4, 2, 3, seed=1), F.huber_loss, 6),
    Case(
        "smooth l1, (n, 1) and (n,)",
        nn.SmoothL1Loss(),
        normal(7, 1),
        normal(7, seed=1),
        lambda f, y: F.smooth_l1_loss(f[:, 0], y),
        1,
    ),
    Case(
        "batchmean",
        nn.KLDivLoss(reduction="batchmean"),
        normal(7, 4),
        probabilities(7, 4),
        given(F.kl_div, reduction="batchmean"),
        4,
    ),
    Case("no curvature", nn.L1Loss(), normal(7, 4), normal(7, 4, seed=1), F.l1_loss, 4),
    Case(
        "affine", lambda f, y: (f * y).sum(1), normal(7, 4), normal(7, 4), lambda f, y: (f * y).sum() / 7, 4
    ),
]

CASES = [*CROSS_ENTROPIES, *NORMALIZED, *ELEMENTWISE, *CUSTOM]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def total(loss: Loss, items: Items) -> Tensor:
    """Σ c s sᵀ of every prediction: (n, T, K, K), in float64."""
    n, T, K = items.logits.shape
    H = torch.zeros(n, T, K, K, dtype=torch.float64)
    for s, c in loss.factors(items):
        assert s.shape == (n, T, K)
        assert s.dtype == items.logits.dtype
        assert not s.requires_grad
        assert c is None or c.shape == (n, T)
        weight = 1.0 if c is None else c.double()[..., None, None]
        H += weight * s.double()[..., None] * s.double()[..., None, :]
    return H


def whole_hessian(case: Case, items: Items, C: Tensor) -> Tensor:
    """C·∂²E/∂f² between all outputs of all samples, by torch, in the order of the items: (nTK, nTK)."""

    def risk(flat: Tensor) -> Tensor:
        f = flat.reshape(items.logits.shape)
        f = f.mT if case.dense else f
        return C * (case.smooth or case.risk)(f.reshape(case.output.shape), case.target)

    H = torch.autograd.functional.hessian(risk, items.logits.detach().flatten())
    assert isinstance(H, Tensor)
    return H


@every_case
def test_the_risk_is_torchs_mean_over_the_whole_data_whatever_the_batches(case: Case):
    loss = resolve_loss(case.loss)
    batches = [loss.items(*pair) for pair in zip(case.output.split(3), case.target.split(3), strict=True)]
    values = torch.cat([loss.values(items) for items in batches])
    normalisers = [loss.normaliser(items) for items in batches]
    assert values.shape == (len(case.output),)
    assert all(C.dtype == torch.float64 and C.shape == () for C in normalisers)
    risk = values.sum() / torch.stack(normalisers).sum()
    torch.testing.assert_close(risk, case.risk(case.output, case.target), rtol=1e-13, atol=0)


@every_case
def test_the_factors_give_the_dense_hessian_of_every_prediction(case: Case):
    loss = resolve_loss(case.loss)
    items = loss.items(case.output, case.target)
    n, T, K = items.logits.shape
    expected = whole_hessian(case, items, loss.normaliser(items))
    assert (K, n * T * K) == (case.K, case.output.numel())
    blocks = torch.block_diag(*total(loss, items).flatten(0, 1))
    torch.testing.assert_close(blocks, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))
    weights = [c for _, c in loss.factors(items)]
    assert len(weights) == loss.rank(items)
    assert all(c is None for c in weights) or all(c is not None for c in weights)


@every_case
def test_the_values_and_logits_are_differentiable_in_the_output(case: Case):
    loss = resolve_loss(case.loss)
    output = case.output.clone().requires_grad_()
    items = loss.items(output, case.target)
    (gradient,) = torch.autograd.grad(
        loss.values(items).sum() / loss.normaliser(items), output, retain_graph=True
    )
    (expected,) = torch.autograd.grad((case.smooth or case.risk)(output, case.target), output)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
    (ones,) = torch.autograd.grad(items.logits, output, torch.ones_like(items.logits))
    assert ones.equal(torch.ones_like(output))


@every_case
def test_shift_invariance_is_declared_where_the_gradient_sums_to_zero(case: Case):
    loss = resolve_loss(case.loss)
    logits = loss.items(case.output, case.target).logits.detach().requires_grad_()
    items = replace(loss.items(case.output, case.target), logits=logits)
    (gradient,) = torch.autograd.grad(loss.values(items).sum(), logits)
    assert loss.shift_invariant == bool(gradient.sum(2).abs().max() < 1e-13)


@every_case
def test_the_softmax_weight_gives_the_same_hessian(case: Case):
    loss = resolve_loss(case.loss)
    items = loss.items(case.output, case.target)
    a = loss.softmax_weight(items)
    assert (a is not None) == (loss.name in ("cross_entropy", "nll"))
    if a is not None:
        p = items.logits.softmax(2)
        H = a[..., None, None] * (torch.diag_embed(p) - p[..., None] * p[..., None, :])
        torch.testing.assert_close(H, total(loss, items), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name, rank", [("cross_entropy", 3), ("mse", 4), ("normalized_cross_entropy", 3)])
def test_the_number_of_factors(name: str, rank: int):
    loss = resolve_loss(name)
    target = normal(6, 4) if name == "mse" else classes(4, 6)
    assert loss.rank(loss.items(normal(6, 4), target)) == rank


@pytest.mark.parametrize("K, rank", [(64, 63), (65, 130)])
def test_normalized_cross_entropy_turns_from_eigenvectors_to_signed_vectors(K: int, rank: int):
    loss = NormalizedCrossEntropy()
    items = loss.items(normal(2, K), classes(K, 2))
    assert loss.rank(items) == rank == len(list(loss.factors(items)))


def test_custom_factors_drop_what_is_zero_in_the_whole_batch():
    items = (loss := CustomLoss(saddle, "saddle")).items(normal(7, 4), normal(7))
    assert loss.rank(items) == 3
    signs = torch.stack([c for _, c in loss.factors(items) if c is not None])
    assert (signs == -1).any()
    flat = (loss := resolve_loss(nn.L1Loss())).items(normal(7, 4), normal(7, 4, seed=1))
    assert loss.rank(flat) == 0
    assert list(loss.factors(flat)) == []


# Numbers that round away


@pytest.mark.parametrize("gap", [5.0, 20.0, 60.0])
def test_confident_cross_entropy_keeps_its_curvature_in_float32(gap: float):
    output = normal(6, 10)
    output[torch.arange(6), classes(10, 6)] += gap
    loss = resolve_loss("cross_entropy")
    single = total(loss, loss.items(output.float(), classes(10, 6)))
    double = total(loss, loss.items(output.float().double(), classes(10, 6)))
    torch.testing.assert_close(
        single.diagonal(dim1=2, dim2=3), double.diagonal(dim1=2, dim2=3), rtol=1e-5, atol=0
    )
    error = (single - double).abs().amax((2, 3)) / double.abs().amax((2, 3))
    assert error.max() < 1e-5


def test_confident_bce_keeps_its_curvature_in_float32():
    logits = torch.tensor([20.0, -20.0, 60.0])
    loss = resolve_loss("bce")
    single = total(loss, loss.items(logits, torch.ones(3)))
    double = total(loss, loss.items(logits.double(), torch.ones(3)))
    torch.testing.assert_close(single, double, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dense_limit", [0, 200])
def test_confident_normalized_cross_entropy_in_float32(dense_limit: int):
    """At K = 200 the largest gap there is, about √K: p → 1 − 1e-4."""
    output = 0.01 * normal(3, 200)
    output[torch.arange(3), classes(200, 3)] += 50.0
    loss = NormalizedCrossEntropy()
    loss.dense_limit = dense_limit
    single = total(loss, loss.items(output.float(), classes(200, 3)))
    double = total(loss, loss.items(output.float().double(), classes(200, 3)))
    trace = single.diagonal(dim1=2, dim2=3).sum(2), double.diagonal(dim1=2, dim2=3).sum(2)
    torch.testing.assert_close(*trace, rtol=1e-4, atol=0)


def test_normalized_cross_entropy_ignores_scale_and_shift():
    loss, target = resolve_loss("normalized_cross_entropy"), classes(5, 7)
    once = loss.values(loss.items(normal(7, 5), target))
    torch.testing.assert_close(
        once, loss.values(loss.items(30 * normal(7, 5) + 4, target)), rtol=1e-13, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["cross_entropy", "nll", "mse", "bce", "normalized_cross_entropy"])
def test_half_precision_outputs_are_worked_on_in_single_at_least(name: str, dtype: torch.dtype):
    loss = resolve_loss(name)
    output = normal(6, 4).log_softmax(1).to(dtype)
    target = classes(4, 6) if "entropy" in name or name == "nll" else binary(6, 4)
    half, double = loss.items(output, target), loss.items(output.double(), target) if name != "nll" else None
    assert torch.finfo(loss.values(half).dtype).bits >= 32
    factors = total(loss, half)
    assert factors.isfinite().all()
    if double is not None:
        torch.testing.assert_close(loss.values(half).double(), loss.values(double), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(factors, total(loss, double), rtol=0, atol=0.03)


# A log_softmax inside the model


@pytest.mark.parametrize("name", ["nll", "cross_entropy", "normalized_cross_entropy"])
def test_gauss_newton_through_log_softmax_is_the_hessian_of_a_shift_invariant_loss(name: str):
    loss, z, y = resolve_loss(name), normal(5), torch.tensor([3])
    items = loss.items(z.log_softmax(0)[None], y)
    J = torch.autograd.functional.jacobian(lambda z: z.log_softmax(0), z)
    risk = normalized if "normalized" in name else F.cross_entropy
    expected = torch.autograd.functional.hessian(lambda z: risk(z[None], y), z)
    assert loss.shift_invariant
    assert isinstance(J, Tensor)
    torch.testing.assert_close(J.T @ total(loss, items)[0, 0] @ J, expected, rtol=0, atol=1e-13)


# Samples that do not count


@pytest.mark.parametrize("dense_limit", [0, 64])
@pytest.mark.parametrize("name", ["cross_entropy", "normalized_cross_entropy"])
def test_a_batch_without_counted_targets_adds_nothing(name: str, dense_limit: int):
    loss = resolve_loss(name)
    loss.dense_limit = dense_limit  # type: ignore[attr-defined]
    output = torch.zeros(3, 4, requires_grad=True)
    items = loss.items(output, torch.full((3,), -100))
    assert loss.normaliser(items) == 0
    assert loss.values(items).tolist() == [0.0, 0.0, 0.0]
    assert total(loss, items).count_nonzero() == 0
    (gradient,) = torch.autograd.grad(loss.values(items).sum(), output)
    assert gradient.count_nonzero() == 0


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_an_empty_batch_adds_nothing(name: str):
    loss = resolve_loss(name)
    items = loss.items(
        torch.zeros(0, 4),
        torch.zeros(0, dtype=torch.long) if "entropy" in name or name == "nll" else torch.zeros(0, 4),
    )
    assert loss.values(items).shape == (0,)
    assert loss.normaliser(items) == 0
    assert len(list(loss.factors(items))) == loss.rank(items)


# What a user may pass


def test_names_and_options_are_shown():
    assert LOSS_NAMES == ("cross_entropy", "nll", "mse", "squared_error", "bce", "normalized_cross_entropy")
    assert [resolve_loss(name).name for name in LOSS_NAMES] == list(LOSS_NAMES)
    assert repr(resolve_loss("mse")) == "mse"
    shown = "cross_entropy(weight=[0.5, 2.0, 0.0, 1.5], ignore_index=1, label_smoothing=0.2)"
    assert repr(resolve_loss(nn.CrossEntropyLoss(**EVERY))) == shown
    assert repr(resolve_loss(nn.BCEWithLogitsLoss(pos_weight=POSITIVE))) == "bce(pos_weight=[3.0, 0.5, 2.0])"
    assert resolve_loss(saddle).name == "saddle"
    assert resolve_loss(lambda output, target: output).name == "lambda"
    assert resolve_loss(functools.partial(F.huber_loss, reduction="none")).name == "huber_loss"
    assert resolve_loss(nn.HuberLoss()).name == "HuberLoss"
    loss = resolve_loss("bce")
    assert resolve_loss(loss) is loss


@dataclass  # with eq and without hash
class Scaled:
    factor: float

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.factor * (output - target).square().sum(1)


def test_a_callable_object_need_not_be_hashable():
    loss = resolve_loss(Scaled(2.0))
    assert loss.name == "Scaled"
    assert loss.values(loss.items(torch.zeros(2, 3), torch.ones(2, 3))).tolist() == [6.0, 6.0]


def test_a_module_is_left_as_it_was():
    module = nn.HuberLoss()
    resolve_loss(module)
    assert module.reduction == "mean"


class Doubled(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return 2 * super().forward(input, target)


def test_a_subclass_with_its_own_forward_is_a_loss_of_its_own():
    loss = resolve_loss(Doubled())
    items = loss.items(normal(7, 4), classes(4, 7))
    assert loss.name == "Doubled"
    torch.testing.assert_close(loss.values(items).mean(), 2 * F.cross_entropy(normal(7, 4), classes(4, 7)))


def test_a_custom_loss_may_work_in_place():
    loss = resolve_loss(lambda output, target: output.sub_(target).square().sum(1))
    output = normal(5, 3).requires_grad_()
    items = loss.items(output * 1.0, torch.ones(5, 3))
    loss.values(items)
    assert items.logits.flatten(1).equal(normal(5, 3))
    torch.testing.assert_close(total(loss, items), 2 * torch.eye(3).double().expand(5, 1, 3, 3))


def test_custom_targets_may_be_anything():
    loss = resolve_loss(lambda output, target: target["scale"] * (output - target["mean"]).square().sum(1))
    target = {"scale": normal(6).exp(), "mean": normal(6, 3)}
    loss.check(normal(6, 3, seed=1), target)
    items = loss.items(normal(6, 3, seed=1), target)
    expected = 2 * target["scale"][:, None, None, None] * torch.eye(3).double()
    torch.testing.assert_close(total(loss, items), expected)


def test_the_check_for_mixed_samples_passes_where_it_should():
    output, target = normal(5, 3), normal(5, 3, seed=1)
    for loss in ("mse", nn.HuberLoss(), Scaled(3.0)):
        resolve_loss(loss).check(output, target)
    resolve_loss(saddle).check(normal(1, 4), normal(1))
    resolve_loss(lambda output, target: output.sum(1)).check(output, None)
    resolve_loss(lambda output, target: output.sum(1)).check(output[:0], target[:0])
    resolve_loss(lambda output, target: output.sum(1) + target[1]).check(output, (normal(5), normal(5)))


# What is refused


def refusal(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


class WithoutReduction(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.reduction = "mean"
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output / self.temperature, target, reduction=self.reduction)


UNREADABLE = (
    "Expected a loss of (output, target) with reduction 'mean' or 'none' but got {}. "
    "Write loss=lambda output, target: ..., returning one loss per sample, shape (n,)."
)


@pytest.mark.parametrize(
    "loss, message",
    [
        (
            "cross_entropi",
            "Expected one of the losses cross_entropy, nll, mse, squared_error, bce, "
            "normalized_cross_entropy but got 'cross_entropi'. Did you mean 'cross_entropy'? For any other "
            "loss pass a function of "
            "(output, target) that returns one loss per sample.",
        ),
        (
            "zzz",
            "Expected one of the losses cross_entropy, nll, mse, squared_error, bce, "
            "normalized_cross_entropy but got 'zzz'. For any other loss pass a function of (output, "
            "target) that returns one loss "
            "per sample.",
        ),
        (
            None,
            "Expected a loss name, a torch loss or a function but got NoneType. Use one of cross_entropy, "
            "nll, mse, squared_error, bce, normalized_cross_entropy, or a function of (output, target) that "
            "returns one loss per sample.",
        ),
        (
            nn.CrossEntropyLoss,
            "Expected a loss but got the class CrossEntropyLoss. Write CrossEntropyLoss().",
        ),
        (
            nn.MSELoss(reduction="sum"),
            "Expected a loss with reduction 'mean', since the risk is a mean over samples, but got "
            "MSELoss(reduction='sum'). Write MSELoss(reduction='mean'), or pass a function of (output, "
            "target) that returns one loss per sample.",
        ),
        (
            nn.HuberLoss(reduction="sum"),
            "Expected a loss with reduction 'mean', since the risk is a mean over samples, but got "
            "HuberLoss(reduction='sum'). Write HuberLoss(reduction='mean'), or pass a function of (output, "
            "target) that returns one loss per sample.",
        ),
        (
            nn.BCELoss(),
            "Expected a loss on logits but got BCELoss, which leaves the sigmoid inside the model. Let the "
            "model return logits and use BCEWithLogitsLoss, or loss='bce'.",
        ),
        (
            F.binary_cross_entropy,
            "Expected a loss on logits but got torch.nn.functional.binary_cross_entropy, which leaves the "
            "sigmoid inside the model. Let the model return logits and use "
            "binary_cross_entropy_with_logits, or loss='bce'.",
        ),
        (
            Temperature(),
            "Expected a loss without trainable parameters, since no measure would include them, but got "
            "Temperature with temperature. Move them into the model, or freeze them with "
            "requires_grad_(False).",
        ),
        (WithoutReduction(), UNREADABLE.format("WithoutReduction")),
        (nn.GaussianNLLLoss(), UNREADABLE.format("GaussianNLLLoss")),
        (F.triplet_margin_loss, UNREADABLE.format("torch.nn.functional.triplet_margin_loss")),
        (F.relu, UNREADABLE.format("torch.nn.functional.relu")),
        (
            nn.CrossEntropyLoss(torch.tensor([1.0, -1.0])),
            "Expected finite class weights ≥ 0 but got [1.0, -1.0]. Give a class weight 0 to leave it out "
            "of the risk.",
        ),
        (
            nn.CrossEntropyLoss(label_smoothing=1.5),
            "Expected label_smoothing between 0 and 1 but got 1.5. For example label_smoothing=0.1.",
        ),
        (
            nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, torch.inf])),
            "Expected a finite pos_weight ≥ 0 but got [1.0, inf]. Give an output weight 0 to leave it out "
            "of the risk.",
        ),
    ],
    # Not str: a function's holds its address, which differs between processes.
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__),
)
def test_losses_that_are_refused(loss: Any, message: str):
    assert refusal(LossError, lambda: resolve_loss(loss)) == message


SAME = "Let the model return its predictions, not the loss or a mean over the batch."


@pytest.mark.parametrize(
    "loss, output, target, message",
    [
        (
            "cross_entropy",
            [torch.zeros(3, 4)],
            classes(4, 3),
            "Expected the model to return one torch.Tensor but got list. Pass a forward= that takes (model, "
            "batch) and returns (output, target).",
        ),
        (
            "cross_entropy",
            torch.zeros(3, 4, dtype=torch.long),
            classes(4, 3),
            "Expected real floating point outputs but got torch.int64. Return the scores before any "
            "rounding, argmax or complex transform.",
        ),
        (
            "mse",
            torch.tensor(0.5),
            torch.zeros(3),
            f"Expected outputs with one row of predictions per sample but got shape (). {SAME}",
        ),
        (
            saddle,
            torch.zeros(3, 0),
            torch.zeros(3),
            f"Expected outputs with one row of predictions per sample but got shape (3, 0). {SAME}",
        ),
        (
            "cross_entropy",
            torch.zeros(3, 4),
            [0, 1, 2],
            "Expected the targets as a torch.Tensor but got list. Convert them with "
            "torch.as_tensor(target), or pass a forward= that returns (output, target).",
        ),
        (
            "mse",
            torch.zeros(3),
            torch.zeros(3, dtype=torch.complex64),
            "Expected real targets but got torch.complex64. Pass target.real, or target.abs().",
        ),
        (
            "cross_entropy",
            torch.zeros(3, 4),
            classes(4, 2),
            "Expected one target per sample but got targets of shape (2,) for outputs of shape (3, 4). Pair "
            "each input with its target in the data, or in forward= if you pass one.",
        ),
        (
            "bce",
            torch.zeros(3),
            torch.tensor(1.0),
            "Expected one target per sample but got targets of shape () for outputs of shape (3,). Pair "
            "each input with its target in the data, or in forward= if you pass one.",
        ),
        (
            "cross_entropy",
            torch.zeros(3, 1),
            torch.zeros(3),
            "Expected outputs of shape (n, K), K ≥ 2 the number of classes, but got shape (3, 1). For one "
            "logit per sample use loss='bce'.",
        ),
        (
            "cross_entropy",
            torch.zeros(3, 1, 2),
            classes(2, 3, 2),
            "Expected outputs of shape (n, K), K ≥ 2 the number of classes, but got shape (3, 1, 2). For "
            "one logit per sample use loss='bce'.",
        ),
        (
            "cross_entropy",
            torch.zeros(3, 4),
            torch.zeros(3),
            "Expected integer class indices of shape (3,), or floating point class probabilities of shape "
            "(3, 4), for outputs of shape (3, 4) but got torch.float32 targets of shape (3,). Write "
            "target.long() if they are class indices, or use loss='mse'.",
        ),
        (
            "cross_entropy",
            torch.zeros(3, 4),
            torch.zeros(3, 1, dtype=torch.long),
            "Expected integer class indices of shape (3,), or floating point class probabilities of shape "
            "(3, 4), for outputs of shape (3, 4) but got torch.int64 targets of shape (3, 1). Write "
            "target.squeeze(-1).",
        ),
        (
            "nll",
            torch.zeros(3, 4),
            torch.zeros(3, 1),
            "Expected integer class indices of shape (3,) for outputs of shape (3, 4) but got torch.float32 "
            "targets of shape (3, 1). Write target.squeeze(-1).long().",
        ),
        (
            "cross_entropy",
            torch.zeros(3, 4),
            torch.ones(3, 4, dtype=torch.long),
            "Expected integer class indices of shape (3,), or floating point class probabilities of shape "
            "(3, 4), for outputs of shape (3, 4) but got torch.int64 targets of shape (3, 4). Write "
            "target.argmax(1) if they are one-hot, or target.float() to read them as probabilities.",
        ),
        (
            "nll",
            torch.zeros(3, 4),
            torch.ones(3, 4),
            "Expected integer class indices of shape (3,) for outputs of shape (3, 4) but got torch.float32 "
            "targets of shape (3, 4). Write target.argmax(1) if they are one-hot.",
        ),
        (
            "cross_entropy",
            torch.zeros(3, 4, 5),
            classes(4, 3, 7),
            "Expected integer class indices of shape (3, 5) or (3, 4), or floating point class "
            "probabilities of shape (3, 4, 5), for outputs of shape (3, 4, 5) but got torch.int64 targets "
            "of shape (3, 7). Reshape the targets, or pass a forward= that returns (output, target).",
        ),
        (
            "cross_entropy",
            torch.zeros(3, 4),
            torch.tensor([0, 4, 7]),
            "Expected class indices from 0 to 3, since the model has 4 outputs, but got 4 for sample 1 of "
            "the batch. Number the classes from 0, or give the model 5 outputs.",
        ),
        (
            nn.CrossEntropyLoss(ignore_index=-1),
            torch.zeros(2, 3, 4),
            torch.tensor([[0, 1, -1], [2, -100, 0]]),
            "Expected class indices from 0 to 3, since the model has 4 outputs, but got -100 for sample 1, "
            "prediction 1 of the batch. Number the classes from 0, or mark targets to skip with -1.",
        ),
        (
            "cross_entropy",
            torch.zeros(3, 2),
            torch.tensor([[0.5, 0.5], [0.5, 0.5], [1.5, -0.5]]),
            "Expected finite class probabilities ≥ 0 but got -0.5 for class 1, sample 2 of the batch. Apply "
            "softmax if they are logits, or clamp rounding errors.",
        ),
        (
            "cross_entropy",
            torch.zeros(2, 2),
            torch.tensor([[torch.nan, 0.5], [0.5, 0.5]]),
            "Expected finite class probabilities ≥ 0 but got nan for class 0, sample 0 of the batch. Apply "
            "softmax if they are logits, or clamp rounding errors.",
        ),
        (
            "nll",
            torch.stack([torch.full((4,), 0.25).log(), torch.zeros(4)]),
            torch.tensor([0, 1]),
            "Expected log-probabilities, whose logsumexp over the classes is 0, but got logsumexp 1.386 for "
            "sample 1 of the batch. End the model in log_softmax, or use loss='cross_entropy' for logits.",
        ),
        (
            "normalized_cross_entropy",
            normal(3, 2),
            classes(2, 3),
            "Expected at least 3 classes, since normalized cross-entropy of 2 classes is piecewise constant, "
            "but got outputs of shape (3, 2). Use another loss; measures that always use this one, "
            "such as normalized_sharpness, use yours with the option loss='same'.",
        ),
        (
            "normalized_cross_entropy",
            normal(3, 1),
            normal(3, 1),
            "Expected at least 3 classes, since normalized cross-entropy compares the logits of classes, but "
            "got outputs of shape (3, 1). Use another loss; measures that always use this one, "
            "such as normalized_sharpness, use yours with the option loss='same'.",
        ),
        (
            "normalized_cross_entropy",
            normal(2, 3),
            torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 1.0]]),
            "Expected class probabilities that sum to 1 but got 2 for sample 1 of the batch: normalized "
            "cross-entropy is for classification. Use another loss; measures that always use this "
            "one, such as normalized_sharpness, use yours with the option loss='same'.",
        ),
        (
            "normalized_cross_entropy",
            torch.cat([torch.randn(1, 5), torch.full((1, 5), 0.1)]),
            torch.tensor([0, 1]),
            "Expected logits that differ between the classes but got the same value, 0.1, for all classes "
            "in sample 1 of the batch: normalized cross-entropy divides by their standard deviation. Use "
            "another loss; measures that always use this one, such as "
            "normalized_sharpness, use yours with the option loss='same'.",
        ),
        (
            "mse",
            torch.zeros(3, 4),
            torch.zeros(3),
            "Expected targets of shape (3, 4), one for each output, but got shape (3,). If they are class "
            "indices use loss='cross_entropy', or write torch.nn.functional.one_hot(target, 4).",
        ),
        (
            nn.L1Loss(),
            torch.zeros(3, 4),
            torch.zeros(3, 5),
            "Expected targets of shape (3, 4), one for each output, but got shape (3, 5). Reshape the "
            "targets, or pass a forward= that returns (output, target).",
        ),
        (
            "squared_error",
            torch.zeros(2, 2),
            torch.tensor([[0.0, 1.0], [2.0, torch.inf]]),
            "Expected finite targets but got inf for sample 1 of the batch. Drop or repair these samples "
            "before measuring.",
        ),
        (
            "bce",
            torch.zeros(3),
            torch.tensor([1, -1, 1]),
            "Expected binary targets between 0 and 1 but got -1 for sample 1 of the batch. Encode the two "
            "classes as 0 and 1, or use loss='cross_entropy' for more classes.",
        ),
    ],
)
def test_data_that_is_refused(loss: Any, output: Any, target: Any, message: str):
    assert refusal(DataError, lambda: resolve_loss(loss).items(output, target)) == message


@pytest.mark.parametrize(
    "loss, output, target, message",
    [
        (
            nn.CrossEntropyLoss(torch.ones(3)),
            torch.zeros(3, 4),
            classes(4, 3),
            "Expected class weights of shape (4,), one per class, but got shape (3,). Build the loss with "
            "weight=torch.ones(4) and scale from there.",
        ),
        (
            nn.BCEWithLogitsLoss(weight=torch.ones(3)),
            torch.zeros(3),
            torch.zeros(3),
            "Expected weight to broadcast to one sample's outputs, shape (), but got shape (3,). Build the "
            "loss with weight=torch.ones(()) and scale from there; for weights that differ between samples "
            "pass a function of (output, target) as the loss.",
        ),
        (
            nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)),
            torch.zeros(5, 4),
            torch.zeros(5, 4),
            "Expected pos_weight to broadcast to one sample's outputs, shape (4,), but got shape (3,). "
            "Build the loss with pos_weight=torch.ones((4,)) and scale from there; for weights that differ "
            "between samples pass a function of (output, target) as the loss.",
        ),
    ],
)
def test_options_that_do_not_fit_the_outputs_are_refused(
    loss: Any, output: Tensor, target: Tensor, message: str
):
    assert refusal(LossError, lambda: resolve_loss(loss).items(output, target)) == message


ONE_EACH = "Expected lambda to return one loss per sample, shape (4,), but got "
AVERAGE = "over the trailing dimensions of each sample: losses.flatten(1).mean(1)."


@pytest.mark.parametrize(
    "loss, message",
    [
        (
            lambda output, target: (output - target).square().mean(),
            f"{ONE_EACH}a single number. Use reduction='none' and average {AVERAGE}",
        ),
        (
            lambda output, target: (output - target).square(),
            f"{ONE_EACH}shape (4, 3). Average {AVERAGE}",
        ),
        (
            lambda output, target: [0.0] * 4,
            "Expected lambda to return a torch.Tensor of shape (4,) but got list. Return the losses as "
            "torch computed them, one per sample.",
        ),
    ],
)
def test_custom_losses_must_give_one_number_per_sample(loss: Any, message: str):
    custom = resolve_loss(loss)
    items = custom.items(torch.zeros(4, 3), torch.ones(4, 3))
    assert refusal(LossError, lambda: custom.values(items)) == message
    assert refusal(LossError, lambda: custom.rank(items)) == message
    assert refusal(LossError, lambda: custom.check(torch.zeros(4, 3), torch.ones(4, 3))) == message


def test_custom_losses_must_not_mix_samples():
    output, target = torch.arange(4.0)[:, None], torch.zeros(4)
    broadcast = resolve_loss(lambda output, target: (output - target).square().sum(0))
    message = (
        "Expected lambda to give each sample a loss that depends on that sample alone but got 14 for sample "
        "0 in a batch of 4 and 1 in a batch of 2. Reduce over every dimension but the first, and check that "
        "nothing broadcasts along it."
    )
    assert refusal(LossError, lambda: broadcast.check(output, target)) == message
    tiny = resolve_loss(lambda output, target: 1e-9 * (output[:, 0] + output.mean()))
    assert refusal(LossError, lambda: tiny.check(output, target)).startswith(
        "Expected lambda to give each sample"
    )


def test_custom_losses_of_many_outputs_are_refused_for_exact_curvature_only():
    loss = resolve_loss(lambda output, target: output.square().sum(1))
    items = loss.items(torch.ones(2, 513), None)
    assert loss.values(items).tolist() == [513.0, 513.0]
    assert refusal(LossError, lambda: list(loss.factors(items))) == (
        "Expected at most 512 outputs per sample for exact curvature of lambda, which takes a 513 × 513 "
        "matrix for each, but got 513. Use a named loss if it is one of them, or measure with "
        "method='sampled'."
    )


class Once(torch.autograd.Function):
    """x², without a second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


def test_custom_losses_without_second_derivative_are_refused():
    margin = resolve_loss(nn.MultiMarginLoss(p=2))
    output, target = normal(7, 4), classes(4, 7)
    assert refusal(LossError, lambda: margin.rank(margin.items(output, target))) == (
        "Expected MultiMarginLoss to be twice differentiable but got the error 'derivative for "
        "aten::multi_margin_loss_backward is not implemented' from torch. Write it with operations that "
        "have second derivatives."
    )
    hidden = resolve_loss(lambda output, target: Once.apply(output).sum(1))
    assert refusal(LossError, lambda: hidden.check(output, target)) == (
        "Expected lambda to be twice differentiable but got a gradient that varies without a derivative. "
        "Write it with operations that have second derivatives."
    )
    constant = resolve_loss(lambda output, target: output.amax(1) + 3 * output.sum(1))
    constant.check(output, target)
    constant.check(torch.zeros(7, 4), target)
    root = resolve_loss(lambda output, target: output.norm(dim=1) ** 1.5)
    assert refusal(
        LossError, lambda: root.rank(root.items(torch.tensor([[1.0, 2.0], [0.0, 0.0]]), None))
    ) == (
        "Expected lambda to have finite second derivatives but got NaN or infinity for sample 1 of the "
        "batch. Smooth it where it has none, such as at the 0 of a square root."
    )


def test_other_errors_of_a_custom_loss_are_its_own():
    loss = resolve_loss(lambda output, target: output @ target)
    with pytest.raises(RuntimeError, match="size mismatch"):
        loss.values(loss.items(torch.ones(2, 3), torch.ones(4)))
