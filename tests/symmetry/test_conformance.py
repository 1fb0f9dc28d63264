"""Every measure keeps its word: what it declares invariant does not move, and what it does not declare does.

Every measure of the catalogue goes through every network and every kind of rewriting; a new measure is tested
as soon as it is registered. Judged row by row, units included.
"""

import math
import sys
from functools import cache
from types import ModuleType

import pytest
import torch

import flatness
from flatness.errors import ModelError, OptionError
from flatness.symmetry.flow.groups import symmetries
from flatness.symmetry.rewriting import kinds
from flatness.symmetry.rewriting.base import ChannelScaling, Draw
from flatness.symmetry.rewriting.kinds import KINDS, invariances, kind_named
from flatness.symmetry.rewriting.kinds.neuronwise import Neuronwise
from flatness.symmetry.rewriting.rescaling import make_rescaling
from networks import CASES
from rewritings import changed_copy

NETWORKS = (
    "mlp",
    "mlp_no_bias",
    "cnn_max_pool",
    "cnn_grouped",
    "residual_batch_norm",
    "two_heads",
    "dense_concat",
)
UNCHANGED = 1e-8
# Batch norm's eps (1e-5) goes into its scale channel by channel, which changes the scale's norm by that much:
# measures in which that norm counts see it.
BY_EPS = 1e-5
COUNTS_NORM_SCALES = {"riemannian_spectral_norm"}
MOVED = 0.01
OWN = "neuronwise except own features"
CHAINS = "layerwise in chains"
CHAIN_NETWORKS = {"mlp", "mlp_no_bias", "cnn_max_pool", "cnn_grouped"}
BRANCHED_NETWORKS = {"residual_batch_norm", "two_heads"}
# Noise is drawn entry by entry and does not change places with the units: a sampled value is the same up to
# its standard error.
STANDARD_ERRORS = 5
# Scales rounded to float32, and a descent that amplifies rounding.
ROUNDED = {"pac_bayes_bound": 1e-6, "normalized_sharpness_direct": 1e-5}
# An optimizer belongs to the parameters of one network, not to those of a rewritten copy.
NEEDS_OPTIMIZER = {"preconditioned_sharpness"}
FEW_DRAWS = {
    "soft_rank": {"ridge": 0.1, "runs": 8, "steps": 30},
    "pac_bayes_bound": {"draws": 5},
    "normalized_sharpness_direct": {"draws": 1, "evaluations": 3},
}


def rows_of(report, attribute="value"):
    """Values by measure, layer, reduction and level; units as a list."""
    found = {}
    for row in report.results:
        key = (row.measure, row.layer, row.reduction, row.level)
        found.setdefault(key, []).append(getattr(row, attribute))
    return {key: torch.tensor(values, dtype=torch.float64) for key, values in found.items()}


def reported(model, case, **arguments):
    chosen = arguments or {"measures": "all", "options": FEW_DRAWS}
    return flatness.measure(model, (case.x, case.y), progress=False, **chosen)


def measured(model, case, **arguments):
    return rows_of(reported(model, case, **arguments))


@cache
def original(name):
    case = CASES[name]
    model = case.build()
    return case, model, symmetries(model, case.x), measured(model, case)


def drift(before, after):
    """Largest change in units of the largest value of the row."""
    return float((after - before).abs().max() / before.abs().max())


def rewritten(name, kind, seed, **arguments):
    """The rewritten network of a case, and which of its layers have other weights than before."""
    case, model, found, _ = original(name)
    rescaling = make_rescaling(found, kind, Draw(seed=seed, **arguments))
    changed = changed_copy(model, case.x, rescaling)
    touched = {
        layer: not torch.equal(
            model.get_parameter(f"{layer}.weight"), changed.get_parameter(f"{layer}.weight")
        )
        for layer in case.layers
    }
    return changed, touched


def factors_cancel(name, changed):
    """Whether the factors of a layer-wise rewriting multiply to 1 over the layers.

    Products over layers keep their value then, and only then. In a chain each factor belongs to one layer's
    output and to the next one's input, and cancels. Where branches meet, several layers share an output, and
    a norm layer takes up a factor that no layer gives back.
    """
    case, model, _, _ = original(name)
    factors = [
        float(
            changed.get_parameter(f"{layer}.weight").detach().norm()
            / model.get_parameter(f"{layer}.weight").detach().norm()
        )
        for layer in case.layers
    ]
    return abs(math.prod(factors) - 1) < 1e-9


def assert_rows(name, kind, changed, touched):
    case, _, found, before = original(name)
    after = measured(changed, case)
    assert after.keys() == before.keys()
    for key, values in before.items():
        measure, layer, _, _ = key
        invariances = flatness.measures(measure).invariances
        declared = kind in invariances
        if kind == "neuronwise" and OWN in invariances and layer is not None:
            declared = not found.features_of(layer)
        if kind == "layerwise" and CHAINS in invariances:
            declared = factors_cancel(name, changed)
        if f"{kind} without attention" in invariances:
            declared = True  # none of these networks has any
        change = drift(values, after[key])
        if declared:
            by_eps = measure in COUNTS_NORM_SCALES and "batch_norm" in name
            assert change < (BY_EPS if by_eps else ROUNDED.get(measure, UNCHANGED)), (key, change)
        elif layer is None or touched[layer]:
            assert change > MOVED, (key, change)
        else:
            assert change < UNCHANGED, (key, change)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", ["layerwise", "neuronwise"])
def test_measures_move_exactly_when_they_do_not_declare_an_invariance(name, kind):
    changed, touched = rewritten(name, kind, seed=3)
    assert any(touched.values())
    assert_rows(name, kind, changed, touched)


@pytest.mark.parametrize("name", NETWORKS)
def test_freezing_the_own_features_leaves_relative_flatness_as_it_is(name):
    case, _, found, before = original(name)
    excepting = [measure.name for measure in flatness.measures() if OWN in measure.invariances]
    assert {"relative_flatness", "maximal_relative_flatness"} <= set(excepting)
    for layer in case.layers:
        own = found.features_of(layer)
        if not own or len(own) == found.classes:
            continue
        changed, touched = rewritten(name, "neuronwise", seed=4, frozen=own)
        assert touched[layer] == bool(found.units_of(layer) - own)
        after = measured(changed, case, measures=excepting, layers=layer)
        for measure in excepting:
            key = (measure, layer, None, "layer")
            assert drift(before[key], after[key]) < UNCHANGED, (measure, layer)


@pytest.mark.parametrize("name", NETWORKS)
def test_rescaling_only_the_own_features_moves_relative_flatness_but_not_the_normalized_one(name):
    case, _, found, before = original(name)
    chosen = ["relative_flatness", "relative_flatness_normalized"]
    for layer in case.layers:
        own = found.features_of(layer)
        if not own:
            continue
        others = set(range(found.classes)) - own
        changed, touched = rewritten(name, "neuronwise", seed=5, frozen=others)
        assert touched[layer]
        after = measured(changed, case, measures=chosen, layers=layer)
        plain, normalized = ((measure, layer, None, "layer") for measure in chosen)
        assert drift(before[plain], after[plain]) > MOVED, layer
        assert drift(before[normalized], after[normalized]) < UNCHANGED, layer


@pytest.mark.parametrize("name", NETWORKS)
def test_permutation_changes_nothing_but_the_order_of_units(name):
    case, _, _, before = original(name)
    changed, touched = rewritten(name, "permutation", seed=6)
    assert any(touched.values())
    report = reported(changed, case)
    after, errors = rows_of(report), rows_of(report, "stderr")
    for key, values in before.items():
        noise = STANDARD_ERRORS * float(errors[key].max() / after[key].abs().max())
        assert drift(values.sort().values, after[key].sort().values) < UNCHANGED + noise, key


def test_factors_cancel_in_chains_and_not_where_branches_meet():
    for networks, expected in ((CHAIN_NETWORKS, True), (BRANCHED_NETWORKS, False)):
        for name in networks:
            changed, _ = rewritten(name, "layerwise", seed=3)
            assert factors_cancel(name, changed) == expected, name


@pytest.mark.parametrize("name", ["mlp", "cnn_grouped", "two_heads"])
def test_scaled_and_shifted_logits_move_what_does_not_declare_it(name):
    case, _, _, before = original(name)
    changed, _ = rewritten(name, "output", seed=7)
    after = measured(changed, case)
    moved = {key[0] for key, values in before.items() if drift(values, after[key]) > MOVED}
    for key, values in before.items():
        if "output" in flatness.measures(key[0]).invariances:
            assert drift(values, after[key]) < ROUNDED.get(key[0], UNCHANGED), key
            assert key[0] not in moved
    silent = {measure.name for measure in flatness.measures() if "output" not in measure.invariances}
    assert silent - NEEDS_OPTIMIZER <= moved


def test_a_kind_is_called_like_its_file_and_measures_declare_only_what_kinds_know():
    assert [kind_named(kind).kind for kind in KINDS] == list(KINDS)
    known = [word.name for word in invariances()]
    assert len(set(known)) == len(known)
    assert {word for measure in flatness.measures() for word in measure.invariances} <= set(known)


def test_a_kind_that_is_not_complete_says_what_is_missing(monkeypatch):
    module = ModuleType(f"{kinds.__name__}.one_half")
    monkeypatch.setattr(kinds, "KINDS", ("one_half",))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(OptionError, match=r"Expected a class OneHalf in \S+one_half but there is none"):
        kind_named("one_half")
    module.OneHalf = type("OneHalf", (ChannelScaling,), {"kind": "one_half"})
    with pytest.raises(OptionError, match=r"lacks choices, ties\. Define them"):
        kind_named("one_half")
    module.OneHalf = type("OneHalf", (Neuronwise,), {})
    with pytest.raises(
        OptionError, match="to have kind = 'one_half', the name of its file, but got 'neuronwise'"
    ):
        kind_named("one_half")


@pytest.mark.parametrize("kind", KINDS)
def test_every_registered_kind_leaves_what_measures_declare(kind):
    case = CASES["attention" if kind == "attention" else "residual_batch_norm"]
    data = (case.x, case.y)
    try:
        report = flatness.check_invariance(case.build(), data, kinds=kind, trials=1, progress=False)
    except ModelError as error:
        pytest.skip(f"nothing to rewrite: {error}")
    assert report.ok, report.summary()
