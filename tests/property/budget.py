"""How many examples a property tries: few and always the same, or as many as asked for.

``FLATNESS_PROPERTY_EXAMPLES=20000`` tries so many new examples of every property,
``FLATNESS_PROPERTY_MINUTES=60`` ends each after so long, and ``FLATNESS_PROPERTY_SEED`` chooses which. What
was tried is printed at the end.
"""

import atexit
import os
import time
from collections import Counter

from hypothesis import HealthCheck, Phase, seed, settings

EXAMPLES = int(os.environ.get("FLATNESS_PROPERTY_EXAMPLES", "0"))
MINUTES = float(os.environ.get("FLATNESS_PROPERTY_MINUTES", "inf"))
SEED = int(os.environ.get("FLATNESS_PROPERTY_SEED", "0"))
LONG = EXAMPLES > 0 or float("inf") > MINUTES

tried: Counter[str] = Counter()
_started: dict[str, float] = {}


def examples(count: int):
    """Decorate a property: `count` fixed examples, or those of a long run."""

    def decorate(test):
        chosen = settings(
            max_examples=(EXAMPLES or 10**6) if LONG else count,
            derandomize=not LONG,
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        test = chosen(test)
        return seed(SEED)(test) if LONG else test

    return decorate


def count(what: str) -> bool:
    """Count an example; whether there is still time for it."""
    begun = _started.setdefault(what, time.monotonic())
    if time.monotonic() - begun > 60 * MINUTES:
        return False
    tried[what] += 1
    return True


@atexit.register
def _print() -> None:
    if LONG:
        for what, number in sorted(tried.items()):
            print(f"{what}: {number}")
