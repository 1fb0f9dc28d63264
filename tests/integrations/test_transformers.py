"""Models of transformers, where it is installed: their own loss is measured."""

import pytest
import torch
from torch import nn

import flatness
import oracle
from labelled_models import Wrapper, cut
from untouched import untouched

transformers = pytest.importorskip("transformers")

SIZES = {
    "gpt2": {"vocab_size": 11, "n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 2},
    "bart": {
        "vocab_size": 11,
        "d_model": 4,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 6,
        "decoder_ffn_dim": 6,
        "max_position_embeddings": 8,
        "pad_token_id": 0,
        "decoder_start_token_id": 2,
    },
    "t5": {
        "vocab_size": 11,
        "d_model": 4,
        "d_kv": 2,
        "d_ff": 6,
        "num_layers": 1,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    },
    "xlm": {"vocab_size": 11, "emb_dim": 4, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 8},
    "xlnet": {"vocab_size": 11, "d_model": 4, "n_layer": 1, "n_head": 2, "d_inner": 6},
    "bert": {
        "vocab_size": 11,
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 6,
        "max_position_embeddings": 8,
    },
}


def made(name, config, sizes, **options):
    """A model in float64 with random weights, all of them."""
    model = getattr(transformers, name)(getattr(transformers, config)(**SIZES[sizes], **options))
    generator = torch.Generator().manual_seed(5)
    model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def gpt2():
    return made("GPT2LMHeadModel", "GPT2Config", "gpt2")


def remote():
    """A class as remote code has it, with a name that says nothing."""
    kind = type(
        "Mistletoe", (transformers.GPT2LMHeadModel,), {"__module__": "transformers_modules.mistletoe"}
    )
    return kind(transformers.GPT2Config(**SIZES["gpt2"])).double().eval()


def tokens():
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(3, 11, (10, 6), generator=generator)
    mask = torch.ones_like(tokens)
    mask[::4, 4:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def classes(kinds):
    return tokens() | {"labels": torch.arange(10) % kinds}


def tagged():
    """As many kinds of tokens as places, six."""
    batch = tokens()
    return batch | {"labels": torch.where(batch["labels"] < 0, batch["labels"], batch["labels"] % 6)}


def translated():
    batch = tokens()
    return batch | {"labels": batch["labels"].flip(0)[:, :5].contiguous()}


SHIFTED, NOT_SHIFTED = "labels shifted by one", "labels not shifted"
MADE = "labels not shifted, the model given decoder inputs made from them"
CASES = {
    "gpt2": (gpt2, tokens, SHIFTED),
    "wrapped gpt2": (lambda: Wrapper(gpt2()), tokens, SHIFTED),
    "remote code": (remote, tokens, SHIFTED),
    "bart decoder": (lambda: made("BartForCausalLM", "BartConfig", "bart"), tokens, NOT_SHIFTED),
    "xlm": (lambda: made("XLMWithLMHeadModel", "XLMConfig", "xlm"), tokens, NOT_SHIFTED),
    "xlnet": (lambda: made("XLNetLMHeadModel", "XLNetConfig", "xlnet"), tokens, NOT_SHIFTED),
    "bart": (lambda: made("BartForConditionalGeneration", "BartConfig", "bart"), translated, MADE),
    "t5": (lambda: made("T5ForConditionalGeneration", "T5Config", "t5"), translated, MADE),
    "masked": (lambda: made("BertForMaskedLM", "BertConfig", "bert"), tokens, NOT_SHIFTED),
    "sequences": (
        lambda: made("BertForSequenceClassification", "BertConfig", "bert", num_labels=3),
        lambda: classes(3),
        NOT_SHIFTED,
    ),
    "tokens": (
        lambda: made("BertForTokenClassification", "BertConfig", "bert", num_labels=6),
        tagged,
        NOT_SHIFTED,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_loss_that_a_model_returns_is_measured(case):
    """The last layer against the dense Hessian of the model's own loss, which GPT-2 has in float32: 1e-5."""
    build, batch, alignment = CASES[case]
    model, batch = build(), batch()
    with untouched(model):
        report = flatness.measure(
            model,
            cut(batch, 7),
            measures="hessian_trace",
            curvature="gauss_newton",
            layers="last",
            progress=False,
        )
    assert report.meta["alignment"] == f"{alignment}: as in the model's own loss"
    assert report.meta["risk"] == pytest.approx(model(**batch).loss.item(), rel=1e-6)
    (name,) = report.layers()
    if not _is_tied(model, name):
        H = oracle.layer_hessian(model, lambda model: model(**batch).loss, name)
        assert report.value("hessian_trace", layer=name) == pytest.approx(oracle.hessian_trace(H), rel=1e-5)


def _is_tied(model: nn.Module, name: str) -> bool:
    """Whether the head's weight is the embedding: the last layer is only one of its uses."""
    own = model.get_submodule(name).weight
    others = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return any(other is own for other in others)


LLAMA = {
    "vocab_size": 11,
    "hidden_size": 4,
    "intermediate_size": 3,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8,
}
SIZES |= {
    "llama": LLAMA,
    "mixtral": LLAMA | {"num_local_experts": 3, "num_experts_per_tok": 2},
    "vit": {
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 5,
        "image_size": 4,
        "patch_size": 2,
        "num_channels": 2,
    },
}


def images():
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(8, 2, 4, 4, generator=generator, dtype=torch.float64)
    return {"pixel_values": x, "labels": torch.randint(3, (8,), generator=generator)}


def few(batch):
    return {name: value[:6, :4].contiguous() for name, value in batch.items()}


FAMILIES = {
    "gpt2": (gpt2, lambda: few(tokens())),
    "llama": (lambda: made("LlamaForCausalLM", "LlamaConfig", "llama"), lambda: few(tokens())),
    "mixtral": (
        lambda: made("MixtralForCausalLM", "MixtralConfig", "mixtral", experts_implementation="eager"),
        lambda: few(tokens()),
    ),
    "bert": (
        lambda: made("BertForSequenceClassification", "BertConfig", "bert", num_labels=3),
        lambda: {name: value[:6, :4] if value.dim() > 1 else value[:6] for name, value in classes(3).items()},
    ),
    "t5": (lambda: made("T5ForConditionalGeneration", "T5Config", "t5"), lambda: few(translated())),
    "vit": (lambda: made("ViTForImageClassification", "ViTConfig", "vit", num_labels=3), images),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_of_a_family(family):
    """All directions, against the dense Hessian; norms, softmax and losses are partly in float32: 1e-4."""
    build, batch = FAMILIES[family]
    model, batch = build(), batch()
    report = flatness.measure(
        model, [batch], measures=["hessian_trace", "relative_flatness"], method="exact", progress=False
    )
    assert len(report.layers()) >= 5
    for name in report.layers():
        H = oracle.layer_hessian(model, lambda model: model(**batch).loss, name)
        W = oracle.layer_weight(model, name)
        size = H.abs().max().item() * 1e-4
        assert report.result("hessian_trace", layer=name).method == "exact"
        assert report.value("hessian_trace", layer=name) == pytest.approx(
            oracle.hessian_trace(H), rel=1e-4, abs=size
        )
        assert report.value("relative_flatness", layer=name) == pytest.approx(
            oracle.relative_flatness(W, H), rel=1e-4, abs=size
        )
