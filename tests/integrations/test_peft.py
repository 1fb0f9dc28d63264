"""Adapters of peft, where it is installed: measured as they are, against the dense Hessian."""

import pytest
import torch
import torch.nn.functional as F

import flatness
import oracle
from untouched import refusal, untouched

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
# peft and transformers warn of each other's next versions.
pytestmark = pytest.mark.filterwarnings("ignore:::peft", "ignore:::transformers")

LLAMA = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
ATTENTION = "base_model.model.model.layers.0.self_attn"
ADAPTERS = [f"{ATTENTION}.{part}_proj.lora_{side}.default" for part in "qv" for side in "AB"]


def adapted(**options):
    """A Llama with adapters, everything drawn anew: adapters begin at zero."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(model, config).double().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def batch(n=8):
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(11, (n, 5), generator=generator)
    ignored = torch.rand(tokens.shape, generator=generator) < 0.2
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(ignored, -100),
    }


def risk(model):
    given = batch()
    labels = given.pop("labels")
    return F.cross_entropy(model(**given).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_adapters_have_the_hessian_of_the_adapted_model(options):
    """Exact, in all directions. Llama's softmax and norms are in single precision: 1e-5."""
    model = adapted(**options)
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    with untouched(model):
        report = flatness.measure(
            model,
            [batch()],
            measures=["hessian_trace", "relative_flatness"],
            layers="trainable",
            method="exact",
            progress=False,
        )
    assert report.layers() == ADAPTERS
    assert [name for name, value in model.named_parameters() if value.requires_grad] == trained
    assert not [note for note in report.notes if "frozen" in note]
    model.requires_grad_(True)
    for name in ADAPTERS:
        H, W = oracle.layer_hessian(model, risk, name), oracle.layer_weight(model, name)
        assert report.result("hessian_trace", layer=name).method == "exact"
        assert report.value("hessian_trace", layer=name) == pytest.approx(oracle.hessian_trace(H), rel=1e-5)
        assert report.value("relative_flatness", layer=name) == pytest.approx(
            oracle.relative_flatness(W, H), rel=1e-5, abs=1e-6
        )


def test_without_layers_the_frozen_base_is_measured_too():
    report = flatness.measure(
        adapted(),
        [batch()],
        measures="hessian_trace",
        curvature="gauss_newton",
        precision=0.5,
        progress=False,
    )
    assert {*ADAPTERS, f"{ATTENTION}.q_proj.base_layer", "base_model.model.lm_head"} <= {*report.layers()}
    (note,) = (note for note in report.notes if note.startswith("frozen"))
    assert note.startswith(
        "frozen (requires_grad=False) but measured like the others: base_model.model.model"
    )


def test_merged_adapters_are_the_merged_model():
    """What is merged does not run: one layer is left, and its curvature is that of the merged model."""
    model, asked = adapted(), {"measures": "hessian_trace", "layers": "last", "progress": False}
    model.merge_adapter()
    merged = flatness.measure(model, [batch()], **asked)
    plain = flatness.measure(adapted().merge_and_unload(), [batch()], **asked)
    assert merged.value("hessian_trace", layer="base_model.model.lm_head") == pytest.approx(
        plain.value("hessian_trace", layer="lm_head"), rel=1e-9
    )


def test_an_adapter_that_is_loaded_frozen_is_refused_with_what_to_do(tmp_path):
    adapted().save_pretrained(tmp_path)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    model = peft.PeftModel.from_pretrained(base, tmp_path).double()
    message = refusal(flatness.errors.LayerError, model, [batch()], layers="trainable")
    assert message.startswith("Expected layers that are trained but every layer that runs is frozen")
    assert message.endswith("PEFT loads adapters frozen unless from_pretrained gets is_trainable=True.")
