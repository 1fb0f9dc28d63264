"""The public face: names, keywords and what importing costs."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import flatness

CONTRACT = [
    "measure",
    "plan",
    "measures",
    "compare",
    "register_measure",
    "register_layer",
    "Problem",
    "Report",
    "Result",
]


@pytest.mark.parametrize("name", CONTRACT)
def test_the_names_of_the_contract_exist_and_are_documented(name):
    assert name in flatness.__all__
    assert inspect.getdoc(getattr(flatness, name))


def test_every_public_name_can_be_imported():
    assert len(set(flatness.__all__)) == len(flatness.__all__)
    for name in flatness.__all__:
        assert getattr(flatness, name) is not None
        assert name in dir(flatness)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError):
        flatness.mesure  # noqa: B018


def test_measure_takes_the_keywords_of_the_contract_with_their_defaults():
    parameters = inspect.signature(flatness.measure).parameters
    assert list(parameters)[:3] == ["model", "data", "loss"]
    keywords = {name: p.default for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert keywords == {
        "measures": "default",
        "layers": None,
        "method": "auto",
        "curvature": "hessian",
        "precision": 0.01,
        "max_passes": 100,
        "data_stderr": False,
        "samples": None,
        "tf32": False,
        "statistics_to": None,
        "options": None,
        "forward": None,
        "weight_decay": 0.0,
        "batch_size": None,
        "device": None,
        "dtype": None,
        "seed": 0,
        "progress": True,
    }
    assert parameters["loss"].default == "cross_entropy"


def test_reports_answer_as_the_contract_says():
    for name in ("to_frame", "value", "result", "save", "load", "to_csv", "to_latex", "layers"):
        assert callable(getattr(flatness.Report, name))
    value = inspect.signature(flatness.Report.value).parameters
    assert list(value) == ["self", "measure", "layer", "unit", "reduction"]
    for name in ("value", "stderr", "method", "converged", "notes"):
        assert name in inspect.signature(flatness.Result).parameters


def test_every_exception_is_a_flatness_error_and_a_built_in_one():
    from flatness import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 10
    for kind in kinds:
        assert issubclass(kind, flatness.FlatnessError)
        assert kind is flatness.FlatnessError or len(kind.__bases__) == 2


def loaded_by(code):
    """The top-level packages that a fresh interpreter has loaded after running some code."""
    script = (
        f"{code}\nimport sys\nprint(' '.join(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return set(done.stdout.split())


OPTIONAL = {
    "transformers",
    "timm",
    "lightning",
    "ray",
    "plotly",
    "jinja2",
    "torchvision",
    "curvlinops",
    "backpack",
    "pyhessian",
}


def test_importing_and_measuring_load_no_plots_tables_or_optional_packages():
    code = (
        "import flatness, torch\n"
        "for name in flatness.__all__: getattr(flatness, name)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))\n"
        "report = flatness.measure(model, (torch.randn(9, 4), torch.randint(3, (9,))), measures='all')\n"
        "assert 'torch._dynamo' not in __import__('sys').modules, 'the compiler takes seconds to load'"
    )
    loaded = loaded_by(code)
    assert "torch" in loaded
    assert not loaded & (OPTIONAL | {"matplotlib", "pandas", "sklearn", "rich", "typer"})


def test_the_package_is_typed_and_knows_its_version():
    from importlib import resources

    assert resources.files("flatness").joinpath("py.typed").is_file()
    cited = (Path(__file__).parents[1] / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {flatness.__version__}\n" in cited


def test_a_name_with_a_slip_is_answered_with_the_nearest():
    with pytest.raises(AttributeError) as caught:
        flatness.meassure  # noqa: B018
    # What a traceback makes its suggestion from.
    assert (caught.value.name, caught.value.obj) == ("meassure", flatness)
