"""Bring docs/gallery up to date from the records that are kept in docs/gallery/records.

Prose in the gallery is written by hand; figures and numbers are made here: ``make gallery``, no GPU needed.
Between ``<!-- made: KIND STUDY -->`` and ``<!-- /made -->`` a page gets a table of that kind, see `KINDS`;
the claims of the index are in claims.toml. Records of a new run come from
``flatness study pack FOLDER docs/gallery/records/NAME.json.xz``.
"""

from __future__ import annotations

import functools
import math
import re
import shutil
import statistics
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from beyond_picture import Dot, Row, save_beyond

import flatness
from flatness.show.plots.charts import save_intervals
from flatness.show.plots.landscape import save_line
from flatness.show.plots.scatter import Scatter, save_scatter
from flatness.show.plots.study import write_figures
from flatness.study import Study
from flatness.study.analysis.correlations import settings_of
from flatness.study.analysis.experiment import ExperimentStudy, belongs, cell
from flatness.study.analysis.granulated import Pairs
from flatness.study.analysis.lines import lines_together
from flatness.study.correlate import Correlation, correlation
from flatness.study.table import in_words
from flatness.study.within import partial

GALLERY = Path(__file__).parent / "gallery"
RECORDS = GALLERY / "records"
OPENING = "petzka2019-mnist"
"""The study whose table of all measures opens the gallery."""

AGAIN = "-again"
"""Ends the name of the records of a study's second run."""

BLOCK = re.compile(r"(<!-- made: (\w+)(?: ([\w/-]+))? -->\n)(.*?)(<!-- /made -->)", re.DOTALL)
"""A part of a page that is made: its kind, its study, its text."""


@functools.cache
def loaded(name: str) -> Study | ExperimentStudy:
    """A study or experiment of the gallery."""
    return flatness.study.load(RECORDS / f"{name}.json.xz")


def study(name: str) -> Study:
    """A study of networks, by its name or that of one of its parts: STUDY/PART."""
    found = loaded(name.partition("/")[0])
    assert isinstance(found, Study), f"{name} is no study of networks"
    return found


def number(value: float, digits: int = 2) -> str:
    """With a sign that is one: −0.31; a dash for nothing."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}".replace("-", "−")


def between(row: dict[str, Any], kind: str) -> str:
    """A coefficient with its 95 % interval."""
    return f"{number(row[kind])} ({number(row[f'{kind}_low'])} to {number(row[f'{kind}_high'])})"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def counts(name: str) -> str:
    """How many networks there are, how they ended, and which are in the analysis."""
    found = study(name)
    ends = ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in sorted(found.counts().items()))
    reasons = Counter(reason.partition(": ")[0] for reason in found.left_out().values())
    left = "; ".join(f"{n} {reason}" for reason, n in reasons.items())
    kept = f"In the analysis: **n = {len(found.kept())}**; left out: {left or 'none'}."
    return f"{len(found.networks)} networks: {ends}. {kept}\n"


def part_of(name: str) -> str:
    """The part that a name asks for."""
    return name.partition("/")[2]


def networks(name: str) -> Any:
    """The networks in the analysis of a study, or of the part that its name asks for."""
    return study(name).kept(part_of(name) or None)


@functools.cache
def correlations(name: str, part: str = "", target: str = "gap") -> list[dict[str, Any]]:
    """The rows of the study's table of correlations."""
    return study(name).correlations(part or part_of(name), target).to_dict("records")


def baselines(name: str, part: str = "") -> list[dict[str, Any]]:
    """The rows of the study's table of what is known without a measure."""
    return study(name).baselines(part or part_of(name)).to_dict("records")


def coefficients(name: str, part: str, rows: list[dict[str, Any]]) -> str:
    """Rows of the table of correlations, what matters about them, and the baselines."""
    rescaled = any("kendall_rescaled" in row for row in rows)
    minima = converged(name, part)
    head = ["quantity", "Kendall τ (95 %)", "Pearson r (95 %)", "Ψ", "τ between seeds", "p, best of all"]
    head += ["τ after rescaling"] if rescaled else []
    head += [f"τ, the {len(minima)} that converged"] if minima is not None else []
    known = baselines(name, part)
    lines = []
    for row in [*rows, *known]:
        measured = "p_family" in row
        cells = [row["name"] if measured else f"*{in_words(row['quantity'])}*"]
        cells += [between(row, "kendall"), between(row, "pearson"), number(row.get("granulated", math.nan))]
        told = measured or row["quantity"] == "train_loss"  # a hyperparameter is the same for all seeds
        cells.append(number(row.get("psi_seed", math.nan) if told else math.nan))
        cells.append(chance(row["p_family"]) if measured else "–")
        cells += [number(row.get("kendall_rescaled", math.nan))] if rescaled else []
        cells += [among(minima, row["quantity"])] if minima is not None else []
        lines.append(cells)
    return table(head, lines)


def chance(p: float) -> str:
    """A probability."""
    return "< 0.001" if p < 0.001 else number(p, 3)


def converged(name: str, part: str) -> Any:
    """Those networks of the analysis that reached their target, where others did not; else None."""
    kept: Any = study(name).kept(part or part_of(name))
    reached = kept[kept["status"] == "converged"]
    return reached if 10 <= len(reached) < len(kept) else None


def among(networks: Any, quantity: str) -> str:
    """Kendall's τ of a quantity with the gap over some networks."""
    found = tau(networks, quantity)
    return between({"kendall": found.value, "kendall_low": found.low, "kendall_high": found.high}, "kendall")


def tau(networks: Any, quantity: str) -> Correlation:
    """The same with its interval; of hyperparameters that vary together the first stands for all."""
    column = quantity if quantity in networks else quantity.split("+")[0]
    values, gaps = networks[column].to_numpy(float), networks["gap"].to_numpy(float)
    names = networks["network"].str.replace(r",? ?seed \d+$", "", regex=True)
    return correlation(values, gaps, "kendall", settings=names.factorize()[0])


def headline(name: str) -> str:
    """The quantities that the study is about."""
    found = study(name)
    parts = []
    for part in [part_of(name)] if part_of(name) else found.spec.parts:
        wanted = found.headline()
        rows = [row for row in correlations(name, part) if row["quantity"] in wanted]
        parts.append(
            (f"**{part}**\n\n" if part and not part_of(name) else "") + coefficients(name, part, rows)
        )
    return "\n".join(parts)


def settings(name: str) -> str:
    """What the networks of each setting have, over their seeds: mean ± standard deviation."""
    found = study(name)
    axis, quantities = found.colour(next(iter(found.spec.parts))), found.headline()
    fitted = "train_accuracy" if axis == "random_labels" else "train_loss"
    outcomes = {"train_accuracy": "training accuracy", "train_loss": "training loss"}
    head = [axis.replace("_", " "), "n", outcomes[fitted], "test accuracy", *map(in_words, quantities)]
    kept = networks(name)
    parted = ["part"] * ("part" in kept)
    lines = []
    for keys, rows in kept.groupby([*parted, axis], sort=False):
        told = [spread(rows[key].tolist()) for key in (fitted, "test_accuracy", *quantities)]
        lines.append([*map(str, keys), str(len(rows)), *told])
    return table([*parted, *head], lines)


def trained(name: str) -> str:
    """How far networks were trained, by part and batch size: least and largest loss of the last epoch."""
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for record in study(name).records.values():
        key = record["part"], record["configuration"]["axes"]["batch_size"]
        groups.setdefault(key, []).append(record["training"])
    lines = []
    for (part, size), own in groups.items():
        last = sorted(one["losses"][-1] for one in own)
        right = min(one["accuracies"][-1] for one in own)
        ends = f"{last[0]:.2g} to {last[-1]:.2g}"
        lines.append([part, str(size), str(len(own)), str(own[0]["epochs"]), ends, f"{right:.4g}"])
    head = [
        "part",
        "batch size",
        "n",
        "epochs",
        "training loss of the last epoch",
        "training accuracy, at least",
    ]
    return table(head, lines)


def stored(name: str) -> str:
    """Spectral norms beside what the published code stores of them: over 2 + 2 · loss, also times 10⁻⁶."""
    lines = []
    for (part, size), rows in networks(name).groupby(["part", "batch_size"], sort=False):
        norms, losses = (rows[key] for key in ("riemannian_spectral_norm:network", "train_loss"))
        kept = norms / (2 + 2 * losses) * (1e-6 if part.startswith("mnist-fc") else 1.0)
        told = [spread(list(values)) for values in (losses, rows["test_accuracy"], norms, kept)]
        lines.append([part, str(size), str(len(rows)), *told])
    head = [
        "part",
        "batch size",
        "n",
        "training loss",
        "test accuracy",
        "spectral norm",
        "as the code stores it",
    ]
    return table(head, lines)


def spread(values: list[float | None]) -> str:
    """Mean ± standard deviation, in plain numbers where they are not too small."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return "–"
    mean, deviation = statistics.mean(known), statistics.stdev(known) if len(known) > 1 else None
    told = [f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"]
    if deviation is not None:
        told.append(f"{deviation:,.0f}" if deviation >= 1 else f"{deviation:.1g}")
    return " ± ".join(told)


def one_row_per_measure(name: str) -> list[dict[str, Any]]:
    """Every measure once: the network's value, the sum over layers where there is none of its own."""
    chosen: dict[str, dict[str, Any]] = {}
    for row in correlations(name):
        if isinstance(row["layer"], str):
            continue
        before = chosen.get(row["measure"])
        if before is None or (before["reduction"] not in (None, "sum") and row["reduction"] in (None, "sum")):
            chosen[row["measure"]] = row
    return sorted(chosen.values(), key=lambda row: -row["kendall"])


def catalogue(name: str) -> str:
    """Every measure on the same networks."""
    return coefficients(name, "", one_row_per_measure(name))


def brief(name: str) -> str:
    """Every measure on the same networks in few columns, the baselines, and what chance gives."""
    minima = converged(name, "")
    head = ["measure", "τ with the gap (95 %)", "within a hyperparameter, Ψ"]
    head += [f"τ, the {len(minima)} that converged"] if minima is not None else []
    lines = []
    for row in [*one_row_per_measure(name), *baselines(name)]:
        cells = [f"`{row['measure']}`" if "measure" in row else f"*{in_words(row['quantity'])}*"]
        cells += [between(row, "kendall"), number(row["granulated"])]
        lines.append(cells + ([among(minima, row["quantity"])] if minima is not None else []))
    rows = correlations(name)
    one, largest = statistics.median(row["null_95"] for row in rows), rows[0]["null_95_family"]
    return (
        f"{table(head, lines)}\n"
        "The last two rows are baselines. If gaps are randomly permuted, |τ| of one measure stays below "
        f"{number(one)} in 95 % of the cases, and the largest of all {len(rows)} quantities, layers among "
        f"them, below {number(largest)}.\n"
    )


def summary(name: str) -> str:
    """What an experiment found."""
    found = loaded(name)
    assert isinstance(found, ExperimentStudy), f"{name} is no experiment"
    rows = found.summary
    columns = [name for name in rows[0] if not belongs(name, rows[0])]
    lines = [[cell(row, name) for name in columns] for row in rows]
    return table([name.replace("_", " ") for name in columns], lines)


def again(name: str) -> str:
    """A second run of a study beside the first: what a figure is worth that one run gave."""
    second = {row["quantity"]: row for row in correlations(f"{name}{AGAIN}")}
    both = [(row, second[row["quantity"]]) for row in correlations(name) if row["quantity"] in second]
    apart = [abs(one["kendall"] - other["kendall"]) for one, other in both]
    inside = sum(one["kendall_low"] <= other["kendall"] <= one["kendall_high"] for one, other in both)
    wanted = study(name).headline()
    lines = [
        [one["name"], between(one, "kendall"), between(other, "kendall")]
        for one, other in both
        if one["quantity"] in wanted
    ]
    return (
        f"{counts(f'{name}{AGAIN}')}{cost(f'{name}{AGAIN}')}\n"
        f"{table(['quantity', 'τ, first run (95 %)', 'τ, second run (95 %)'], lines)}\n"
        f"Of all {len(both)} quantities, layers and reductions among them, {inside} have a second τ within "
        f"the interval of the first; τ differs by {number(statistics.mean(apart))} in the mean and "
        f"{number(max(apart))} at most.\n"
    )


def beyond(name: str) -> str:
    """What measures say beyond setting and training loss, and beyond epochs, in both runs."""
    runs = [name] + [f"{name}{AGAIN}"] * (RECORDS / f"{name}{AGAIN}.json.xz").is_file()
    tables = [{row["quantity"]: row for row in correlations(run)} for run in runs]
    wanted = [row["quantity"] for row in correlations(name) if row["quantity"] in study(name).headline()]
    wanted.sort(key=lambda quantity: -tables[0][quantity]["partial_pearson"])
    length = [beyond_epochs(run, wanted) for run in runs]
    ends = ["", ", second run"][: len(runs)]
    head = ["quantity", "τ", "τ expected by setting (95 %)"]
    head += [text for end in ends for text in (f"r given setting and loss{end} (95 %)", "p, best of all")]
    head += [f"r given epochs too{end}" for end in ends]
    lines = []
    for quantity in wanted:
        rows = [found[quantity] for found in tables]
        expected = {"within": rows[0]["within_expected"]}
        expected |= {f"within_{end}": rows[0][f"within_{end}"] for end in ("low", "high")}
        cells = [rows[0]["name"], number(rows[0]["kendall"]), between(expected, "within")]
        for row in rows:
            cells += [between(row, "partial_pearson"), chance(row["partial_pearson_p_family"])]
        lines.append(cells + [number(found[quantity]) for found in length])
    last = [between(found["epochs"], "partial_pearson") for found in length]
    lines.append(["*epochs*", "", "", *(text for one in last for text in (one, "–")), *["–"] * len(runs)])
    heights = [next(iter(rows.values()))["partial_pearson_null_95_family"] for rows in tables]
    known = " and ".join(number(height) for height in heights)
    return (
        f"{table(head, lines)}\n"
        f"If gaps are permuted within settings, the largest |r| of all {len(tables[0])} quantities stays "
        f"below {known} in 95 % of the cases{' (first and second run)' if len(runs) > 1 else ''}.\n"
    )


def beyond_epochs(name: str, wanted: list[str]) -> dict[str, Any]:
    """Partial correlations given setting, training loss and epochs; of the epochs, given the first two."""
    kept = networks(name)
    settings = settings_of(kept, study(name).axes())
    gap, loss, epochs = (kept[key].to_numpy(float) for key in ("gap", "train_loss", "epochs"))
    known = np.log([loss, epochs])
    found = partial(kept[wanted].to_numpy(float).T, gap, settings, known, resamples=0, permutations=0)
    told = _partial_row(epochs, gap, settings, known[:1])
    return dict(zip(wanted, found["pearson"], strict=True)) | {"epochs": told}


def _partial_row(values: Any, gap: Any, settings: Any, known: Any) -> dict[str, float]:
    """The partial correlation of one quantity, as rows of the tables have it."""
    found = partial(values[None], gap, settings, known, permutations=0)
    return {f"partial_{name}": float(found[name][0]) for name in ("pearson", "pearson_low", "pearson_high")}


def by_target(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Rows of the tables of correlations by quantity, for the gap and for the study's other targets."""
    wanted = ["gap", *study(name).targets()]
    return {key: {row["quantity"]: row for row in correlations(name, target=key)} for key in wanted}


def targets(name: str) -> str:
    """What is left of measures given setting and training loss, for the gap and the study's other targets."""
    tables = by_target(name)
    own = [quantity for quantity in study(name).headline() if quantity in tables["gap"]]
    own.sort(key=lambda quantity: -tables["gap"][quantity]["partial_pearson"])
    lines = []
    for quantity in own:
        rows = [found[quantity] for found in tables.values()]
        told = [(between(row, "partial_pearson"), row["partial_pearson_p_family"]) for row in rows]
        cells = [rows[0]["name"], number(rows[0]["kendall"])]
        lines.append(cells + [f"**{text}**" if p < 0.05 else text for text, p in told])
    lines.append(["*epochs*", "", *(between(epochs_given(name, key), "partial_pearson") for key in tables)])
    head = ["quantity", "τ with the gap", *(f"{in_words(key)}, r (95 %)" for key in tables)]
    height = next(iter(tables["gap"].values()))["partial_pearson_null_95_family"]
    kept = networks(name)
    settings = len(np.unique(settings_of(kept, study(name).axes())))
    return (
        f"{table(head, lines)}\n"
        f"{len(kept)} networks in {settings} settings; r given setting and training loss. The largest |r| "
        f"with the gap of all {len(tables['gap'])} quantities stays below {number(height)} in 95 % of the "
        "permutations within settings; in bold, p < 0.05 as the best of all.\n"
    )


def epochs_given(name: str, target: str) -> dict[str, float]:
    """How the number of epochs goes with a target, given setting and training loss."""
    kept = networks(name)
    epochs, column, loss = (kept[key].to_numpy(float) for key in ("epochs", target, "train_loss"))
    codes = settings_of(kept, study(name).axes())
    return _partial_row(epochs, column, codes, np.log(loss))


def grouped(name: str) -> str:
    """Measures and targets of one part, given augmentation, batch size and training loss, seeds aside."""
    kept = networks(name)
    quantities = [quantity for quantity in study(name).headline() if quantity in kept]
    groups = kept.groupby(["augmentation", "batch_size"])
    wanted = [*quantities, "epochs"]
    values, loss = kept[wanted].to_numpy(float).T, np.log(kept["train_loss"].to_numpy(float))
    asked = {target: kept[target].to_numpy(float) for target in ("gap", "test_error", "corrupted_error")}
    found = [partial(values, target, groups.ngroup().to_numpy(), loss) for target in asked.values()]
    lines = []
    for i in sorted(range(len(wanted)), key=lambda i: -found[1]["pearson"][i]):
        told = [(number(one["pearson"][i]), one["pearson_p_family"][i]) for one in found]
        cells = [f"{f'**{r}**' if p < 0.05 else r} ({chance(p)})" for r, p in told]
        lines.append([in_words(wanted[i]) if wanted[i] in quantities else f"*{wanted[i]}*", *cells])
    return (
        f"{table(['quantity', *(f'{in_words(target)}: r (p, best of all)' for target in asked)], lines)}\n"
        f"{len(kept)} networks in {groups.ngroups} groups of one augmentation and batch size; r of what "
        "group and logarithm of the training loss leave of both. In bold, p < 0.05 for the largest |r| of "
        "the column, by permutations within groups.\n"
    )


def draw_targets(name: str) -> None:
    """Measures against the gap and the study's other targets; `name` is that of a study and one part."""
    tables = by_target(name)
    invariant = {
        one.name
        for one in flatness.measures()
        if {"layerwise", "layerwise without attention"} & set(one.invariances)
    }
    rows = []
    for quantity in study(name).headline():
        if quantity in tables["gap"]:
            told = {key: own[quantity] for key, own in tables.items()}
            measure = quantity.split(":")[0]
            other = "known" if measure == "weight_norm" else "changes"
            kind = "invariant" if measure in invariant else other
            marginal = {key: dots(row, "kendall") for key, row in told.items()}
            given = {key: dots(row, "partial_kendall") for key, row in told.items()}
            rows.append(Row(told["gap"]["name"], kind, marginal, given))
    rows.sort(key=lambda row: (row.kind == "known", -row.given["gap"].value))
    chance_of = {
        key: statistics.median(row["partial_kendall_null_95"] for row in own.values())
        for key, own in tables.items()
    }
    path = GALLERY / f"{name.replace('/', '-')}-targets.png"
    save_beyond(
        path, rows, {key: in_words(key) for key in tables}, chance_of, target="what the shape stands for"
    )


def cost(name: str) -> str:
    """What the run took, as the records say."""
    devices: dict[str, list[Mapping[str, Any]]] = {}
    for record in loaded(name).records.values():
        environment = record["environment"]
        devices.setdefault(environment.get("device_name", environment["device"]), []).append(record)
    told = "; ".join(f"on {device}: {spent(records)}" for device, records in sorted(devices.items()))
    return f"{told[0].upper()}{told[1:]}. Times of parallel workers are added up.\n"


def spent(records: list[Mapping[str, Any]]) -> str:
    """Seconds of training, measuring and lines, or of an experiment's pieces."""
    kinds = {"training": "training", "measuring": "measuring", "lines": "lines through"}
    told = []
    for key, word in kinds.items():
        seconds = [record[key]["seconds"] for record in records if "seconds" in record.get(key, {})]
        told += [f"{word} {len(seconds)} networks {sum(seconds):,.0f} s"] if seconds else []
    pieces = [record["seconds"] for record in records if "seconds" in record]
    return ", ".join(told + ([f"{sum(pieces):,.0f} s in {len(pieces)} pieces"] if pieces else []))


def claims(_: str) -> str:
    """The index: what the papers say and what is found here."""
    lines = []
    for claim in tomllib.loads((GALLERY / "claims.toml").read_text(encoding="utf-8"))["claim"]:
        ours, n = claim.get("ours", ""), str(claim.get("n", ""))
        if "quantity" in claim:
            rows = correlations(claim["study"], claim.get("part", ""))
            row = next(row for row in rows if row["quantity"] == claim["quantity"])
            ours = f"{'r' if claim['statistic'] == 'pearson' else 'τ'} = {between(row, claim['statistic'])}"
            n = str(row["n"])
        page = GALLERY / f"{claim.get('page', claim['study'])}.md"
        name = f"[{claim['study']}]({page.name})" if page.is_file() else claim["study"]
        lines.append([name, claim["paper"], claim["claim"], claim["theirs"], ours, n, claim["verdict"]])
    return table(["study", "paper", "claim", "theirs", "ours", "n", "verdict"], lines)


_BEYOND = {
    "petzka2021-cifar10": "LeNet-5 on CIFAR-10: batch, rate, optimizer",
    "petzka2019-cifar10": "LeNet-5 on CIFAR-10: batch, initialisation",
    "petzka2019-mnist-converged/zero-to-one": "perceptrons on MNIST: batch",
}
"""The studies of the opening figure, and what they vary."""
_SHOWN = (
    "layer_flatness_trace",
    "relative_flatness",
    "matrix_normalized_sharpness",
    "maximal_relative_flatness",
    "normalized_sharpness",
    "neuron_flatness",
    "fisher_rao",
    "adaptive_sharpness",
    "hessian_trace",
    "hessian_top_eigenvalue",
    "sam_sharpness",
    "pac_bayes_flatness",
)
_TABLED = ("layer_flatness_trace", "relative_flatness", "normalized_sharpness", "fisher_rao", "hessian_trace")
_TABLED += ("pac_bayes_flatness",)


def dots(row: Mapping[str, Any], kind: str) -> Dot:
    """A coefficient of the table of correlations with its interval."""
    expected = row.get("within_expected") if kind == "kendall" else None
    return Dot(row[kind], row[f"{kind}_low"], row[f"{kind}_high"], expected)


def known_rows() -> list[Row]:
    """What is known without a measure of curvature: batch size, training loss, epochs and the weight norm."""
    marginal: dict[str, dict[str, Dot]] = {}
    given: dict[str, dict[str, Dot]] = {}
    for name in _BEYOND:
        found, frame = study(name), networks(name)
        codes = settings_of(frame, found.axes())
        gap, loss = frame["gap"].to_numpy(float), np.log(frame["train_loss"].to_numpy(float))
        weight = next(row for row in correlations(name) if row["quantity"] == "weight_norm:network")
        for label, column in (
            ("batch size", "batch_size"),
            ("training loss", "train_loss"),
            ("epochs", "epochs"),
        ):
            values = frame[column].to_numpy(float)
            one = correlation(values, gap, settings=codes)
            marginal.setdefault(label, {})[name] = Dot(one.value, one.low, one.high)
            if label != "batch size":
                told = partial(values[None], gap, codes, loss if label == "epochs" else None, permutations=0)
                ends = (told[f"kendall{end}"][0] for end in ("", "_low", "_high"))
                given.setdefault(label, {})[name] = Dot(*ends)
        marginal.setdefault("weight norm", {})[name] = dots(weight, "kendall")
        given.setdefault("weight norm", {})[name] = dots(weight, "partial_kendall")
    return [Row(label, "known", own, given.get(label, {})) for label, own in marginal.items()]


def opening_rows() -> list[Row]:
    """Measures of the opening figure, the largest mean coefficient given setting and training loss on top."""
    tables = {name: {row["measure"]: row for row in one_row_per_measure(name)} for name in _BEYOND}
    invariant = {one.name for one in flatness.measures() if "layerwise" in one.invariances}
    rows = [
        Row(
            next(iter(tables.values()))[measure]["name"].rpartition(",")[0],
            "invariant" if measure in invariant else "changes",
            {name: dots(rows[measure], "kendall") for name, rows in tables.items()},
            {name: dots(rows[measure], "partial_kendall") for name, rows in tables.items()},
        )
        for measure in _SHOWN
    ]
    rows.sort(key=lambda row: -statistics.mean(dot.value for dot in row.given.values()))
    return rows


def draw_beyond() -> None:
    """What measures say beyond setting and training loss, in three studies."""
    chance_of = {
        name: statistics.median(row["partial_kendall_null_95"] for row in correlations(name))
        for name in _BEYOND
    }
    for end, dark in (("", False), ("-dark", True)):
        path = GALLERY / f"beyond{end}.png"
        save_beyond(path, [*opening_rows(), *known_rows()], _BEYOND, chance_of, dark=dark)


def opening(name: str) -> str:
    """Few measures in few columns, with what they cost."""
    by_name = {one.name: one for one in flatness.measures()}
    table_rows = {row["measure"]: row for row in one_row_per_measure(name)}
    kept = networks(name)
    lines = []
    for measure in (*_TABLED, "weight_norm"):
        row = table_rows[measure]
        moved = kept[f"{row['quantity']}:rescaled"] / kept[row["quantity"]]
        drift = math.exp(float(np.median(np.abs(np.log(np.abs(moved.to_numpy(float)))))))
        lines.append(
            [
                row["name"].rpartition(",")[0],
                between(row, "kendall"),
                between(row, "partial_kendall"),
                number(row["worst_sign_error"]),
                "none" if drift < 1.001 else f"× {drift:.3g}",
                by_name[measure].price.split(",")[0].split(":")[0],
            ]
        )
    # Read the way it goes with the gap: the larger, the smaller the gap.
    places = {axis: list(kept[own].itertuples(index=False)) for axis, own in study(name).axes().items()}
    pairs, (size, gap) = Pairs(places, len(kept)), kept[["batch_size", "gap"]].to_numpy(float).T
    worst = max(errors.max() for errors in pairs.environments(-size, gap).values() if len(errors))
    batch = next(row for row in baselines(name) if row["quantity"] == "batch_size")
    lines.append(["*batch size*", between(batch, "kendall"), "–", number(worst), "none", "–"])
    head = [
        "",
        "τ with the gap (95 %)",
        "given setting and training loss",
        "worst sign error",
        "drift",
        "cost",
    ]
    return table(head, lines)


KINDS: dict[str, Callable[[str], str]] = {
    "counts": counts,
    "headline": headline,
    "catalogue": catalogue,
    "brief": brief,
    "summary": summary,
    "settings": settings,
    "stored": stored,
    "trained": trained,
    "again": again,
    "beyond": beyond,
    "targets": targets,
    "grouped": grouped,
    "opening": opening,
    "cost": cost,
    "claims": claims,
}
"""What a page can have made."""


def filled(text: str) -> str:
    """A page with its made parts made anew."""
    return BLOCK.sub(lambda found: found[1] + KINDS[found[2]](found[3] or "") + found[5], text)


def draw(name: str) -> None:
    """Those figures of a study that a page shows."""
    found = loaded(name)
    # Experiments name their figures themselves.
    prefix = name.split("-")[0] if isinstance(found, ExperimentStudy) else name
    shown = "".join(page.read_text(encoding="utf-8") for page in GALLERY.glob("*.md"))
    with tempfile.TemporaryDirectory() as folder:
        found.path = Path(folder)
        write_figures(found)
        for file in (Path(folder) / "figures").glob("*.png"):
            if f"({prefix}-{file.name})" in shown:
                shutil.copy(file, GALLERY / f"{prefix}-{file.name}")


_TRAINED = {
    "rangamani2019-loss": "on 5,000 images to a loss",
    "rangamani2019-batch": "to a loss of 0.001",
    "rangamani2019-epochs": "on 3,000 images for 200 epochs",
}
"""Studies of the fully connected network of rangamani2019, and how they train it."""


def draw_losses() -> None:
    """The spectral norm against the loss reached, of small and large batches, by how long they train."""
    points, settings = [], []
    for name, trained in _TRAINED.items():
        if not (RECORDS / f"{name}.json.xz").is_file():
            continue
        kept = networks(name)
        parted = kept if "part" in kept else kept.assign(part="mnist-fc")
        known = parted[parted["part"].str.startswith(("mnist-fc", "loss"))]
        settings += [f"{name} {part} {size}" for part, size in known[["part", "batch_size"]].to_numpy()]
        rows = known[["train_loss", "riemannian_spectral_norm:network", "batch_size"]].to_numpy()
        points += [(float(loss), float(norm), int(size), trained, True) for loss, norm, size in rows]
    codes = [sorted(set(settings)).index(setting) for setting in settings]
    title = "Fully connected network of rangamani2019 on MNIST"
    labels = ("training loss reached", "Riemannian spectral norm")
    save_scatter(
        GALLERY / "rangamani2019-losses.png", Scatter(title, *labels, points, codes, "batch size", "trained")
    )


def draw_test_errors() -> None:
    """The test error of our own ResNet-18 networks against whitened relative flatness."""
    kept = networks("beyond-cifar10/resnet18")
    x, y = (kept[key] for key in ("relative_flatness_whitened:network:sum", "test_error"))
    points = [*zip(x, y, kept["augmentation"], kept["optimizer"], [True] * len(kept), strict=True)]
    labels = ("whitened relative flatness, sum over layers", "test error")
    chart = Scatter(
        "ResNet-18 on CIFAR-10", *labels, points, [*range(len(kept))], "augmentation", "optimizer"
    )
    save_scatter(GALLERY / "beyond-cifar10-test-error.png", chart)


def draw_lines() -> None:
    """Lines through AlexNet-type networks of both batch sizes, which are parts of their own in one study."""
    name = "rangamani2019-batch-published"
    if (RECORDS / f"{name}.json.xz").is_file():
        found = lines_together(networks(name).to_dict("records"), study(name).records, "batch_size")
        if found is not None:
            save_line(GALLERY / f"{name}-lines.png", found)


def draw_opening() -> None:
    """Measures of the catalogue, and the baselines, on the networks of one study."""
    everything = [*one_row_per_measure(OPENING), *baselines(OPENING)]
    minima = converged(OPENING, "")
    rows = []
    for row in everything:
        found = tau(minima, row["quantity"])
        rows.append(
            {
                "name": in_words(row.get("measure", row["quantity"])),
                "value": row["kendall"],
                "low": row["kendall_low"],
                "high": row["kendall_high"],
                "after": found.value,
                "after_low": found.low,
                "after_high": found.high,
            }
        )
    by_chance = statistics.median(row["null_95"] for row in correlations(OPENING))
    save_intervals(
        GALLERY / "all-measures.png",
        rows,
        "Kendall's τ with the gap, 95 % bootstrap interval",
        f"Every measure on the networks of {OPENING}",
        by_chance,
        (f"all {len(networks(OPENING))} networks", f"the {len(minima)} that converged"),
    )


def main() -> None:
    """Figures first, then pages."""
    draw_beyond()
    for file in sorted(RECORDS.glob("*.json.xz")):
        name = file.name.removesuffix(".json.xz")
        if not name.endswith(AGAIN):
            draw(name)
        found = loaded(name)
        for part in found.spec.parts if isinstance(found, Study) and found.targets() else ():
            if networks(f"{name}/{part}")["seed"].nunique() > 1:  # else nothing is left within settings
                draw_targets(f"{name}/{part}")
    draw_opening()
    draw_losses()
    draw_test_errors()
    draw_lines()
    for page in [*sorted(GALLERY.glob("*.md")), GALLERY.parent / "which-measure.md"]:
        before = page.read_text(encoding="utf-8")
        page.write_text(filled(before), encoding="utf-8")


if __name__ == "__main__":
    main()
