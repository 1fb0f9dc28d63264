"""Draws the picture of docs/concepts/metrics.md: ``make pictures``, or this file alone (a minute).

A small transformer trained on scikit-learn's digits, and an equal one whose heads of attention are mixed: the
largest eigenvalues of D^½ H D^½ in four metrics.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flatness
from flatness.data import load
from flatness.show.plots.themes import COLOURS, add_legend, colour_on, picture, tidy

PICTURE = Path(__file__).parent / "concepts" / "pictures" / "metrics"
TITLES = {
    "euclidean": r"$D = 1$",
    "layerwise": r"$D = \Vert W \Vert^2$",
    "relative": r"$D = W W^T \otimes 1$",
    "whitened": r"$D = W C W^T \otimes C^+$",
}
SHOWN = 40


class Transformer(nn.Module):
    """Rows of an image as a sequence: one layer of attention with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(8, 12), nn.Parameter(0.1 * torch.randn(8, 12))
        self.attention, self.head = nn.MultiheadAttention(12, 2, batch_first=True), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, 64) to logits (n, 10)."""
        h = self.embed(x.reshape(-1, 8, 8)) + self.places
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(F.relu(h).mean(1))


def trained(x: Tensor, y: Tensor) -> nn.Module:
    """The network after some epochs."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(60):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.double().eval()


def largest(model: nn.Module, data: tuple[Tensor, Tensor], metric: str) -> list[float]:
    """The largest eigenvalues over the weights, each once, from one long run of Lanczos."""
    density = flatness.landscape.density(
        model, data, metric=metric, parameters="weights", runs=1, steps=4 * SHOWN, progress=False
    )
    nodes = density.spectra["network"].nodes[0]
    return sorted(nodes.tolist(), reverse=True)[:SHOWN]


def draw(path: Path, curves: dict[str, dict[str, list[float]]], *, dark: bool) -> None:
    """A panel for each metric, a line for each network."""
    with picture(path, 8.4, 2.6, dark=dark) as (figure, theme):
        panels = figure.subplots(1, len(curves))
        for axes, (metric, networks) in zip(panels, curves.items(), strict=True):
            looks = (("-", "o", 5.0), ("--", "", 0.0))
            for (name, values), colour, (line, mark, size) in zip(
                networks.items(), COLOURS, looks, strict=False
            ):
                axes.plot(
                    range(1, len(values) + 1),
                    values,
                    line,
                    color=colour_on(theme, colour),
                    marker=mark,
                    markersize=size,
                    fillstyle="none",
                    linewidth=1.2,
                    label=name,
                )
            axes.set_yscale("log")
            axes.set_xscale("log")
            axes.set_title(TITLES[metric])
            axes.set_xlabel("eigenvalue, the largest first")
            tidy(axes, theme)
        add_legend(figure, panels[0])


def main() -> None:
    """Train, mix the heads, and draw."""
    x, y = load("digits", standardize=True).pair
    x, y = x[:600].flatten(1).float(), y[:600]
    model = trained(x, y)
    x = x.double()
    mixed = flatness.rescale(model, x[:8], kind="attention", seed=1)
    curves = {
        metric: {
            name: largest(network, (x, y), metric)
            for name, network in (("as trained", model), ("heads mixed", mixed))
        }
        for metric in TITLES
    }
    PICTURE.parent.mkdir(exist_ok=True)
    for dark in (False, True):
        draw(PICTURE.with_name(f"{PICTURE.name}{'-dark' if dark else ''}.png"), curves, dark=dark)


if __name__ == "__main__":
    main()
