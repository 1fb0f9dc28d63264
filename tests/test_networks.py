"""The zoo holds what it says it holds."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import oracle
from networks import CASES, ragged_batches, token_cross_entropy, train

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@every_case
def test_a_case_is_small_reproducible_and_alive(case):
    state = torch.random.get_rng_state()
    model, again = case.build(), case.build()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not model.training
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert all(parameter.dtype == torch.float64 for parameter in model.parameters())
    assert 13 <= len(case.x) == len(case.y) <= 24
    assert set(case.exact) | set(case.reused) <= set(case.layers)
    assert bool((model(case.x) == model(case.x)).all())
    for layer in case.layers:
        assert model.get_parameter(f"{layer}.weight").numel() <= 400
        assert oracle.channel_inputs(model, case.x, layer).std() > 0.05
        gradient = torch.autograd.grad(case.risk(model), model.get_parameter(f"{layer}.weight"))[0]
        assert gradient.norm() > 1e-3, layer


@every_case
def test_the_layers_of_a_case_are_all_that_are_called_in_order(case):
    model, called = case.build(), []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            module.register_forward_hook(lambda *_, name=name: called.append(name))
    model(case.x)
    assert tuple(dict.fromkeys(called)) == case.layers
    twice = {name for name in called if called.count(name) > 1}
    weights = [id(model.get_parameter(f"{name}.weight")) for name in case.layers]
    tied = {name for name, weight in zip(case.layers, weights, strict=True) if weights.count(weight) > 1}
    assert twice | tied == set(case.reused)


@pytest.mark.parametrize("name, low, high", [("mlp_hardtanh", -1, 1), ("mlp_relu6", 0, 6)])
def test_bounded_activations_use_all_three_pieces(name, low, high):
    case = CASES[name]
    for layer in ("fc2", "fc3"):
        phi = oracle.channel_inputs(case.build(), case.x, layer)
        assert bool((phi == low).any())
        assert bool((phi == high).any())
        assert bool(((phi > low) & (phi < high)).any())


def test_fused_attention_has_no_second_derivative_of_its_own():
    case = CASES["attention_fused"]
    model = case.build()
    weight = model.get_parameter("embed.weight")
    gradient = torch.autograd.grad(case.risk(model), weight, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=r"derivative for .*flash_attention.* is not implemented"):
        torch.autograd.grad(gradient.sum(), weight)


def test_ragged_batches_weigh_by_samples_and_not_by_batches():
    case = CASES["mlp"]
    model, batches = case.build(), ragged_batches(case.x, case.y, [10, 10, 3, 1])
    assert [len(x) for x, _ in batches] == [10, 10, 3, 1]
    assert torch.equal(torch.cat([x for x, _ in batches]), case.x)
    assert torch.equal(torch.cat([y for _, y in batches]), case.y)
    risk = float(case.risk(model).detach())
    losses = [(len(x), float(case.loss(model(x), y).detach())) for x, y in batches]
    assert sum(size * loss for size, loss in losses) / 24 == pytest.approx(risk, rel=1e-14)
    assert abs(sum(loss for _, loss in losses) / 4 - risk) > 0.01 * risk


def test_ragged_batches_refuse_sizes_that_do_not_add_up():
    case = CASES["mlp"]
    with pytest.raises(ValueError) as error:
        ragged_batches(case.x, case.y, [10, 10])
    assert str(error.value) == "Expected sizes that add up to 24 inputs and 24 targets but got [10, 10]."


def test_ignored_tokens_weigh_nothing():
    case = CASES["token_classifier_ignored"]
    kept = case.y != -100
    assert 30 < int(kept.sum()) < 65
    output = case.build()(case.x)
    torch.testing.assert_close(
        token_cross_entropy(output, case.y), F.cross_entropy(output[kept], case.y[kept])
    )


def test_training_lowers_the_risk_and_leaves_no_gradients():
    case = CASES["residual_batch_norm"]
    model, risk = case.build(), case.risk
    mean = model.get_buffer("norm.running_mean").clone()
    before = float(risk(model).detach())
    assert train(model, case) is model
    assert float(risk(model).detach()) < 0.8 * before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(model.get_buffer("norm.running_mean"), mean)
