"""The papers' networks, ready to train and to measure: `build` makes one by name."""

from flatness.zoo.models import *  # noqa: F403
from flatness.zoo.models import __all__ as __all__
