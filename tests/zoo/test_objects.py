"""Code by name: what is there is found, what is not is said, and whose fault an error is."""

from __future__ import annotations

import sys

import pytest

from flatness.errors import OptionError, SpecError
from flatness.zoo.objects import SourceError, import_object


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_thing.py").write_text("class Net:\n    width = 3\n")
    (tmp_path / "own_failing.py").write_text("raise KeyError('x')\n")
    (tmp_path / "own_needing.py").write_text("import own_missing_package\n")
    yield
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


def test_names_may_lead_into_objects():
    assert import_object("own_thing:Net.width", "--model") == 3


def test_the_file_of_a_module_will_do():
    for spec in ("own_thing.py:Net.width", "./own_thing.py:Net.width"):
        assert import_object(spec, "--model") == 3


@pytest.mark.parametrize(
    ("spec", "kind", "said"),
    [
        (
            "own/thing:Net",
            SpecError,
            "Expected name in [model] to be package.module:name but got 'own/thing:Net'. Write dots for "
            "slashes.",
        ),
        ("own_thing:", SpecError, "Expected name in [model] to be package.module:name but got 'own_thing:'."),
        (
            "own_thin:Net",
            SpecError,
            "Expected name in [model] to name a module that can be imported here but there is no 'own_thin'. "
            "Did you mean 'own_thing'?",
        ),
        ("own_thing:Nets", SpecError, "Expected a name in own_thing but got 'Nets'. Did you mean 'Net'?"),
        ("own_failing:Net", SourceError, "Expected own_failing to import but it raised KeyError: 'x'"),
        (
            "own_needing:Net",
            SourceError,
            "Expected own_needing to import but it needs 'own_missing_package', which is not installed.",
        ),
    ],
)
def test_what_is_wrong_is_said(spec, kind, said):
    with pytest.raises(kind) as caught:
        import_object(spec, "name in [model]", SpecError)
    assert str(caught.value) == said


def test_without_another_kind_it_is_an_option():
    with pytest.raises(OptionError):
        import_object("nothing", "--model")
