"""Which quantities the bars of a study show."""

import numpy as np
import pandas as pd

from flatness.show.plots.study import shown_bars


def table(n):
    """Quantities q0, q1, … from the largest τ to the smallest."""
    return pd.DataFrame({"quantity": [f"q{i}" for i in range(n)], "kendall": np.linspace(0.9, -0.95, n)})


def names(found):
    return [int(name.removeprefix("q")) for name in found["quantity"]]


def test_the_strongest_of_both_signs_and_the_headline_are_drawn_in_order():
    found = names(shown_bars(table(60), ["q30", "q31"]))
    assert len(found) == 24
    assert found == sorted(found)
    # τ falls by 0.0314 a row from 0.9 to −0.95: 22 places beside the headline, 10 positive and 12 negative.
    assert found == [*range(10), 30, 31, *range(48, 60)]


def test_a_headline_of_three_is_drawn_alone_and_a_small_table_as_a_whole():
    assert names(shown_bars(table(60), ["q5", "q40", "q59"])) == [5, 40, 59]
    assert names(shown_bars(table(20), ["q5"])) == list(range(20))
