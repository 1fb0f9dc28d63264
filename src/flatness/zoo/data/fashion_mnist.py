"""Fashion-MNIST: 70,000 pieces of clothing of 28×28 grey pixels, in files named as MNIST's are."""

from __future__ import annotations

from flatness.zoo.data.idx import IDX
from flatness.zoo.data.source import Published, register

register(
    Published(
        name="fashion-mnist",
        title="Fashion-MNIST",
        home="https://github.com/zalandoresearch/fashion-mnist",
        classes=(
            "T-shirt/top",
            "Trouser",
            "Pullover",
            "Dress",
            "Coat",
            "Sandal",
            "Shirt",
            "Sneaker",
            "Bag",
            "Ankle boot",
        ),
        shape=(1, 28, 28),
        counts={"train": 60_000, "test": 10_000},
        means={"train": (0.28604060,), "test": (0.28684928,)},
        std=(0.35302424,),
        folders=("fashion-mnist", "FashionMNIST/raw", "FashionMNIST", ""),
        variants=(IDX,),
    )
)
