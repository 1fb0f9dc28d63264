"""Write docs/reference from the catalogue: a page and a drift plot for every measure, and an index.

Run it after a measure was added or changed: ``make reference``.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import flatness
from flatness.show.charts import drift_chart
from flatness.show.pages.reference import reference_index, reference_page
from flatness.show.plots.charts import save_chart

REFERENCE = Path(__file__).parent / "reference"


def trained_network() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A small convolutional network on four noisy patterns, trained for a moment."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    y = torch.randint(4, (96,), generator=generator)
    patterns = torch.randn(4, 1, 8, 8, generator=generator)
    x = patterns[y] + 0.7 * torch.randn(96, 1, 8, 8, generator=generator)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 12),
        nn.ReLU(),
        nn.Linear(12, 4),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), (x, y)


def main() -> None:
    """Measure once, draw and write everything."""
    (REFERENCE / "pictures").mkdir(parents=True, exist_ok=True)
    model, data = trained_network()
    checked = flatness.check_invariance(model, data, measures="all", trials=10, progress=False)
    known = flatness.measures()
    for measure in known:
        picture = REFERENCE / "pictures" / f"{measure.name}.png"
        save_chart(picture, drift_chart(checked, measure.name, measure.name), height=2.0)
        (REFERENCE / f"{measure.name}.md").write_text(reference_page(measure), encoding="utf-8")
    (REFERENCE / "README.md").write_text(reference_index(known), encoding="utf-8")


if __name__ == "__main__":
    main()
