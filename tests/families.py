"""Tiny float64 models of the families that people use, written out: tokens or images in, logits out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS, WIDTH, HEADS, CLASSES = 5, 4, 2, 3


def split(x: Tensor, heads: int) -> Tensor:
    """(n, T, heads · e) to (n, heads, T, e)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Softmax attention, heads laid side by side again."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = (scores if bias is None else scores + bias).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def causal(T: int) -> Tensor:
    return torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)


class RootMeanSquare(nn.Module):
    """The norm of Llama and T5, a module of its own there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Gpt2(nn.Module):
    """Position table, packed projections, GELU, and a head tied to the token table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(4, WIDTH)
        self.norm1, self.norm2, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        T = tokens.shape[1]
        x = self.table(tokens) + self.places(torch.arange(T))
        q, k, v = (split(part, HEADS) for part in self.attn(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(attend(q, k, v, causal(T)))
        x = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return self.head(self.last(x))


class Attention(nn.Module):
    """Llama's: rotated queries and keys, and one key and value for several queries."""

    def __init__(self) -> None:
        super().__init__()
        each = WIDTH // HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, size, bias=False) for size in (WIDTH, each, each))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        q, k, v = split(self.q(x), HEADS), split(self.k(x), 1), split(self.v(x), 1)
        k, v = k.expand_as(q), v.expand_as(q)
        return self.o(attend(self.rotated(q), self.rotated(k), v, causal(T)))

    @staticmethod
    def rotated(x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None].expand(-1, x.shape[3])
        first, second = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-second, first], -1) * angle.sin()


class SwiGlu(nn.Module):
    """Silu of a gate times what goes up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(WIDTH, 3, bias=False)
        self.down = nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Mixtral's: every token goes to two of three experts; an expert gets its tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList(SwiGlu() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, weights[rows, place, None] * expert(flat[rows]))
        return out.view_as(x)


class Llama(nn.Module):
    """One block; `feed_forward` is SwiGLU, or a mixture of it."""

    def __init__(self, feed_forward: type[nn.Module] = SwiGlu) -> None:
        super().__init__()
        self.table, self.attn, self.mlp = nn.Embedding(TOKENS, WIDTH), Attention(), feed_forward()
        self.norm1, self.norm2, self.last = RootMeanSquare(), RootMeanSquare(), RootMeanSquare()
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.last(x))


class Bert(nn.Module):
    """Looks both ways, norms after the sums, and classifies by its first token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(4, WIDTH)
        self.first, self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.pooler, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.table(tokens) + self.places(torch.arange(tokens.shape[1])))
        q, k, v = (split(part(x), HEADS) for part in (self.q, self.k, self.v))
        x = self.norm1(x + self.o(attend(q, k, v)))
        x = self.norm2(x + self.down(F.gelu(self.up(x))))
        return self.head(self.pooler(x[:, 0]).tanh())


class T5(nn.Module):
    """Encoder and decoder with distances as biases, no scaling, and one table for all."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.distances = nn.Embedding(TOKENS, WIDTH), nn.Embedding(7, HEADS)
        names = ("encoder", "decoder", "cross")
        for name in names:
            for part in "qkvo":
                self.add_module(f"{name}_{part}", nn.Linear(WIDTH, WIDTH, bias=False))
            self.add_module(f"{name}_norm", RootMeanSquare())
        self.up, self.down = nn.Linear(WIDTH, 5, bias=False), nn.Linear(5, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.table.weight

    def _attend(self, name: str, x: Tensor, other: Tensor | None, bias: Tensor | None) -> Tensor:
        part = self.get_submodule
        x = part(f"{name}_norm")(x)
        source = x if other is None else other
        q = split(part(f"{name}_q")(x), HEADS)
        k, v = (split(part(f"{name}_{key}")(source), HEADS) for key in "kv")
        return part(f"{name}_o")(attend(q, k, v, bias, scale=1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        T = tokens.shape[1]
        apart = torch.arange(T)[:, None] - torch.arange(T) + 3
        bias = self.distances(apart).permute(2, 0, 1)
        x = self.table(tokens.flip(1))
        x = x + self._attend("encoder", x, None, bias)
        x = x + self.down(self.up(x).relu())
        y = self.table(tokens)
        y = y + self._attend("decoder", y, None, bias + causal(T))
        y = y + self._attend("cross", y, x, None)
        return self.head(y * WIDTH**-0.5)


class Vit(nn.Module):
    """Patches by a convolution, a class token, and a position table."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(2, WIDTH, 2, stride=2)
        self.token, self.places = (
            nn.Parameter(torch.zeros(1, 1, WIDTH)),
            nn.Parameter(torch.zeros(1, 5, WIDTH)),
        )
        self.norm1, self.norm2, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        q, k, v = (split(part, HEADS) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(attend(q, k, v))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(self.last(x)[:, 0])


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of feature maps (n, C, H, W), as ConvNeXt, MaxViT and CoAtNet have it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """A patch embedding, a block with a scale for each channel, and a head."""

    def __init__(self, norm: type[nn.Module] = LayerNorm2d, width: int = 4) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, width, 2, stride=2), norm(width)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.inner, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 6), nn.Linear(6, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.last, self.head = norm(width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        h = self.depthwise(x).permute(0, 2, 3, 1)
        h = self.scale * self.down(F.gelu(self.up(self.inner(h))))
        x = x + h.permute(0, 3, 1, 2)
        return self.head(self.last(x).mean((2, 3)))


FAMILIES = {
    "gpt-2": Gpt2,
    "llama": Llama,
    "mixtral": lambda: Llama(Mixture),
    "bert": Bert,
    "t5": T5,
    "vit": Vit,
    "convnext": ConvNeXt,
}


def made(family: str) -> nn.Module:
    """A model with all its parameters drawn."""
    model = FAMILIES[family]().double().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def data(family: str, n: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs and classes, or next tokens, some of which do not count."""
    generator = torch.Generator().manual_seed(8)
    if family in ("vit", "convnext"):
        x = torch.randn(n, 2, 4, 4, generator=generator, dtype=torch.float64)
        return x, torch.randint(CLASSES, (n,), generator=generator)
    x = torch.randint(TOKENS, (n, 4), generator=generator)
    if family == "bert":
        return x, torch.randint(CLASSES, (n,), generator=generator)
    y = torch.randint(TOKENS, (n, 4), generator=generator)
    return x, y.masked_fill(torch.rand(n, 4, generator=generator) < 0.2, -100)


def risk(family: str, n: int = 8):
    """The mean loss over what counts, as a function of the model."""
    x, y = data(family, n)

    def value(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    return value


def layers(model: nn.Module) -> list[str]:
    """Names of the layers; a table that is tied to a layer is measured as that layer."""
    kinds = (nn.Linear, nn.Embedding, nn.Conv2d)
    found = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    others = {id(module.weight) for module in found.values() if not isinstance(module, nn.Embedding)}
    return [
        name
        for name, module in found.items()
        if not isinstance(module, nn.Embedding) or id(module.weight) not in others
    ]
