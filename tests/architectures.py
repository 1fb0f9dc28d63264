"""The networks of the zoo, small enough for a dense Hessian; `networks.py` gives them data and a name."""

from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Callable[[], nn.Module]


def sequential(**modules: nn.Module) -> nn.Sequential:
    """A chain of modules that go by the given names."""
    return nn.Sequential(OrderedDict(modules))


def mlp(act1: Activation, act2: Activation | None = None, bias: bool = True) -> nn.Sequential:
    """6 → 7 → 5 → 4 units; the second activation is like the first unless given."""
    return sequential(
        fc1=nn.Linear(6, 7, bias=bias),
        act1=act1(),
        fc2=nn.Linear(7, 5, bias=bias),
        act2=(act2 or act1)(),
        fc3=nn.Linear(5, 4, bias=bias),
    )


def cnn(
    conv1: nn.Module,
    conv2: nn.Module,
    features: int,
    *,
    pool: nn.Module | None = None,
    activation: Activation = nn.ReLU,
) -> nn.Sequential:
    """Two convolutions with a pooling between them, and a linear head for 3 classes on `features` numbers."""
    return sequential(
        conv1=conv1,
        act1=activation(),
        pool=pool or nn.Identity(),
        conv2=conv2,
        act2=activation(),
        flatten=nn.Flatten(),
        head=nn.Linear(features, 3),
    )


def inplace_relu() -> nn.Module:
    """An activation that overwrites its input."""
    return nn.ReLU(inplace=True)


def norm_then_relu() -> nn.Module:
    """Layer norm over the 7 units of the first hidden layer of `mlp`, then ReLU."""
    return nn.Sequential(nn.LayerNorm(7), nn.ReLU())


def depthwise() -> nn.Sequential:
    """A depthwise convolution with two filters per channel, between pointwise ones."""
    return sequential(
        pointwise=nn.Conv2d(2, 3, 1),
        act1=nn.ReLU(),
        depthwise=nn.Conv2d(3, 6, 3, groups=3, padding=1),
        act2=nn.ReLU(),
        mix=nn.Conv2d(6, 4, 1),
        act3=nn.ReLU(),
        flatten=nn.Flatten(),
        head=nn.Linear(36, 3),
    )


def global_average_pool() -> nn.Sequential:
    """A convolution as the last layer, averaged over the map."""
    return sequential(
        conv1=nn.Conv2d(2, 4, 3),
        act1=nn.ReLU(),
        head=nn.Conv2d(4, 3, 1),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
    )


def dense_prediction() -> nn.Sequential:
    """Fully convolutional: a logit vector per pixel, (n, K, h, w)."""
    return sequential(conv1=nn.Conv2d(2, 4, 3, padding=1), act1=nn.ReLU(), head=nn.Conv2d(4, 3, 3, padding=1))


def token_classifier() -> nn.Sequential:
    """A logit vector per token, (n, T, K), each of which depends on its own token alone."""
    return sequential(fc1=nn.Linear(4, 6), act1=nn.ReLU(), head=nn.Linear(6, 4))


def log_softmax() -> nn.Sequential:
    """A classifier that puts out log-probabilities."""
    return sequential(fc1=nn.Linear(6, 5), act1=nn.ReLU(), head=nn.Linear(5, 4), out=nn.LogSoftmax(1))


class InplaceFunctionalCNN(nn.Module):
    """Overwrites every preactivation with `F.relu_`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu_(self.conv1(x))
        return self.head(F.relu_(self.conv2(h)).flatten(1))


class ResidualBatchNorm(nn.Module):
    """Post-activation residual block with batch norm, and a projection on the skip path."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.skip = nn.Conv2d(3, 4, 1, stride=2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        h = F.relu(self.norm1(self.conv1(x)))
        h = F.relu(self.norm2(self.conv2(h)) + self.skip(x))
        return self.head(h.flatten(1))


class PreactivationResNet(nn.Module):
    """Norm and in-place ReLU before each convolution; the block's output is added to the stream in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3, padding=1)
        self.norm1, self.conv1 = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        h = self.conv1(self.relu(self.norm1(x)))
        h = self.conv2(self.relu(self.norm2(h)))
        h += x
        return self.head(self.relu(h).mean((2, 3)))


class DenseConcat(nn.Module):
    """Each convolution sees the concatenation of all maps before it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(5, 3, 3, padding=1)
        self.transition, self.head = nn.Conv2d(8, 4, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, F.relu(self.conv1(x))], 1)
        x = torch.cat([x, F.relu(self.conv2(x))], 1)
        return self.head(F.adaptive_avg_pool2d(F.relu(self.transition(x)), 1).flatten(1))


class TwoHeads(nn.Module):
    """Logits from two linear heads on one trunk, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 7), nn.Linear(7, 2), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.trunk(x))
        return torch.cat([self.left(h), self.right(h)], 1)


class SequenceMeanPool(nn.Module):
    """Linear layers over a sequence axis, averaged before the head: one output per sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.fc2(F.relu(self.fc1(x)))).mean(1))


class TokenMixer(nn.Module):
    """A logit vector per token, each of which depends on all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Linear(4, 5), nn.Linear(6, 6), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.embed(x))
        h = h + F.relu(self.mix(h.transpose(1, 2))).transpose(1, 2)
        return self.head(h)


class Functional(nn.Module):
    """Python operators and tensor methods instead of modules, and a matrix that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.head = nn.Conv2d(1, 2, 2), nn.Linear(8, 8), nn.Linear(8, 4)
        self.mix, self.shift = nn.Parameter(torch.empty(8, 8)), nn.Parameter(torch.empty(8))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.conv(x)).flatten(start_dim=1)
        h = h + (self.fc(h) * 0.5).clamp(min=0)
        h = (h @ self.mix - self.shift).relu() + h / 2
        return self.head(h)


class Attention(nn.Module):
    """Self-attention by `nn.MultiheadAttention`, whose projections are never called as modules.

    Without returned attention weights the module takes the fused kernel, which has no second derivative.
    """

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + self.attention(h, h, h, need_weights=not self.fused)[0]
        return self.head(h.mean(1))


class AttentionProjections(nn.Module):
    """Softmax attention with linear projections as layers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 3**0.5
        return self.head((scores.softmax(-1) @ self.value(x)).relu().mean(1))


class SharedModule(nn.Module):
    """One hidden layer applied to its own output: the network is quadratic in its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.hidden, self.head = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.hidden(F.relu(self.fc1(x))))
        return self.head(F.relu(self.hidden(h)))


class Siamese(nn.Module):
    """One layer applied to both halves of the input: reused, yet piecewise linear in its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.head = nn.Linear(3, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.branch(x[:, :3])) + F.relu(self.branch(x[:, 3:])))


class TiedParameters(nn.Module):
    """Two modules, one after the other, that hold the same weight and different biases."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.encoder, self.decoder = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.decoder.weight = self.encoder.weight
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.encoder(F.relu(self.fc1(x))))
        return self.head(F.relu(self.decoder(h)))
