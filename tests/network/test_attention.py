"""`nn.MultiheadAttention` through its projections: the same function, and everything as it was afterwards."""

import itertools

import pytest
import torch
from torch import nn

import flatness
from flatness.curvature.operators.network_spectrum import _lengths
from flatness.network.attention import stacked_projections
from flatness.network.layers import find_layers
from flatness.problem.guard import Guard


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


OPTIONS = [
    {"bias": bias, "add_bias_kv": extra, "add_zero_attn": zero, "kdim": k, "vdim": v}
    for bias, extra, zero, (k, v) in itertools.product(
        (True, False), (True, False), (True, False), ((None, None), (5, 4))
    )
]
MASKS = {
    "none": lambda n, L, S: {},
    "bool": lambda n, L, S: {"attn_mask": torch.arange(L * S).reshape(L, S) % 3 == 1},
    "float": lambda n, L, S: {"attn_mask": normal(L, S)},
    "per head": lambda n, L, S: {"attn_mask": normal(2 * n, L, S)},
    "padding": lambda n, L, S: {"key_padding_mask": torch.arange(n * S).reshape(n, S) % 4 == 1},
    "both": lambda n, L, S: {
        "attn_mask": torch.arange(L * S).reshape(L, S) % 5 == 4,
        "key_padding_mask": torch.arange(n * S).reshape(n, S) % 4 == 1,
    },
}


@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("batch_first", [True, False])
def test_opened_attention_computes_the_same(batch_first, mask):
    n, L, S = 3, 4, 5
    for options in OPTIONS:
        module = nn.MultiheadAttention(6, 2, batch_first=batch_first, **options).double().eval()
        q, k, v = normal(n, L, 6), normal(n, S, options["kdim"] or 6), normal(n, S, options["vdim"] or 6)
        given = [tensor if batch_first else tensor.transpose(0, 1) for tensor in (q, k, v)]
        masks = MASKS[mask](n, L, S)
        for weights in ({}, {"average_attn_weights": False}, {"need_weights": False}):
            expected = module(*given, **masks, **weights)
            with Guard(module, 0):
                found = module(*given, **masks, **weights)
                assert list(find_layers(module)) == ["out_proj", "q", "k", "v"]
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert list(find_layers(module)) == ["out_proj"]


def test_a_sample_without_a_batch():
    module, x = nn.MultiheadAttention(6, 2).double().eval(), normal(4, 6)
    padding = {"key_padding_mask": torch.tensor([False, True, False, False])}
    for options in ({}, padding, {"need_weights": False}):
        expected = module(x, x, x, **options)
        with Guard(module, 0):
            torch.testing.assert_close(module(x, x, x, **options), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_transformers_compute_the_same(batch_first, norm_first):
    model = nn.Transformer(
        6, 2, 1, 1, 8, activation="gelu", batch_first=batch_first, norm_first=norm_first
    ).double()
    model.eval()
    source, target = normal(3, 4, 6), normal(3, 5, 6)
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    masks = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64),
        "src_key_padding_mask": torch.tensor([[False] * 4, [False, False, True, True], [False] * 4]),
    }
    expected = model(source, target, **masks)
    with Guard(model, 0):
        torch.testing.assert_close(model(source, target, **masks), expected, rtol=1e-12, atol=1e-12)


def test_everything_is_set_back_also_after_an_error():
    model = nn.TransformerEncoderLayer(6, 2, 8).double()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    fast = torch.backends.mha.get_fastpath_enabled()
    with Guard(model, 0):
        assert not torch.backends.mha.get_fastpath_enabled()
        assert not torch.backends.cuda.flash_sdp_enabled()
    with Guard(model, 0), pytest.raises(RuntimeError):
        model(normal(4, 3, 5))
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert not model.self_attn.batch_first
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_subclass_with_a_forward_pass_of_its_own_stays_as_it_is():
    class Doubled(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            output, weights = super().forward(*args, **kwargs)
            return 2 * output, weights

    module, x = Doubled(6, 2).double().eval(), normal(4, 3, 6)
    expected = module(x, x, x)
    with Guard(module, 0):
        torch.testing.assert_close(module(x, x, x), expected)
        assert list(find_layers(module)) == ["out_proj"]


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 6, "vdim": 6}])
def test_the_layerwise_metric_is_that_of_each_projection(options):
    """Rescaling moves queries against keys, and values against the output."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True, **options)
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))

    torch.manual_seed(0)
    model = Network().double()
    with torch.no_grad():
        for value in model.parameters():
            value += 0.3 * torch.randn_like(value)
    data = normal(12, 4, 6), torch.arange(12) % 3
    rescaled = flatness.rescale(model, data[0], kind="layerwise", seed=1)
    for third in ("q", "k", "v"):
        before, after = own_weight(model.attention, third), own_weight(rescaled.attention, third)
        assert abs(float(after.detach().norm() / before.detach().norm()) - 1) > 0.01
    spectra = [
        flatness.network_spectrum(network, data, metric="layerwise", tolerance=1e-10, progress=False)
        for network in (model, rescaled)
    ]
    # A tolerance on the residual is one on the eigenvalue squared
    assert spectra[1].largest == pytest.approx(spectra[0].largest, rel=1e-9)
    plain = [
        flatness.network_spectrum(network, data, progress=False).largest for network in (model, rescaled)
    ]
    assert abs(plain[1] / plain[0] - 1) > 0.01


def own_weight(attention, third):
    if attention.in_proj_weight is None:
        return getattr(attention, f"{third}_proj_weight")
    return attention.in_proj_weight["qkv".index(third) * 6 :][:6]


def test_the_metric_root_has_a_length_for_each_third():
    torch.manual_seed(1)
    model = nn.MultiheadAttention(4, 2, batch_first=True).double()
    with torch.no_grad():
        model.in_proj_bias.copy_(torch.arange(12.0))
    assert stacked_projections(model) == {"in_proj_weight", "in_proj_bias"}
    assert stacked_projections(nn.MultiheadAttention(4, 2, kdim=3)) == {"in_proj_bias"}
    found = _lengths(model.in_proj_weight.detach(), 3).expand(12, 4)
    for third in range(3):
        rows = slice(4 * third, 4 * third + 4)
        length = float(model.in_proj_weight[rows].detach().norm())
        torch.testing.assert_close(found[rows], torch.full((4, 4), length, dtype=torch.float64))
    lengths = _lengths(model.in_proj_bias.detach(), 3)
    expected = [14.0, 126.0, 366.0]  # 0² + 1² + 2² + 3², and on
    torch.testing.assert_close(lengths[::4].square(), torch.tensor(expected, dtype=torch.float64))
    assert lengths.shape == (12,)
