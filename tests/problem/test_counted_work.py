"""Work that is counted: by what operators move and multiply, and by nothing else."""

import torch
from torch.nn import functional as F

from flatness.problem.counted_work import START, counted


def test_operators_count_by_what_they_move():
    x = torch.ones(1000, 1000)
    found = counted(lambda: (x + x).view(-1))  # a view costs nothing
    assert (found.operators, found.moved) == (1, 3e6)
    assert found.cost == START + 3e6


def test_products_count_by_what_they_multiply_where_that_is_more():
    a = torch.ones(512, 512)
    assert counted(lambda: a @ a).moved == 2 * 512**3 / 64
    thin = torch.ones(512, 4)
    assert counted(lambda: thin @ thin.T).moved == 2 * 512 * 4 + 512**2


def test_convolutions_with_few_channels_per_group_cost_more():
    x = torch.ones(16, 64, 32, 32)
    plain = counted(lambda: F.conv2d(x, torch.ones(64, 64, 3, 3)))
    grouped = counted(lambda: F.conv2d(x, torch.ones(64, 8, 3, 3), groups=8))
    # An eighth of the operations, at an eighth of the speed.
    assert abs(grouped.moved / plain.moved - 1) < 0.01


def test_derivatives_under_vmap_are_counted_too():
    W = torch.ones(3, 8, 8, requires_grad=True)

    def work():
        return torch.autograd.grad(torch.vmap(torch.mm)(W, W.detach()).sum(), W)

    assert counted(work).cost == counted(work).cost > 2 * START
