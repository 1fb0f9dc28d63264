"""Signs that belong to samples: the same in any micro-batch, and independent of one another."""

import torch

from flatness.losses.signs import Signs, lots

N, M = 2000, 130


def drawn(seed=0, samples=None, *draw):
    samples = torch.arange(N) if samples is None else samples
    return Signs(seed, samples).at(*draw).like(torch.empty(len(samples), M, dtype=torch.float64))


def test_a_sample_has_the_same_signs_in_any_micro_batch_and_order():
    whole = drawn(3)
    picked = torch.tensor([1999, 0, 7])
    assert torch.equal(drawn(3, picked), whole[picked])
    signs = Signs(3, torch.arange(10)).at()
    assert torch.equal(signs.of(slice(4, 8)).like(torch.empty(4, M)), whole[4:8].float())


def test_rows_of_a_sample_share_its_signs():
    flat = Signs(0, torch.arange(5)).like(torch.empty(5, 12))
    assert torch.equal(Signs(0, torch.arange(5)).like(torch.empty(15, 4)), flat.reshape(15, 4))


def test_draws_are_independent_of_each_other():
    """Means of products of N signs, in standard deviations: their mean square over M is 1 ± √(2/M)."""
    base = drawn()
    others = {
        "itself": torch.ones_like(base),
        "another seed": drawn(1),
        "another draw": drawn(0, None, 1),
        "a draw within": drawn(0, None, 0, 1),
        "the sample before": base.roll(1, 0),
        "the place before": base.roll(1, 1),
    }
    for name, other in others.items():
        z = (base * other).mean(0) * N**0.5
        assert abs(float(z.square().mean()) - 1) < 4 * (2 / M) ** 0.5, name
    assert set(base.flatten().tolist()) == {-1.0, 1.0}


def test_the_next_draw_is_another_one():
    signs = Signs(0, torch.arange(4))
    first, second = signs.like(torch.empty(4, M)), signs.like(torch.empty(4, M))
    third = signs.next().like(torch.empty(4, M))
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_lots_belong_to_samples_and_fill_all_groups():
    found = lots(torch.arange(N), 20)
    assert torch.equal(lots(torch.arange(100, 200), 20), found[100:200])
    # Counts of 100 each, with standard deviations of about 10.
    assert int(found.bincount(minlength=20).sub(100).abs().max()) < 40
