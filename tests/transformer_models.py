"""Small float64 networks of the kinds that transformers are made of, for `test_transformer_layers`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Conv1D(nn.Module):
    """GPT-2's projection: z = x W + b with W stored as (inputs, outputs)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs) / 3)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.weight.shape[1])
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(shape)


class Compute(nn.Module):
    """Modules put together by a function of (self, x)."""

    def __init__(self, compute, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.compute = [compute]  # in a list: a module's attribute would be bound

    def forward(self, x: Tensor) -> Tensor:
        return self.compute[0](self, x)


def attention(*, batch_first: bool, fused: bool, **options) -> nn.Module:
    """Self-attention over (n, 5, 4), summed before the head."""

    def compute(self, x):
        h = x if batch_first else x.transpose(0, 1)
        h = self.attn(h, h, h, need_weights=not fused)[0]
        h = h if batch_first else h.transpose(0, 1)
        return self.head((x + h).tanh().mean(1))

    return Compute(
        compute, attn=nn.MultiheadAttention(4, 2, batch_first=batch_first, **options), head=nn.Linear(4, 3)
    )


def cross_attention() -> nn.Module:
    """Keys and values of other widths, a learned extra key, and a mask."""
    mask = torch.tensor([[False, True, False, False, False]] * 5)
    return Compute(
        lambda self, x: self.head(
            self.attn(x, self.keys(x), self.values(x), attn_mask=mask)[0].tanh().mean(1)
        ),
        attn=nn.MultiheadAttention(4, 2, kdim=3, vdim=2, add_bias_kv=True, batch_first=True),
        keys=nn.Linear(4, 3),
        values=nn.Linear(4, 2),
        head=nn.Linear(4, 3),
    )


def encoder(*, batch_first: bool, norm_first: bool = False) -> nn.Module:
    """A transformer encoder of one layer, as a classifier of sequences (n, 5, 4)."""
    layer = nn.TransformerEncoderLayer(
        4, 2, 6, activation="gelu", batch_first=batch_first, norm_first=norm_first
    )

    def compute(self, x):
        h = self.embed(x)
        h = self.encoder(h) if batch_first else self.encoder(h.transpose(0, 1)).transpose(0, 1)
        return self.head(h.mean(1))

    return Compute(
        compute,
        embed=nn.Linear(4, 4),
        encoder=nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
        head=nn.Linear(4, 3),
    )


def decoder() -> nn.Module:
    """A decoder layer that looks at the sequence backwards, samples in the second place."""
    return Compute(
        lambda self, x: self.head(
            self.decoder(x.transpose(0, 1), x.flip(1).transpose(0, 1)).transpose(0, 1).mean(1)
        ),
        decoder=nn.TransformerDecoderLayer(4, 2, 5),
        head=nn.Linear(4, 3),
    )


class CausalBlock(nn.Module):
    """A block of GPT-2: packed projections in one `Conv1D`, causal attention, two-layer feed-forward net."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)
        self.c_fc, self.c_out = Conv1D(5, width), Conv1D(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.c_attn(self.norm1(x)).chunk(3, -1)
        )
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.c_proj(h)
        return x + self.c_out(F.gelu(self.c_fc(self.norm2(x))))


def gpt() -> nn.Module:
    """A classifier of sequences out of one GPT-2 block."""
    return Compute(
        lambda self, x: self.head(self.block(x)[:, -1]), block=CausalBlock(4, 2), head=nn.Linear(4, 3)
    )


def tied_language_model() -> nn.Module:
    """Tokens in, next tokens out; the last layer's weight is the embedding's table."""
    model = Compute(
        lambda self, x: self.head(self.block(self.embed(x))),
        embed=nn.Embedding(5, 4),
        block=CausalBlock(4, 2),
        head=nn.Linear(4, 5, bias=False),
    )
    model.head.weight = model.embed.weight
    return model


def transposed(dimensions: int) -> nn.Module:
    """Transposed convolutions with all their options, then a head."""
    first, second = {
        1: (nn.ConvTranspose1d(2, 4, 3, 2, 1, output_padding=1, groups=2), nn.ConvTranspose1d(4, 3, 2)),
        2: (
            nn.ConvTranspose2d(2, 4, (2, 3), (1, 2), (1, 0), (0, 1), groups=2, dilation=(2, 1)),
            nn.ConvTranspose2d(4, 2, 2, stride=2, padding=1, bias=False),
        ),
        3: (nn.ConvTranspose3d(2, 2, 2, 1, 1), nn.ConvTranspose3d(2, 2, (1, 2, 1), (2, 1, 1))),
    }[dimensions]
    pixels = second(first(torch.zeros(1, 2, *(4, 3, 3)[:dimensions]))).numel()
    return Compute(
        lambda self, x: self.head(self.second(self.first(x).tanh()).relu().flatten(1)),
        first=first,
        second=second,
        head=nn.Linear(pixels, 3),
    )


class LowRank(nn.Module):
    """A Linear with a low-rank update, as LoRA puts beside a frozen layer."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.lora_B(self.lora_A(x))


def low_rank() -> nn.Module:
    """A hidden layer with a low-rank update."""
    return Compute(
        lambda self, x: self.head(self.hidden(x).relu().mean(1)),
        hidden=LowRank(nn.Linear(4, 5), 2),
        head=nn.Linear(5, 3),
    )


def called_twice() -> nn.Module:
    """A hidden layer applied to its own output, along a sequence."""
    return Compute(
        lambda self, x: self.head(self.hidden(self.hidden(x).tanh()).relu().mean(1)),
        hidden=nn.Linear(4, 4),
        head=nn.Linear(4, 3),
    )


def tied_layers() -> nn.Module:
    """Two layers with one weight and biases of their own."""
    model = Compute(
        lambda self, x: self.head(self.second(self.first(x).tanh()).relu().mean(1)),
        first=nn.Linear(4, 4),
        second=nn.Linear(4, 4),
        head=nn.Linear(4, 3),
    )
    model.second.weight = model.first.weight
    return model


def attention_twice() -> nn.Module:
    """An attention module that runs twice, as in networks that share all layers."""
    return Compute(
        lambda self, x: self.head(self.attn(*[self.attn(x, x, x)[0].tanh()] * 3)[0].mean(1)),
        attn=nn.MultiheadAttention(4, 2, batch_first=True),
        head=nn.Linear(4, 3),
    )
