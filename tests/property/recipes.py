"""Random networks with data and a loss, as recipes that print themselves.

A failing example shows its recipe: ``problem = build(Recipe(...))`` makes the same network, data and loss
again, weights included.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from property import branches, functions, layers, sequences  # noqa: F401 (they enter their kinds of steps)
from property.steps import KINDS, LARGEST, Chain, Draw, Shape, Step, shape_after
from property.tasks import CLASSES, TASKS, Head, flat, make_target


@dataclass(frozen=True)
class Recipe:
    """A network, its data and its loss, in words.

    Attributes:
        shape: Shape of one input.
        tokens: Number of different tokens where inputs are indices of an embedding of width `embedding`.
        steps: What the network does.
        task: Key of `TASKS`.
        form: "single", "tokens", "dense" or "bare" (no head).
        K: Number of classes or values.
        ending: What follows the last layer.
        n: Number of samples.
        batches: Sizes of the batches; empty for one pair of tensors.
        seed: Of weights and data.
    """

    shape: Shape
    steps: tuple[Step, ...]
    task: str = "cross_entropy"
    form: str = "single"
    K: int = 3
    ending: str | None = None
    n: int = 5
    batches: tuple[int, ...] = ()
    tokens: int = 0
    embedding: int = 0
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Made:
    """What a recipe makes.

    Attributes:
        model: In float64 and evaluation mode.
        x: All inputs.
        y: All targets.
        loss: For `flatness.measure`.
        recipe: Where it comes from.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    loss: Any
    recipe: Recipe

    @property
    def data(self) -> Any:
        """A pair of tensors, or a list of batches."""
        sizes = list(self.recipe.batches)
        return list(zip(self.x.split(sizes), self.y.split(sizes), strict=True)) if sizes else (self.x, self.y)

    def risk(self, model: nn.Module) -> Tensor:
        """The mean loss of all the data, in torch's own words."""
        recipe, task = self.recipe, TASKS[self.recipe.task]
        output = model(self.x.clone())  # whose first step may write into it
        if recipe.task in CLASSES and recipe.task != "focal":
            return task.reference(recipe.K, *flat(recipe.form, output, self.y, task.target))
        return task.reference(recipe.K, output, self.y)

    def fresh(self, n: int = 7) -> Tensor:
        """Other inputs of the same kind."""
        return make_inputs(self.recipe, n, self.recipe.seed + 1)


def make_inputs(recipe: Recipe, n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if recipe.tokens:
        return torch.randint(recipe.tokens, (n, *recipe.shape), generator=generator)
    return 1.2 * torch.randn(n, *recipe.shape, generator=generator, dtype=torch.float64) + 0.2


def make_model(recipe: Recipe) -> nn.Module:
    """The network alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        modules: list[tuple[str, nn.Module]] = []
        shape = recipe.shape
        if recipe.tokens:
            modules.append(("embedding", nn.Embedding(recipe.tokens, recipe.embedding)))
            shape = (*shape, recipe.embedding)
        body = Chain(recipe.steps, shape)
        modules.append(("body", body))
        if recipe.form != "bare":
            modules.append(("head", Head(recipe.form, body.shape, recipe.K, recipe.ending)))
        model = nn.Sequential()
        for name, module in modules:
            model.add_module(name, module)
        model.double().eval()
        randomize(model, torch.Generator().manual_seed(recipe.seed))
    return model


def randomize(model: nn.Module, generator: torch.Generator) -> None:
    """Draw every parameter and running statistic so that none is trivial."""
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                fan = max(parameter.numel() / len(parameter), 1) if parameter.dim() > 1 else 4
                drawn = (
                    torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                    * (1.5 / fan) ** 0.5
                )
                if parameter.dim() == 1 and name == "weight":
                    drawn = 0.3 + 0.4 * drawn.abs()
                parameter.copy_(drawn)
            if isinstance(getattr(module, "running_var", None), Tensor):
                module.running_mean.copy_(0.5 * torch.randn(module.running_mean.shape, generator=generator))
                module.running_var.copy_(0.5 + torch.rand(module.running_var.shape, generator=generator))


def build(recipe: Recipe) -> Made:
    """The network, data and loss of a recipe: always the same."""
    task, model = TASKS[recipe.task], make_model(recipe)
    x = make_inputs(recipe, recipe.n, recipe.seed)
    with torch.no_grad():
        shape = tuple(model(x[:1]).shape[1:])
    y = make_target(
        task.target, recipe.form, shape, recipe.K, recipe.n, torch.Generator().manual_seed(recipe.seed)
    )
    return Made(model, x, y, task.loss(recipe.K), recipe)


# Drawing

INPUTS: tuple[Shape, ...] = (
    (3,),
    (4,),
    (2, 3),
    (3, 4),
    (4, 2),
    (2, 3, 3),
    (4, 2, 2),
    (1, 4, 3),
    (2, 2, 2, 2),
)


def grown(draw: Draw, shape: Shape, longest: int, depth: int) -> tuple[tuple[Step, ...], Shape]:
    """Draw steps one after another, each fitting what the last one gives."""
    steps: list[Step] = []
    for _ in range(draw.randint(1, longest)):
        fitting = [name for name, kind in KINDS.items() if kind.fits(shape) and (depth or not kind.parts)]
        # weights first: a network of functions alone has nothing to measure
        weighted = [name for name in fitting if name in ("linear", "convolution")]
        name = draw.choice(fitting + 3 * weighted)
        kind = KINDS[name]
        options = kind.options(draw, shape)
        parts = tuple(grown(draw, shape, 2, depth - 1)[0] for _ in range(kind.parts))
        made = Step(name, options, parts)
        after = shape_after(kind.make(shape, dict(options), parts), shape)
        if not after or math.prod(after) == 0 or len(after) > 4:
            continue
        steps.append(made)
        shape = after
        if math.prod(shape) > LARGEST:
            steps.append(Step("shrink"))
            shape = (3,)
    return tuple(steps), shape


def drawn(
    draw: Draw, *, longest: int = 4, samples: tuple[int, int] = (1, 6), tasks: Sequence[str] = tuple(TASKS)
) -> Recipe:
    """Draw a recipe."""
    shape, tokens, embedding = draw.choice(INPUTS), 0, 0
    value = shape
    if draw.randint(0, 5) == 5:
        shape, tokens, embedding = (3,), 4, draw.randint(1, 3)
        value = (3, embedding)
    seed = draw.randint(0, 2**16)
    with torch.random.fork_rng(devices=[]):
        steps, end = grown(draw, value, longest, 2)
    task, K = draw.choice(tasks), draw.randint(2, 4)
    form, ending = _head(draw, task, K, end)
    n = draw.randint(*samples)
    first = draw.randint(0, n - 1)
    return Recipe(
        shape,
        steps,
        task=task,
        form=form,
        K=K,
        ending=ending,
        n=n,
        batches=(first, n - first) if first else (),
        tokens=tokens,
        embedding=embedding,
        seed=seed,
    )


def _head(draw: Draw, task: str, K: int, shape: Shape) -> tuple[str, str | None]:
    forms = ["single"]
    if task not in ("multi margin", "multilabel", "kl", "bce weights"):
        if len(shape) > 1 and shape[0] != K and TASKS[task].target != "soft":
            forms += ["tokens"] * (task != "focal")
        if len(shape) > 1:
            forms += ["dense"]
    if TASKS[task].output == "values" and task != "bce weights" and task != "multilabel":
        forms += ["bare"]
    form = draw.choice(forms)
    if TASKS[task].output == "log classes":
        return form, draw.choice(["log_softmax", "log_softmax", "twice", "flat log_softmax"])
    return form, draw.choice([None, None, None, "log_softmax", "scaled", "tanh", "flat log_softmax"])
