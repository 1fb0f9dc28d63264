"""A zoo of small float64 networks, one per thing that can go wrong in measuring a layer.

Every case has a fixed seed, few weights per layer and 13 to 24 samples, so that its dense Hessian takes a
fraction of a second. Weights and biases are drawn wide enough for activations to use all their pieces and for
curvature to be far from 0. Importing this module and building a case leave torch's random state alone.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import architectures as nets


@dataclass(frozen=True)
class Case:
    """A network, its data, and what is known about it.

    Attributes:
        name: Key in `CASES`.
        build: Makes the model anew, always the same, in eval mode and float64.
        x: Inputs, samples first.
        y: Targets.
        layers: Names of the Linear and convolution modules, in the order in which they are first called.
        piecewise_linear: Whether the output is piecewise linear in every hidden value.
        exact: Layers at whose weight the Hessian is the Gauss-Newton matrix: what follows is piecewise
            linear, and the weight is not applied to its own output.
        reused: Layers whose weight enters the forward pass more than once.
        loss: (output, target) → the mean loss over everything given.
    """

    name: str
    build: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    layers: tuple[str, ...]
    piecewise_linear: bool
    exact: tuple[str, ...]
    reused: tuple[str, ...]
    loss: Callable[[Tensor, Tensor], Tensor]

    def risk(self, model: nn.Module) -> Tensor:
        """The mean loss of a model over the whole data set at once."""
        return self.loss(model(self.x), self.y)


def train(model: nn.Module, case: Case, steps: int = 30, learning_rate: float = 0.01) -> nn.Module:
    """Takes full-batch Adam steps on the case's data, in place and in eval mode, and returns the model."""
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    for _ in range(steps):
        optimizer.zero_grad()
        case.risk(model).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model


def ragged_batches(x: Tensor, y: Tensor, sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """The data cut into consecutive batches of the given sizes, which must add up to all samples."""
    if sum(sizes) != len(x) or len(x) != len(y):
        raise ValueError(
            f"Expected sizes that add up to {len(x)} inputs and {len(y)} targets but got {list(sizes)}."
        )
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


def token_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens that are not ignored; logits (n, T, K), labels (n, T)."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _randomize(model: nn.Module, generator: torch.Generator) -> None:
    """Draws every parameter and running statistic so that none is trivial (no zero shift, no unit scale)."""

    def normal(values: Tensor, std: float) -> None:
        values.copy_(std * torch.randn(values.shape, generator=generator, dtype=values.dtype))

    def uniform(values: Tensor, low: float, high: float) -> None:
        values.copy_(low + (high - low) * torch.rand(values.shape, generator=generator, dtype=values.dtype))

    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                normal(parameter.data, (2 / parameter[0].numel()) ** 0.5)
            elif name == "weight":  # norm scales and PReLU slopes
                uniform(parameter.data, *((0.1, 0.5) if isinstance(module, nn.PReLU) else (0.5, 1.5)))
            else:
                normal(parameter.data, 0.3)
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.weight.data[0] *= -1
            normal(module.running_mean, 0.5)
            uniform(module.running_var, 0.5, 2.0)


CASES: dict[str, Case] = {}


def _add(
    name: str,
    factory: Callable[[], nn.Module],
    shape: tuple[int, ...],
    layers: str,
    *,
    classes: int = 3,
    n: int = 13,
    target_shape: tuple[int, ...] = (),
    ignored: float = 0.0,
    scale: float = 1.2,
    smooth: bool = False,
    exact: str | None = None,
    reused: str = "",
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> None:
    """Enters a case.

    Args:
        name: Its name, from which its seed is made: entering another case changes no numbers of this one.
        factory: Makes the model; its parameters are drawn afterwards.
        shape: Shape of one input.
        layers: Names separated by spaces, like `exact` (all layers unless given) and `reused`.
        classes: Number of classes.
        n: Number of samples.
        target_shape: Shape of one target.
        ignored: Share of the targets that are −100.
        scale: Standard deviation of the inputs.
        smooth: Whether the network is not piecewise linear.
        loss: (output, target) → mean loss.
    """
    seed = zlib.crc32(name.encode())

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            model = factory().double().eval()
        _randomize(model, torch.Generator().manual_seed(seed))
        return model

    generator = torch.Generator().manual_seed(seed + 1)
    x = scale * torch.randn(n, *shape, generator=generator, dtype=torch.float64) + 0.3
    y = torch.randint(classes, (n, *target_shape), generator=generator)
    y[torch.rand(y.shape, generator=generator) < ignored] = -100
    names, exact_names = tuple(layers.split()), tuple((layers if exact is None else exact).split())
    CASES[name] = Case(name, build, x, y, names, not smooth, exact_names, tuple(reused.split()), loss)


_MLP = "fc1 fc2 fc3"
_CNN = "conv1 conv2 head"


def _add_mlp(name: str, *activations: nets.Activation, bias: bool = True, **options: Any) -> None:
    _add(name, lambda: nets.mlp(*activations, bias=bias), (6,), _MLP, classes=4, **{"n": 17, **options})


def _add_cnn(name: str, shape: tuple[int, ...], factory: Callable[[], nn.Module], **options: Any) -> None:
    _add(name, factory, shape, _CNN, **options)


def _add_tokens(
    name: str, factory: Callable[[], nn.Module], shape: tuple[int, int], layers: str, **options: Any
) -> None:
    _add(name, factory, shape, layers, target_shape=shape[:1], loss=token_cross_entropy, **options)


_add_mlp("mlp", nn.ReLU, n=24)
_add_mlp("mlp_no_bias", nn.ReLU, bias=False, n=24)
_add_mlp("mlp_leaky_relu", lambda: nn.LeakyReLU(0.2))
_add_mlp("mlp_prelu", nn.PReLU)
_add_mlp("mlp_hardtanh", nn.Hardtanh)
_add_mlp("mlp_relu6", nn.ReLU6, scale=4.0)  # wide enough to reach the upper kink

# Convolutions: pooling, in-place activations, groups, strides, dilation, padding, one and three axes.
_add_cnn(
    "cnn_max_pool",
    (2, 6, 6),
    lambda: nets.cnn(nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 2), 12, pool=nn.MaxPool2d(2)),
)
_add_cnn(
    "cnn_avg_pool",
    (2, 6, 6),
    lambda: nets.cnn(nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 2), 12, pool=nn.AvgPool2d(2)),
)
_add_cnn(
    "cnn_inplace_relu",
    (2, 4, 4),
    lambda: nets.cnn(nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3), 16, activation=nets.inplace_relu),
)
_add_cnn("cnn_functional_inplace_relu", (2, 4, 4), nets.InplaceFunctionalCNN)
_add_cnn("cnn_grouped", (2, 5, 5), lambda: nets.cnn(nn.Conv2d(2, 6, 3), nn.Conv2d(6, 4, 2, groups=2), 16))
_add_cnn(
    "cnn_strided",
    (2, 7, 5),
    lambda: nets.cnn(
        nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0)), nn.Conv2d(3, 4, 2, stride=2), 16
    ),
)
_add_cnn(
    "cnn_dilated",
    (2, 5, 5),
    lambda: nets.cnn(nn.Conv2d(2, 3, 3, dilation=(2, 1), padding=(1, 1)), nn.Conv2d(3, 4, 2, dilation=2), 12),
)
for _mode in ("zeros", "reflect", "replicate", "circular"):
    _add_cnn(
        f"cnn_padding_{_mode}",
        (2, 4, 4),
        lambda mode=_mode: nets.cnn(
            nn.Conv2d(2, 3, 3, padding=(2, 1), stride=2, padding_mode=mode),
            nn.Conv2d(3, 4, (3, 2), padding=(1, 0), padding_mode=mode),
            12,
        ),
    )
_add_cnn(
    "cnn_padding_same",
    (2, 3, 3),
    lambda: nets.cnn(
        nn.Conv2d(2, 3, 3, padding="same", dilation=2),
        # An even kernel pads one side more than the other.
        nn.Conv2d(3, 3, (4, 1), padding="same", padding_mode="replicate"),
        27,
    ),
)
_add_cnn(
    "cnn_padding_valid",
    (2, 5, 5),
    lambda: nets.cnn(nn.Conv2d(2, 3, 3, padding="valid"), nn.Conv2d(3, 4, 2, padding="valid"), 16),
)
_add_cnn(
    "conv1d",
    (3, 8),
    lambda: nets.cnn(
        nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv1d(4, 6, 2, groups=2),
        18,
        pool=nn.MaxPool1d(2),
    ),
)
_add_cnn(
    "conv3d",
    (2, 3, 3, 3),
    lambda: nets.cnn(
        nn.Conv3d(2, 3, 2, padding=(0, 1, 0)), nn.Conv3d(3, 4, 2), 4, pool=nn.AvgPool3d((1, 2, 1))
    ),
)
_add("cnn_depthwise", nets.depthwise, (2, 3, 3), "pointwise depthwise mix head")
_add("residual_batch_norm", nets.ResidualBatchNorm, (2, 4, 4), "stem conv1 conv2 skip head")
_add("preactivation_resnet", nets.PreactivationResNet, (2, 4, 4), "stem conv1 conv2 head")
_add("dense_concat", nets.DenseConcat, (2, 3, 3), "conv1 conv2 transition head")
_add("two_heads", nets.TwoHeads, (6,), "trunk left right", classes=5, n=19)
_add("functional", nets.Functional, (1, 3, 3), "conv fc head", classes=4, n=17)

# Several positions per sample: pooled to one output vector, or one output vector each.
_add("global_average_pool", nets.global_average_pool, (2, 5, 5), "conv1 head")
_add("sequence_mean_pool", nets.SequenceMeanPool, (5, 4), "fc1 fc2 head", classes=4, n=17)
_add("dense_prediction", nets.dense_prediction, (2, 4, 3), "conv1 head", target_shape=(4, 3))
_add_tokens("token_classifier", nets.token_classifier, (5, 4), "fc1 head", classes=4)
_add_tokens("token_classifier_ignored", nets.token_classifier, (5, 4), "fc1 head", classes=4, ignored=0.3)
_add_tokens("token_mixer", nets.TokenMixer, (6, 4), "embed mix head")

# One weight in several places.
_add("siamese", nets.Siamese, (6,), "branch head", classes=4, n=17, reused="branch")
_add(
    "shared_module",
    nets.SharedModule,
    (6,),
    "fc1 hidden head",
    classes=4,
    n=17,
    exact="fc1 head",
    reused="hidden",
)
_add(
    "tied_parameters",
    nets.TiedParameters,
    (6,),
    "fc1 encoder decoder head",
    classes=4,
    n=17,
    exact="fc1 head",
    reused="encoder decoder",
)

# Smooth: only what comes after the last smooth operation is exact.
_add_mlp("mlp_tanh", nn.Tanh, smooth=True, exact="fc3")
_add_mlp("mlp_gelu", nn.GELU, smooth=True, exact="fc3")
_add_mlp("smooth_then_relu", nn.SiLU, nn.ReLU, smooth=True, exact="fc2 fc3")
_add_mlp("layer_norm", nets.norm_then_relu, nn.ReLU, smooth=True, exact="fc2 fc3")
_add_cnn(
    "cnn_tanh",
    (2, 5, 5),
    lambda: nets.cnn(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 2), 16, activation=nn.Tanh),
    smooth=True,
    exact="head",
)
_add("attention", lambda: nets.Attention(False), (5, 3), "embed head", smooth=True, exact="head")
_add("attention_fused", lambda: nets.Attention(True), (5, 3), "embed head", smooth=True, exact="head")
_add(
    "attention_projections",
    nets.AttentionProjections,
    (5, 4),
    "query key value head",
    smooth=True,
    exact="value head",
)
# The softmax is in the model: the loss has no curvature of its own, and no layer is exact.
_add(
    "log_softmax",
    nets.log_softmax,
    (6,),
    "fc1 head",
    classes=4,
    n=17,
    smooth=True,
    exact="",
    loss=F.nll_loss,
)
