"""Sums over paths: a forward pass in which every operator follows the rule of paths, or is refused by name.

Where all parameters and inputs are squares, a sum over paths of products is what the network computes,
provided that each operator adds, moves, scales or rectifies what comes along the paths and nothing else. A
minus sign belongs to an edge and is squared away: differences are sums here, and constant factors count by
their size. Constants that are added start no path. An operator without a rule below is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators by the names that torch's dispatcher has for them, without the underscore of those that write.
_aten = torch.ops.aten

# What comes along is moved, left out, repeated, averaged or added up with weights ≥ 0.
_MOVES = frozenset(
    {"alias", "as_strided", "clone", "detach", "diagonal", "expand", "permute", "select", "slice", "split"}
    | {"split_with_sizes", "squeeze", "stack", "t", "transpose", "unbind", "unsafe_split", "_unsafe_view"}
    | {"unsqueeze", "view", "_reshape_alias", "_to_copy", "copy", "cat", "unfold", "im2col", "col2im"}
    | {
        "index",
        "index_select",
        "gather",
        "masked_select",
        "masked_scatter",
        "flip",
        "roll",
        "rot90",
        "repeat",
    }
    | {"pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "where", "sum", "mean", "cumsum", "trace"}
    | {"tril", "triu", "constant_pad_nd", "masked_fill", "index_fill", "scatter", "scatter_add", "index_put"}
    | {"fill", "zero"}
    | {f"{kind}_pad{d}d" for kind in ("reflection", "replication") for d in (1, 2, 3)}
    | {"avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"}
    | {"upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"}
    | {f"upsample_nearest{d}d" for d in (1, 2, 3)}
)
# Maxima stay as they are, like means.
_MAXIMA = frozenset(
    {"max", "amax", "maximum", "max_pool2d_with_indices", "max_pool3d_with_indices"}
    | {"adaptive_max_pool2d", "adaptive_max_pool3d"}
)
# What these move or put in the place of entries, by its positions: numbers, too.
_VALUES = {
    "constant_pad_nd": (0, 2),
    "masked_fill": (0, 2),
    "index_fill": (0, 3),
    "scatter": (0, 3),
    "scatter_add": (0, 3),
    "index_put": (0, 2),
    "index_add": (0, 3),
    "where": (1, 2),
    "copy": (1,),
    "fill": (1,),
    "zero": (),
    **dict.fromkeys(("add", "sub", "rsub", "maximum"), (0, 1)),
}
_SUMS = frozenset({"add", "sub", "rsub", "index_add"})
# Summands and factors, by their positions.
_PRODUCTS: dict[str, tuple[tuple[int, ...], tuple[int, int]]] = {
    **dict.fromkeys(("mul", "mm", "bmm", "mv", "dot", "matmul"), ((), (0, 1))),
    **dict.fromkeys(("linear", "convolution"), ((2,), (0, 1))),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "addr", "addcmul"), ((0,), (1, 2))),
}
_NORMS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
# Constants in the shape of something.
_LIKE = frozenset(
    {f"{what}_like" for what in ("zeros", "ones", "empty", "full")}
    | {f"new_{what}" for what in ("zeros", "ones", "empty", "full")}
)
_COMPARISONS = frozenset({"gt", "ge", "lt", "le", "eq", "ne"})


def _rectifies(name: str, numbers: list[Any], weights: list[Tensor]) -> bool | None:
    """Whether an operator lets what is ≥ 0 pass, and the rest with a slope of at most 1; None for others."""
    if name in ("relu", "abs"):
        return True
    if name in ("clamp", "clamp_min"):
        return numbers in ([0], [0, None])
    if name == "threshold":
        return numbers == [0, 0]
    if name == "leaky_relu":
        return all(abs(slope) <= 1 for slope in numbers)
    if name == "rrelu_with_noise":
        return all(abs(slope) <= 1 for slope in numbers[:2])
    if name == "_prelu_kernel":
        return all(bool((slope.abs() <= 1).all()) for slope in weights)
    return None


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
        for value in model.parameters():
            self._mark(value, self._of_weights)
        for value in inputs:
            self._mark(value, self._of_input)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch; True would load its compiler, which takes seconds and compiles nothing here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator by the rule of paths."""
        kwargs = kwargs or {}
        writes = func._schema.is_mutable and func.overloadpacket.__name__.endswith("_")
        name = func.overloadpacket.__name__
        name = name[:-1] if writes else name
        given = [value for value in tree_leaves((args, kwargs)) if _is_real(value)]
        if not any(self._on_path(value) for value in given):
            return _constant(name, func(*args, **kwargs))
        if writes:
            self._check_canvas(args[0])
        if any(_is_complex(value) for value in tree_leaves((args, kwargs))):
            self._refuse_if(name, "of complex numbers", True)
            result = func(*args, **kwargs)
        else:
            result = self._by_rule(name, func, args, kwargs, writes)
        if name in _LIKE:
            return _constant(name, result)
        if name in _MOVES:
            self._refuse_if(name, "to integers", any(_is_whole(value) for value in tree_leaves(result)))
        known = self._of_input if any(self._from_input(value) for value in given) else self._of_weights
        for value in tree_leaves(result):
            if _is_real(value):
                self._mark(value, known)
        return result

    def check_reached(self, output: Tensor) -> None:
        """Refuse an output that no path from the input leads to: something else than torch computed it."""
        if not self.refused and not self._from_input(output):
            self.refused.add("an output that no path from the input leads to")

    def _by_rule(self, name: str, func: Any, args: Any, kwargs: Any, writes: bool) -> Any:
        if name in _PRODUCTS:
            return self._product(name, func, list(args), kwargs)
        if name == "div":
            return self._quotient(func, list(args), kwargs)
        if name in _SUMS:
            return self._sum(name, func, args, kwargs, writes)
        if name == "neg":
            self.signed = True
            return args[0] if writes else _aten.clone(args[0])
        if name in _MOVES or name in _MAXIMA:
            self._add_up(name, _values(name, args))
            if name == "where" and _memory(args[0]) in self._signs:
                two = all(self._on_path(value) and not _is_zero(value) for value in args[1:3])
                self._refuse_if(name, "of two values by a sign", two)
        elif name in _NORMS:
            # Squared norm layers have the mean 0, the variance 1 and parameters.
            self._add_up(name, [value for value in args[:4] if value is not None])
            self._refuse_if(name, "in training mode", bool(args[5]))
        elif name in _COMPARISONS:
            self._refuse_if(name, "with what is not 0", not _is_zero(args[1]))
            self._refuse_if(name, "of weights", name not in ("eq", "ne") and not self._from_input(args[0]))
            signs = func(*args, **kwargs)
            self._mark(signs, self._signs)
            return signs
        elif name not in _LIKE:
            numbers = [value for value in args if not isinstance(value, Tensor)]
            weights = [value for value in args[1:] if _is_real(value)]
            passes = _rectifies(name, numbers, weights)
            self._refuse_if(name, "", not passes)
            of_weights = passes and name != "abs" and not self._from_input(args[0])
            self._refuse_if(name, "of weights", bool(of_weights))
        if name in _MAXIMA:
            self._refuse_if(name, "of weights", not any(self._from_input(value) for value in args))
        return func(*args, **kwargs)

    def _sum(self, name: str, func: Any, args: Any, kwargs: Any, writes: bool) -> Any:
        """Differences are sums, and weights of a summand count by their size."""
        self._add_up(name, _values(name, args))
        if name == "index_add":
            return func(*args, alpha=self._sized(kwargs.get("alpha", 1)))
        self.signed = self.signed or name in ("sub", "rsub")
        alpha = self._sized(args[2] if len(args) > 2 else kwargs.get("alpha", 1))
        if name == "rsub":
            return _aten.add(_aten.mul(args[0], alpha), args[1])
        return (_aten.add_ if writes else _aten.add)(args[0], args[1], alpha=alpha)

    def _product(self, name: str, func: Any, args: list[Any], kwargs: Any) -> Any:
        summands, factors = _PRODUCTS[name]
        self._add_up(name, [args[place] for place in summands if len(args) > place and _is_real(args[place])])
        both = all(self._from_input(args[place]) for place in factors)
        self._refuse_if(name, "of two values that depend on the input", both)
        for place in factors:
            args[place] = self._sized(args[place])
        scales = {key: self._sized(kwargs[key]) for key in ("alpha", "beta", "value") if key in kwargs}
        return func(*args, **{**kwargs, **scales})

    def _quotient(self, func: Any, args: list[Any], kwargs: Any) -> Any:
        divisor = args[1]
        self._refuse_if("div", "by what is no constant", self._on_path(divisor))
        self._refuse_if("div", "with rounding", kwargs.get("rounding_mode") is not None)
        args[1] = self._sized(divisor)
        return func(*args, **kwargs)

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

    def _mark(self, value: Tensor, known: set[int]) -> None:
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


def _values(name: str, args: Any) -> list[Any]:
    """What an operator moves or adds up: of most, all that is real; the rest says where."""
    if name in ("cat", "stack"):
        return list(args[0])
    if name in _VALUES:
        return [args[place] for place in _VALUES[name] if place < len(args)]
    return [value for value in tree_leaves(args) if _is_real(value)]


def _is_zero(value: Any) -> bool:
    return not bool(value.any()) if isinstance(value, Tensor) else value == 0


def _memory(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _constant(name: str, result: Any) -> Any:
    """What lies on no path; memory that is not written yet is zero, so that it can be told from constants."""
    if "empty" in name and isinstance(result, Tensor):
        result.zero_()
    return result
