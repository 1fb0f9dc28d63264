"""Several processes, each with its own part of the data: what they sum, and how they fail together.

Under an initialised `torch.distributed` process group all processes measure the same model; sums over samples
are added up between them, so that every process ends with the report of all the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatness.errors import ProcessError

_separately: ContextVar[bool] = ContextVar("separately", default=False)


@contextmanager
def separately() -> Iterator[None]:
    """A context in which each process measures alone, even in an initialised process group.

    For scripts in which only one process measures, such as rank 0 between training epochs.

    Example:
        >>> import torch, flatness
        >>> model, data = torch.nn.Linear(4, 3), (torch.randn(8, 4), torch.randint(3, (8,)))
        >>> with flatness.separately():
        ...     report = flatness.measure(model, data)
    """
    token = _separately.set(True)
    try:
        yield
    finally:
        _separately.reset(token)


def _device_of_group(own: torch.device) -> torch.device:
    """Where the group adds tensors up; a group without a named backend does so where they are."""
    backend = dist.get_backend()
    if any(name in backend for name in ("gloo", "mpi")):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else own


@contextmanager
def _together() -> Iterator[None]:
    """One step of all processes; where one does not take part, the others say so in the end."""
    try:
        yield
    except RuntimeError as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ProcessError(
            f"Expected all {dist.get_world_size()} processes to measure together but one did not answer: "
            f"{reason}. It ended or never made this call. Inside flatness.separately() "
            "a process measures alone."
        ) from error


class Ranks:
    """The processes that measure together; one alone when there is no group.

    Every method is called by all processes, in the same order.

    Attributes:
        count: How many there are.
        rank: The number of this one.
    """

    def __init__(self, count: int = 1, rank: int = 0) -> None:
        self.count, self.rank = count, rank

    @classmethod
    def current(cls) -> Ranks:
        """Those of the default process group."""
        together = dist.is_available() and dist.is_initialized() and not _separately.get()
        return cls(dist.get_world_size(), dist.get_rank()) if together else cls()

    def gathered(self, value: Any) -> list[Any]:
        """What every process has, by rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        with _together():
            dist.all_gather_object(values, value)
        return values

    def first(self, value: Any) -> Any:
        """What the first process has: decisions that all must take alike."""
        return self.gathered(value)[0]

    def summed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over the processes, in float64, each where it was."""
        if self.count == 1 or not tensors:
            return list(tensors)
        device = _device_of_group(tensors[0].device)
        flat = torch.cat([tensor.detach().to(device, torch.float64).flatten() for tensor in tensors])
        with _together():
            dist.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [
            part.reshape(tensor.shape).to(tensor.device) for part, tensor in zip(parts, tensors, strict=True)
        ]

    @contextmanager
    def stage(self) -> Iterator[None]:
        """Work that each process does for itself; if it fails in one, it fails in all, and none waits.

        Raises:
            ProcessError: In processes whose own part went well.
        """
        try:
            yield
        except Exception as error:
            self.gathered((type(error).__name__, str(error)))
            raise
        for rank, failure in enumerate(self.gathered(None)):
            if failure is not None:
                kind, message = failure
                raise ProcessError(
                    f"Expected every process to measure its part but process {rank} raised {kind}: {message}",
                    kind,
                )

    def check_same(self, facts: dict[str, Any]) -> None:
        """Refuse processes that do not measure the same thing."""
        everyone = self.gathered(facts)
        for rank, others in enumerate(everyone):
            for name, value in everyone[0].items():
                if others.get(name) != value:
                    raise ProcessError(
                        f"Expected the same {name} in every process but got {value} in process 0 and "
                        f"{others.get(name)} in process {rank}. Give all processes the same "
                        "model and arguments, and each process its own part of the data."
                    )
