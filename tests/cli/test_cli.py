"""The command line before torch is loaded: help, wrong words, completion, and how fast it starts."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

import flatness
from command import command, environment, longest_line, run, run_several
from flatness.catalogue.registry import measures
from flatness.cli import words
from flatness.cli.answers import printable
from flatness.losses import LOSS_NAMES
from flatness.zoo.models import MODELS

COMMANDS = (
    "demo",
    "measure",
    "merge",
    "measures",
    "compare",
    "symmetries",
    "check",
    "bound",
    "landscape",
    "study",
)


@pytest.mark.parametrize("arguments", [[], *([name] for name in COMMANDS)])
def test_help_shows_an_example_within_80_columns(arguments, tmp_path):
    outcome = run(*arguments, "--help", cwd=tmp_path)
    assert outcome.status == 0
    assert outcome.err == ""
    assert "  Example:\n      flatness " in outcome.out
    assert longest_line(outcome.out) <= 80


def test_help_lists_the_commands(tmp_path):
    lines = run("--help", cwd=tmp_path).out.split("Commands:\n")[1].splitlines()
    assert [line.split()[0] for line in lines] == list(COMMANDS)


def test_help_starts_fast_and_without_torch(tmp_path):
    code = (
        "import sys\n"
        "from flatness.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'pandas', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)\n"
    )
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=environment(80),
            capture_output=True,
            text=True,
            check=True,
        )
        seconds.append(time.perf_counter() - started)
        assert done.stderr == "[]\n"
    assert min(seconds) < 1.5  # 0.1 s on an idle machine; tests share theirs


@pytest.mark.parametrize("group", [[], ["study"], ["landscape"]])
def test_no_command_at_all_is_answered_with_the_help(group, tmp_path):
    bare, asked = run_several(group, [*group, "--help"], cwd=tmp_path)
    assert bare == asked
    assert bare.status == 0
    assert "\nCommands:\n" in bare.out


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (
            ["mesure"],
            "Expected a command to be one of demo, measure, merge, measures, compare, symmetries, check, "
            "bound, landscape, study but got 'mesure'. Did you mean 'measure'?",
        ),
        (
            ["measure", "--modle", "x"],
            "Expected an option of 'flatness measure' but got '--modle'. Did you mean '--model'? "
            "See flatness measure --help.",
        ),
        (["measure", "--model", "mlp"], "Expected --data but got none. See flatness measure --help."),
        (["compare", "a.json"], "Expected B.json but got none. See flatness compare --help."),
        (
            ["measure", "-m", "mlp", "-d", "digits", "--method", "exct"],
            "Expected --method to be one of auto, exact, sampled but got 'exct'. Did you mean 'exact'?",
        ),
        (
            ["measure", "-m", "mlp", "-d", "digits", "--curvature", "hesian"],
            "Expected --curvature to be one of hessian, gauss_newton, finite_differences but got 'hesian'. "
            "Did you mean 'hessian'?",
        ),
        (
            ["measure", "-m", "mlp", "-d", "digits", "--option", "tolerance=3"],
            "Expected --option MEASURE.KEY=VALUE but got 'tolerance' without a measure. For example --option "
            "layer_flatness.tolerance=1e-9; 'flatness measures NAME' lists what each one takes.",
        ),
        (
            ["measure", "-m", "mlp", "-d", "digits", "--model-arg", "sizes"],
            "Expected --model-arg KEY=VALUE but got 'sizes'.",
        ),
        (
            ["measure", "-m", "mlp", "-d", "digits", "--json", "--csv"],
            "Expected one of --json and --csv but got both.",
        ),
        (
            ["compare", "no.json", "b.json"],
            "Expected a report saved by flatness but no.json cannot be read: No such file or directory. "
            "Did you mean 'now.json'?",
        ),
    ],
)
def test_wrong_words_are_answered_in_one_line(arguments, answer, tmp_path):
    (tmp_path / "now.json").touch()
    outcome = run(*arguments, cwd=tmp_path)
    assert (outcome.status, outcome.out, outcome.err) == (2, "", f"error: {answer}\n")


def test_gpu_is_no_name_of_a_device(tmp_path):
    outcome = run("measure", "-m", "mlp", "-d", "digits", "--device", "gpu", cwd=tmp_path)
    assert outcome.status == 2
    assert "but got 'gpu'. torch calls a GPU 'cuda'" in outcome.err
    assert "Did you mean 'cpu'" not in outcome.err


def test_one_mistake_in_a_factory_is_one_traceback_that_begins_there(tmp_path):
    (tmp_path / "mine.py").write_text("def build():\n    raise ValueError('no such width')\n")
    arguments = ("measure", "-m", "mine:build", "-d", "digits")
    said = "error: Expected mine:build to work but it raised ValueError: no such width"
    plain = run(*arguments, cwd=tmp_path)
    assert (plain.status, plain.err) == (1, f"{said}. --debug shows where.\n")
    lines = run(*arguments, "--debug", cwd=tmp_path).err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith('mine.py", line 2, in build')
    assert lines[-2:] == ["ValueError: no such width", said]
    assert sum("Traceback" in line for line in lines) == 1


def test_advice_on_the_command_line_names_options_and_no_python(tmp_path):
    network = ("-m", "mlp", "--model-arg", "sizes=[64,8,10]", "-d", "digits")
    given = (*network, "--measures", "weight_norm", "--no-progress")
    low, few = ("--dtype", "bfloat16"), ("--samples", "20", "--trials", "1")
    outcomes = run_several(["measure", *given, *low], ["check", *given, *few], cwd=tmp_path)
    first, second = (" ".join(one.out.split()) for one in outcomes)
    assert "computed in bfloat16, which leaves about two digits; pass --dtype float32 for more" in first
    assert "--samples takes more" in second
    assert printable("raise max_products in options={'sam_sharpness': {'rho': 0.1}}") == (
        "raise max_products in --option sam_sharpness.rho=0.1"
    )
    assert printable("see report.result(...).notes") == "see notes in --json"
    assert printable("a layer my.loss=3 and x_samples=2") == "a layer my.loss=3 and x_samples=2"


def test_a_number_that_is_none_is_answered_in_one_line(tmp_path):
    outcome = run("measure", "-m", "mlp", "-d", "digits", "--precision", "abc", cwd=tmp_path)
    assert outcome.status == 2
    assert outcome.err.startswith("error: Invalid value for '--precision'")
    assert outcome.err.count("\n") == 1


def test_version(tmp_path):
    outcome = run("--version", cwd=tmp_path)
    assert outcome.status == 0
    assert outcome.out == f"flatness {flatness.__version__}\n"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("flatness mea", ["measure", "measures"]),
        ("flatness measure --data ", words.data_set_names()),
        ("flatness measure --model lenet", ["lenet5", "lenet5_mnist", "lenet_431k"]),
        (
            "flatness measure --measures weight_norm,relative_flatness_n",
            ["weight_norm,relative_flatness_normalized"],
        ),
        ("flatness measure --method e", ["exact"]),
    ],
)
def test_shell_completion(line, found, tmp_path):
    asked = {"_FLATNESS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    assert run(cwd=tmp_path, **asked).out.split() == found


def test_completion_installs_for_bash(tmp_path):
    script = run(cwd=tmp_path, _FLATNESS_COMPLETE="source_bash").out
    assert "_FLATNESS_COMPLETE=complete_bash" in script


def test_completion_knows_the_words_of_the_library():
    known = [measure.name for measure in measures()]
    assert sorted(words.measure_names()) == sorted(known)
    assert sorted(words.model_names()) == sorted(MODELS)
    assert words.LOSSES == LOSS_NAMES


def test_datasets_are_those_of_the_library():
    from flatness.zoo.data import DATASETS

    assert words.data_set_names() == list(DATASETS)


def test_the_command_for_python_is_the_same(tmp_path):
    by_package = run("--help", cwd=tmp_path).out
    by_module = subprocess.run(
        [*command()[:2], "flatness.cli", "--help"],
        cwd=tmp_path,
        env=environment(80),
        capture_output=True,
        text=True,
    )
    assert by_module.stdout == by_package
