"""``flatness symmetries``: what may be rewritten in a network without changing what it computes."""

from __future__ import annotations

import typer

from flatness.cli import options as o

_EXAMPLE = 8


def symmetries(*, given: o.Network, compute: o.Compute) -> None:
    """List channels that may be rescaled and heads of attention that may be mixed, and why the rest may not.

    One forward pass on the first samples of the data shows it.

    Example:
        flatness symmetries net.pt --model mynets:build --data digits
    """
    import flatness
    from flatness.cli import sources

    network = sources.only_network(given, compute.seed, "List them one by one.")
    problem = flatness.Problem(
        network, sources.data_of(given).batches, **sources.arguments_of(given, compute)
    )
    with problem.guarded():
        example = problem.example(_EXAMPLE)
    found = flatness.symmetries(
        problem.model, example, forward=lambda model, batch: problem.forward(model, batch)[0]
    )
    typer.echo(str(found))
