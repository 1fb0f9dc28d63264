"""How many examples a property tries: few and always the same, or as many as asked for.

``FLATNESS_PROPERTY_EXAMPLES=20000`` tries so many new examples of every property,
``FLATNESS_PROPERTY_MINUTES=60`` ends each after so long, and ``FLATNESS_PROPERTY_SEED`` chooses which. What
was tried is printed at the end.
"""

import atexit
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FLATNESS_PROPERTY_EXAMPLES", "0"))
MINUTES = float(os.environ.get("FLATNESS_PROPERTY_MINUTES", "inf"))
SEED = int(os.environ.get("FLATNESS_PROPERTY_SEED", "0"))
LONG = EXAMPLES > 0 or float("inf") > MINUTES

tried: Counter[str] = Counter()


def count(what: str) -> None:
    """Count something that was tried."""
    tried[what] += 1


def for_examples(
    what: str, number: int, make: Callable[[random.Random], Any], hold: Callable[[Any], Any]
) -> None:
    """Hold a property for examples: `number` of hypothesis's, always the same, or those of a long run.

    Each example is drawn anew from a seed: left to draw every choice, hypothesis varies the few that it had.
    The one that fails is shown as it is; its steps are few.
    """
    if LONG:
        for draw in _generators():
            count(what)
            example = make(draw)
            try:
                hold(example)
            except Exception as error:
                error.add_note(f"Failing example: {example}")
                raise
        return

    @settings(
        max_examples=number,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=True).map(make))
    def held(example: Any) -> None:
        count(what)
        hold(example)

    held()


def _generators() -> Iterator[random.Random]:
    begun = time.monotonic()
    for index in range(EXAMPLES or 10**9):
        if time.monotonic() - begun > 60 * MINUTES:
            return
        yield random.Random(10**9 * SEED + index)


@atexit.register
def _print() -> None:
    if LONG:
        for what, number in sorted(tried.items()):
            print(f"{what}: {number}")
