"""The path norm: a forward pass in which every operator follows the rule of paths, or is refused by name.

Where all parameters and inputs are squares, a sum over paths of products is what the network computes,
provided that each operator adds, moves, scales or rectifies what comes along the paths and nothing else. A
minus sign belongs to an edge and is squared away: differences are sums here, and constant factors count by
their size. Constants that are added start no path. Which operator goes by which rule stands in
`flatness.network.operators`; one without a rule is refused.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flatness.catalogue.measure import Valued
from flatness.errors import UndefinedMeasureError, listed
from flatness.network.operators import OPERATORS, Operator
from flatness.problem import batches
from flatness.problem.problem import Problem

_aten = torch.ops.aten
_NOTE = "one forward pass of ones through the squared weights; pooling layers stay as they are"
_SIGNED = "differences count as sums over paths, and constant factors by their size"


def squared_network(model: nn.Module) -> nn.Module:
    """A float64 copy whose weights, biases and norm layers (evaluation mode) are the squares of the model's.

    A norm layer in evaluation mode is x ↦ a x + c with a = γ/√(var + eps) and c = β − a·mean; in the copy it
    is x ↦ a² x + c².
    """
    try:
        squared = copy.deepcopy(model).to(torch.float64)
    except Exception as error:
        raise UndefinedMeasureError(
            "Expected a model that copy.deepcopy can copy, as path_norm squares the weights of a copy, but "
            f"got: {error}. Leave path_norm out."
        ) from error
    with torch.no_grad():
        for module in squared.modules():
            if isinstance(module, _BatchNorm):
                _take_in_statistics(module)
        for parameter in squared.parameters():
            parameter.square_()
    return squared


def _take_in_statistics(module: _BatchNorm) -> None:
    """Write a norm layer as x ↦ a x + c, by its weight and bias alone."""
    assert module.running_mean is not None
    assert module.running_var is not None
    scale = (module.running_var + module.eps).rsqrt()
    if module.weight is not None:
        scale = scale * module.weight
    shift = -scale * module.running_mean
    if module.bias is not None:
        shift = shift + module.bias
    module.eps = sys.float_info.min  # some versions of torch refuse 0, and 1 + this is 1
    module.running_mean = torch.zeros_like(module.running_mean)
    module.running_var = torch.ones_like(module.running_var)
    module.weight = nn.Parameter(scale)
    module.bias = nn.Parameter(shift)


def path_norm(problem: Problem) -> Valued:
    """The sum over all paths of the products of squared weights on them."""
    _refuse_parametrized(problem.model)
    batch = _ones(problem)
    model = squared_network(problem.model)
    inputs = [tensor for tensor in batches.tensors_in(batch) if tensor.is_floating_point()]
    with torch.no_grad(), PathSums(model, inputs) as paths:
        output, _ = problem.forward(model, batch)
        paths.check_reached(output)
    _refuse_others(paths.refused)
    value = float(output.detach().sum()) / len(output)
    if not math.isfinite(value):
        raise UndefinedMeasureError(
            f"Expected a finite path norm but got {value}: products of squared weights overflow even in "
            "float64. Leave path_norm out."
        )
    return Valued(value, (_NOTE, _SIGNED) if paths.signed else (_NOTE,))


def _ones(problem: Problem) -> Any:
    """One sample whose floating-point tensors are ones in float64; the target does not matter."""
    batch = problem.example(1)
    if not any(tensor.is_floating_point() for tensor in batches.tensors_in(batch)):
        raise UndefinedMeasureError(
            f"Expected inputs that are real numbers but got {batches.describe(batch)}: a path starts at an "
            "input that can be 1. Leave path_norm out."
        )

    def one(tensor: Tensor) -> Tensor:
        return torch.ones_like(tensor, dtype=torch.float64) if tensor.is_floating_point() else tensor

    return batches.map_tensors(batch, one)


def _refuse_parametrized(model: nn.Module) -> None:
    found = [name for name, module in model.named_modules() if parametrize.is_parametrized(module)]
    if found:
        raise UndefinedMeasureError(
            f"Expected weights that are parameters but those of {listed(found)} are computed from others "
            "(torch.nn.utils.parametrize). Remove the parametrizations first."
        )


def _refuse_others(operators: set[str]) -> None:
    if operators:
        raise UndefinedMeasureError(
            "Expected a network of layers, rectifiers, pooling and batch norm, in which paths multiply, but "
            f"it computes {listed(sorted(operators))}. Leave path_norm out."
        )


@dataclass(frozen=True)
class _Call:
    """A call of an operator.

    Attributes:
        name: What torch's dispatcher calls the operator, without underscores at its ends.
        row: What is known of it.
        function: What was called.
        args: Its arguments.
        kwargs: Its keyword arguments.
        writes: Whether it writes into its first argument.
    """

    name: str
    row: Operator
    function: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    writes: bool

    @classmethod
    def of(cls, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Self:
        """A call as torch's dispatcher sees it."""
        name = function.overloadpacket.__name__
        writes = function._schema.is_mutable and name.endswith("_")
        name = name.strip("_")
        return cls(name, OPERATORS.get(name, Operator()), function, args, kwargs, writes)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The operator on these arguments, or on its own."""
        return self.function(*(args or self.args), **(kwargs or self.kwargs))

    def values(self) -> list[Any]:
        """What it moves or adds up: of most operators all that is real; the rest says where."""
        if self.row.values is not None:
            return [self.args[place] for place in self.row.values if place < len(self.args)]
        return [value for value in tree_leaves(self.args) if _is_real(value)]

    def rectifies(self) -> bool:
        """Whether a rectifier lets what is ≥ 0 pass, and the rest with a slope of at most 1."""
        numbers = [value for value in self.args if not isinstance(value, Tensor)]
        match self.name:
            case "clamp" | "clamp_min":
                return numbers in ([0], [0, None])
            case "threshold":
                return numbers == [0, 0]
            case "leaky_relu" | "rrelu_with_noise":
                return all(abs(slope) <= 1 for slope in numbers[:2])
            case "prelu_kernel":
                return bool((self.args[1].abs() <= 1).all())
        return True


class PathSums(TorchDispatchMode):
    """A context in which a network of squared parameters, given squared inputs, sums over its paths.

    Args:
        model: The network whose parameters are the squares; all of them, buffers not.
        inputs: Where paths begin.

    Attributes:
        refused: What no path passes through, in words.
        signed: Whether a sign was left out.
    """

    def __init__(self, model: nn.Module, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self.refused: set[str] = set()
        self.signed = False
        # What lies on paths, by its memory: in-place operators and views share it. Kept, so that no other
        # takes its place.
        self._kept: list[Tensor] = []
        self._of_weights: set[int] = set()
        self._of_input: set[int] = set()
        self._signs: set[int] = set()
        self._mark(model.parameters(), self._of_weights)
        self._mark(inputs, self._of_input)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch; True would load its compiler, which takes seconds and compiles nothing here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator by the rule of paths."""
        call = _Call.of(func, args, kwargs or {})
        leaves = tree_leaves((args, kwargs))
        on_path = [value for value in leaves if _is_real(value) and self._on_path(value)]
        if not on_path or call.row.paths == "creation":
            return _constant(call.name, call.run())
        if call.writes:
            self._check_canvas(args[0])
        result = self._by_rule(call, any(map(_is_complex, leaves)))
        from_input = any(map(self._from_input, on_path))
        results = filter(_is_real, tree_leaves(result))
        self._mark(results, self._of_input if from_input else self._of_weights)
        return result

    def check_reached(self, output: Tensor) -> None:
        """Refuse an output that no path from the input leads to: something else than torch computed it."""
        if not self.refused and not self._from_input(output):
            self.refused.add("an output that no path from the input leads to")

    def _by_rule(self, call: _Call, in_complex: bool) -> Any:
        """Rules are the methods that are called like the words for them in the table of operators."""
        rule = getattr(self, f"_{call.row.paths}", None)
        if rule is None or in_complex:
            self._refuse_if(call.name, "of complex numbers" if in_complex else "", True)
            return call.run()
        return rule(call)

    def _move(self, call: _Call) -> Any:
        """What comes along is moved, left out, repeated, averaged or added up with weights ≥ 0."""
        self._add_up(call.name, call.values())
        if call.name == "where" and _memory(call.args[0]) in self._signs:
            two = all(self._on_path(value) and not _is_zero(value) for value in call.args[1:3])
            self._refuse_if(call.name, "of two values by a sign", two)
        result = call.run()
        self._refuse_if(call.name, "to integers", any(_is_whole(value) for value in tree_leaves(result)))
        return result

    def _maximum(self, call: _Call) -> Any:
        """Maxima stay as they are, like means."""
        self._add_up(call.name, call.values())
        self._refuse_if(call.name, "of weights", not any(self._from_input(value) for value in call.args))
        return call.run()

    def _norm(self, call: _Call) -> Any:
        """Squared norm layers have the mean 0, the variance 1 and parameters."""
        self._add_up(call.name, [value for value in call.args[:4] if value is not None])
        self._refuse_if(call.name, "in training mode", bool(call.args[5]))
        return call.run()

    def _comparison(self, call: _Call) -> Any:
        """The sign of what comes along is known; it may choose between that and 0."""
        self._refuse_if(call.name, "with what is not 0", not _is_zero(call.args[1]))
        ordered = call.name not in ("eq", "ne")
        self._refuse_if(call.name, "of weights", ordered and not self._from_input(call.args[0]))
        signs = call.run()
        self._mark([signs], self._signs)
        return signs

    def _rectifier(self, call: _Call) -> Any:
        passes = call.rectifies()
        self._refuse_if(call.name, "", not passes)
        of_weights = call.name != "abs" and not self._from_input(call.args[0])
        self._refuse_if(call.name, "of weights", passes and of_weights)
        return call.run()

    def _negation(self, call: _Call) -> Any:
        self.signed = True
        return call.args[0] if call.writes else _aten.clone(call.args[0])

    def _sum(self, call: _Call) -> Any:
        """Differences are sums, and weights of a summand count by their size."""
        self._add_up(call.name, call.values())
        args = call.args
        if call.name == "index_add":
            return call.run(*args, alpha=self._sized(call.kwargs.get("alpha", 1)))
        self.signed = self.signed or call.name in ("sub", "rsub")
        alpha = self._sized(args[2] if len(args) > 2 else call.kwargs.get("alpha", 1))
        if call.name == "rsub":
            return _aten.add(_aten.mul(args[0], alpha), args[1])
        return (_aten.add_ if call.writes else _aten.add)(args[0], args[1], alpha=alpha)

    def _product(self, call: _Call) -> Any:
        assert call.row.pieces is not None
        args, factors = list(call.args), call.row.pieces.factors
        summands = [value for place, value in enumerate(args) if place not in factors and _is_real(value)]
        self._add_up(call.name, summands)
        both = all(self._from_input(args[place]) for place in factors)
        self._refuse_if(call.name, "of two values that depend on the input", both)
        for place in factors:
            args[place] = self._sized(args[place])
        scales = {
            key: self._sized(call.kwargs[key]) for key in ("alpha", "beta", "value") if key in call.kwargs
        }
        return call.run(*args, **{**call.kwargs, **scales})

    def _quotient(self, call: _Call) -> Any:
        numerator, divisor = call.args
        self._refuse_if("div", "by something that is not constant", self._on_path(divisor))
        self._refuse_if("div", "with rounding", call.kwargs.get("rounding_mode") is not None)
        return call.run(numerator, self._sized(divisor))

    def _sized(self, value: Any) -> Any:
        """A constant without its sign; what lies on paths has none."""
        if self._on_path(value):
            return value
        negative = bool((value < 0).any()) if isinstance(value, Tensor) else value < 0
        self.signed = self.signed or negative
        return abs(value) if negative else value

    def _add_up(self, name: str, values: Iterable[Any]) -> None:
        """Refuse constants among what is added up, or stands in one tensor with it, unless they are 0."""
        constant = any(not self._on_path(value) and not _is_zero(value) for value in values)
        self._refuse_if(name, "of a constant", constant)

    def _check_canvas(self, written: Tensor) -> None:
        """Refuse a tensor of constants that is written into in part, unless they are 0."""
        if not self._on_path(written):
            memory = written.untyped_storage()
            whole = torch.empty(0, dtype=written.dtype, device=written.device).set_(memory)
            in_part = whole.numel() > written.numel()
            self._refuse_if("copy", "of a constant", in_part and not _is_zero(whole))

    def _refuse_if(self, name: str, what: str, wrong: bool) -> None:
        if wrong:
            words = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
            self.refused.add(f"{words} {what}".rstrip())

    def _mark(self, values: Iterable[Tensor], known: set[int]) -> None:
        for value in values:
            self._kept.append(value)
            known.add(_memory(value))

    def _from_input(self, value: Any) -> bool:
        return isinstance(value, Tensor) and _memory(value) in self._of_input

    def _on_path(self, value: Any) -> bool:
        return self._from_input(value) or (isinstance(value, Tensor) and _memory(value) in self._of_weights)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()


def _is_complex(value: Any) -> bool:
    return isinstance(value, complex) or (isinstance(value, Tensor) and value.is_complex())


def _is_zero(value: Any) -> bool:
    return not bool(value.any()) if isinstance(value, Tensor) else value == 0


def _memory(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _constant(name: str, result: Any) -> Any:
    """What lies on no path; memory that is not written yet is zero, so that it can be told from constants."""
    if "empty" in name and isinstance(result, Tensor):
        result.zero_()
    return result
