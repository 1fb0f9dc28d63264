"""MNIST: 70,000 handwritten digits of 28×28 grey pixels."""

from __future__ import annotations

from flatness.zoo.data.idx import IDX
from flatness.zoo.data.source import Published, register

register(
    Published(
        name="mnist",
        title="MNIST",
        home="http://yann.lecun.com/exdb/mnist/",
        classes=tuple("0123456789"),
        shape=(1, 28, 28),
        counts={"train": 60_000, "test": 10_000},
        means={"train": (0.13066048,), "test": (0.13251461,)},
        std=(0.30810780,),
        folders=("mnist", "MNIST/raw", "MNIST", ""),
        variants=(IDX,),
    )
)
