"""Every row of a stack is updated as torch's optimizer updates one network."""

from __future__ import annotations

import pytest
import torch

from flatness.study.training.optimizers import OPTIMIZERS, SAM

SETTINGS = (
    # learning rate, momentum, weight decay
    (0.1, 0.0, 0.0),
    (0.01, 0.9, 0.0),
    (0.03, 0.0, 0.1),
    (0.02, 0.5, 0.01),
)


def torch_optimizer(name, parameter, rate, momentum, decay):
    if name == "adamw":
        return torch.optim.AdamW([parameter], rate, weight_decay=decay)
    if name in ("sgd", "sam"):  # SAM differs in where the gradient is taken
        return torch.optim.SGD([parameter], rate, momentum=momentum, weight_decay=decay)
    if name == "adam":
        return torch.optim.Adam([parameter], rate, weight_decay=decay)
    return torch.optim.RMSprop([parameter], rate, momentum=momentum, weight_decay=decay)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stack_takes_the_steps_of_torch_for_every_network(name):
    start = torch.randn(len(SETTINGS), 7, dtype=torch.float64)
    gradients = torch.randn(25, *start.shape, dtype=torch.float64)
    columns = {
        key: torch.tensor([[row[i]] for row in SETTINGS], dtype=torch.float64)
        for i, key in enumerate(("learning_rate", "momentum", "weight_decay"))
    }
    flat = start.clone()
    optimizer = OPTIMIZERS[name](columns, flat, {})
    for gradient in gradients:
        optimizer.update(flat, gradient.clone())
    for row, (rate, momentum, decay) in enumerate(SETTINGS):
        parameter = start[row].clone().requires_grad_()
        reference = torch_optimizer(name, parameter, rate, momentum, decay)
        for gradient in gradients:
            parameter.grad = gradient[row].clone()
            reference.step()
        # Both compute in float64; only the order of a few products differs.
        torch.testing.assert_close(flat[row], parameter.detach(), rtol=1e-12, atol=1e-12)


def test_rates_fall_as_torchs_steplr_lets_them():
    start, gradients = torch.randn(2, 5, dtype=torch.float64), torch.randn(7, 2, 5, dtype=torch.float64)
    columns = {"learning_rate": torch.tensor([[0.1], [0.02]], dtype=torch.float64)}
    columns |= {key: torch.zeros(2, 1, dtype=torch.float64) for key in ("momentum", "weight_decay")}
    flat = start.clone()
    optimizer = OPTIMIZERS["sgd"](columns, flat, {"decay_every": 3, "decay": 0.5})
    for epoch, gradient in enumerate(gradients):
        optimizer.begin(epoch)
        optimizer.update(flat, gradient)
    for row, rate in enumerate((0.1, 0.02)):
        parameter = start[row].clone().requires_grad_()
        reference = torch.optim.SGD([parameter], rate)
        schedule = torch.optim.lr_scheduler.StepLR(reference, 3, gamma=0.5)
        for gradient in gradients:
            parameter.grad = gradient[row].clone()
            reference.step()
            schedule.step()
        torch.testing.assert_close(flat[row], parameter.detach(), rtol=1e-12, atol=1e-12)
    optimizer.keep(torch.tensor([1]))
    optimizer.begin(3)
    assert optimizer.settings["learning_rate"].item() == pytest.approx(0.01)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_that_stay_keep_their_state_and_a_saved_state_goes_on(name):
    start, gradients = torch.randn(3, 5), torch.randn(8, 3, 5)
    columns = {key: torch.full((3, 1), value) for key, value in
               {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.01}.items()}  # fmt: skip
    whole, flat = start.clone(), start.clone()
    uninterrupted = OPTIMIZERS[name](columns, whole, {})
    for gradient in gradients:
        uninterrupted.update(whole, gradient)
    first = OPTIMIZERS[name](columns, flat, {})
    for gradient in gradients[:4]:
        first.update(flat, gradient)
    rows = torch.tensor([0, 2])
    first.keep(rows)
    flat = flat[rows]
    second = OPTIMIZERS[name]({key: value[rows] for key, value in columns.items()}, flat, {})
    second.restore(first.saved())
    for gradient in gradients[4:]:
        second.update(flat, gradient[rows])
    assert torch.equal(flat, whole[rows])


def test_what_holds_where_a_file_gives_neither_rho_nor_decay():
    gradient = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    rates = torch.tensor([[0.1], [0.2]])
    settings = {"learning_rate": rates, "momentum": 0 * rates, "weight_decay": 0 * rates}
    optimizer = SAM(settings, gradient, {"decay_every": 2})
    torch.testing.assert_close(optimizer.ascent(gradient).norm(dim=1), torch.full((2,), 0.05))
    optimizer.begin(5)
    torch.testing.assert_close(optimizer.settings["learning_rate"], torch.tensor([[0.001], [0.002]]))
