"""Per-sample losses and the factors of their output Hessians.

The empirical risk is E = Σ_i ℓ_i / C. A `Loss` lays a batch out as independent predictions (`Items`), gives
the numerators ℓ_i (`values`), the batch's share of C (`normaliser`), and vectors s_r with signed weights c_r
such that, for every prediction, Σ_r c_r s_r s_rᵀ = ∂²ℓ/∂f² (`factors`). Nothing here knows what network made
the outputs.

One file an idea: `base` the interface · `layout` shapes and targets · `softmax` cross-entropy · `normalized`
its normalized version · `elementwise` squared errors and binary cross-entropy · `custom` any other function ·
`resolve` from what a user writes to a `Loss`.
"""

from flatness.losses.base import Items, Loss, counted
from flatness.losses.custom import CustomLoss
from flatness.losses.elementwise import BinaryCrossEntropy, MeanSquaredError, SquaredError
from flatness.losses.normalized import NormalizedCrossEntropy
from flatness.losses.resolve import LOSS_NAMES, resolve_loss
from flatness.losses.softmax import CrossEntropy, NegativeLogLikelihood

__all__ = [
    "LOSS_NAMES",
    "BinaryCrossEntropy",
    "CrossEntropy",
    "CustomLoss",
    "Items",
    "Loss",
    "MeanSquaredError",
    "NegativeLogLikelihood",
    "NormalizedCrossEntropy",
    "SquaredError",
    "counted",
    "resolve_loss",
]
