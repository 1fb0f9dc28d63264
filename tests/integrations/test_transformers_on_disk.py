"""Models and tokenised data that transformers, peft and datasets wrote, where these are installed."""

import io
import json
import sys

import pandas as pd
import pytest
import torch

import flatness
from command import run
from flatness.cli.answers import UsageError
from flatness.cli.options import Network
from flatness.cli.sources import data_of
from flatness.errors import DataError, ModelError
from flatness.integrations.transformers import load_data, load_model

pytestmark = pytest.mark.filterwarnings("ignore:::transformers", "ignore:::peft", "ignore:::datasets")

LLAMA = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "llama"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A folder with tokenised data of two splits."""
    datasets = pytest.importorskip("datasets")
    path = tmp_path_factory.mktemp("data") / "tokens"
    generator = torch.Generator().manual_seed(1)
    rows = []
    for length in torch.randint(4, 9, (20,), generator=generator).tolist():
        row = torch.randint(11, (length,), generator=generator).tolist()
        rows.append({"input_ids": row, "attention_mask": [1] * length, "labels": row})
    table = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": table, "test": table.select(range(5))}).save_to_disk(str(path))
    return path


def test_a_model_comes_back_as_the_class_that_was_saved(folder):
    transformers = pytest.importorskip("transformers")
    model = load_model(folder)
    again = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert type(model) is transformers.LlamaForCausalLM
    assert not model.training
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_measured_from_the_command_line(folder, tokens, tmp_path):
    asked = ["measure", "-m", f"hf:{folder}", "-d", f"hf:{tokens}", "--layers", "last", "--no-progress"]
    finished = run(*asked, "--measures", "relative_flatness", "--csv", cwd=tmp_path)
    table = pd.read_csv(io.StringIO(finished.out))
    report = flatness.measure(
        load_model(folder), load_data(tokens), measures="relative_flatness", layers="last", progress=False
    )
    (value,) = table.loc[table.layer == "lm_head", "value"]
    assert value == pytest.approx(report.value("relative_flatness", layer="lm_head"), rel=1e-5)
    assert "no checkpoint was given" not in finished.out + finished.err


def test_options_of_other_data_are_refused():
    with pytest.raises(UsageError) as caught:
        data_of(Network(model="lenet5", data="hf:tokens", standardize=True))
    assert str(caught.value) == (
        "Expected --standardize and --data-dir with a named data set or an .npz file but got "
        "'hf:tokens', which "
        "is measured as it was saved."
    )


def test_without_transformers(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert _refused(ModelError, load_model, tmp_path) == (
        f"Expected transformers for 'hf:{tmp_path}' but it is not installed. Type: pip install "
        "'flatness[transformers]'."
    )


def test_adapters_come_with_their_base_and_are_trainable(folder, tmp_path):
    peft = pytest.importorskip("peft")
    base = load_model(folder)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(base, config).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    assert trained == [
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.default.weight" for side in "AB"
    ]
    content = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(content | {"base_model_name_or_path": "gpt2"}))
    assert _refused(ModelError, load_model, tmp_path) == (
        f"Expected the base model of the adapters in {tmp_path} on disk but there is no folder "
        f"'gpt2'. Save it "
        "with model.save_pretrained and set base_model_name_or_path in adapter_config.json to that folder."
    )


def test_splits_and_limits(tokens):
    assert len(load_data(tokens)) == 20
    assert len(load_data(tokens, "test")) == 5
    assert len(load_data(tokens / "test")) == 5
    assert len(load_data(tokens, limit=7)) == 7
    assert len(load_data(tokens, limit=70)) == 20
    assert _refused(DataError, load_data, tokens, "validation") == (
        f"Expected a split of {tokens} but got 'validation'. There are train, test; the folder of "
        f"one, such as "
        f"{tokens / 'train'}, works, too."
    )


def _refused(error, function, *arguments):
    with pytest.raises(error) as caught:
        function(*arguments)
    return str(caught.value)


def test_what_is_no_model_is_refused(folder, tmp_path):
    assert _refused(ModelError, load_model, "gpt2") == (
        "Expected a folder with a model but there is none at 'gpt2'. Nothing is downloaded: "
        "write it first, with "
        "model.save_pretrained('gpt2')."
    )
    assert _refused(ModelError, load_model, tmp_path) == (
        f"Expected config.json in {tmp_path} but it is not there. Pass a folder that "
        f"model.save_pretrained wrote."
    )
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["MistletoeForCausalLM"]}))
    assert _refused(ModelError, load_model, tmp_path) == (
        f"Expected a class of transformers in {tmp_path / 'config.json'} but got "
        f"'MistletoeForCausalLM', whose "
        "code is not part of transformers and is not run here. Build the model in a function of "
        "your own and pass "
        "package.module:function."
    )
    (tmp_path / "config.json").write_text("[]")
    assert _refused(ModelError, load_model, tmp_path) == (
        f"Expected a JSON object in {tmp_path / 'config.json'} but it is none: 'list' object has "
        f"no attribute "
        "'get'"
    )
    (tmp_path / "config.json").write_text(json.dumps(config))  # and no weights
    assert _refused(ModelError, load_model, tmp_path).startswith(
        f"Expected a model that can be loaded from {tmp_path} but that raised OSError: "
    )


def test_what_are_no_data_is_refused(tmp_path):
    pytest.importorskip("datasets")
    assert _refused(DataError, load_data, tmp_path / "none") == (
        f"Expected a folder with tokenised data but there is none at '{tmp_path / 'none'}'. "
        f"Nothing is downloaded: "
        f"write it first, with dataset.save_to_disk('{tmp_path / 'none'}')."
    )
    assert _refused(DataError, load_data, tmp_path).startswith(
        f"Expected data that dataset.save_to_disk wrote in {tmp_path} but it raised FileNotFoundError: "
    )
