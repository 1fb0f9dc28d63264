"""The same study on a Ray that runs here gives the same records; skipped where Ray is not installed."""

from __future__ import annotations

import importlib.util
import sys
import warnings

import pytest

import flatness
from flatness.errors import OptionError
from studies import study

INSTALLED = importlib.util.find_spec("ray") is not None


@pytest.mark.skipif(not INSTALLED, reason="ray is not installed")
@pytest.mark.filterwarnings("ignore")
def test_a_local_ray_gives_the_records_of_one_process(tmp_path):
    import ray

    content = study(grid={"batch_size": [16, 64]})
    alone = flatness.study.run(content, tmp_path / "alone", jobs=1, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        spread = flatness.study.run(content, tmp_path / "ray", executor="ray", jobs=2, progress=False)
    finally:
        ray.shutdown()
    columns = ["training_seconds", "measuring_seconds"]
    mine, theirs = (s.to_frame().drop(columns=columns) for s in (alone, spread))
    assert mine.equals(theirs)


def test_without_ray_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.util.joblib", None)
    with pytest.raises(OptionError) as caught:
        flatness.study.run(study(), tmp_path, executor="ray")
    assert str(caught.value) == (
        "Expected Ray for executor='ray' but it is not installed. Type: pip install 'flatness[ray]'."
    )
