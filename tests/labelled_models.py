"""Small float64 modules that take labels and return a loss, as those of transformers do."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS = 5


def mean_cross_entropy(logits: Tensor, labels: Tensor, **options) -> Tensor:
    """Over all tokens that are not ignored."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    """What a causal language model computes: in single precision, each output against the next token."""
    return mean_cross_entropy(logits[:, :-1].float(), labels[:, 1:])


class Tokens(nn.Module):
    """Embedding, running mean over the sequence, head; `own` is its loss of (logits, labels)."""

    def __init__(self, own=shifted, classes: int = TOKENS, wrap=SimpleNamespace) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(TOKENS, 4), nn.Linear(4, classes)
        self.own, self.wrap = [own], [wrap]  # in lists: a module's attributes would be bound
        self.given = []
        draw(self)

    def forward(self, input_ids, attention_mask=None, labels=None):
        self.given.append(labels is not None)
        h = self.table(input_ids)
        weight = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        h = (h * weight[..., None]).cumsum(1) / weight.cumsum(1)[..., None]
        logits = self.head(h.tanh())
        return self.wrap[0](logits=logits, loss=None if labels is None else self.own[0](logits, labels))


class Classifier(Tokens):
    """The same, with the mean over the sequence in place of every token."""

    def forward(self, input_ids, labels=None):
        logits = self.head(self.table(input_ids).tanh().mean(1))
        return SimpleNamespace(logits=logits, loss=None if labels is None else self.own[0](logits, labels))


class Wrapper(nn.Module):
    """Hands everything on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch):
        return self.inner(**batch)


class Translator(nn.Module):
    """An encoder-decoder like Bart: without decoder inputs it makes them from the source."""

    def __init__(self, fall_back: bool = True) -> None:
        super().__init__()
        self.table, self.decoder, self.head = nn.Embedding(TOKENS, 4), nn.Linear(8, 6), nn.Linear(6, TOKENS)
        self.fall_back = fall_back
        draw(self)

    def forward(self, input_ids, decoder_input_ids=None, labels=None):
        if decoder_input_ids is None and labels is not None:
            decoder_input_ids = start_with_zero(labels)
        if decoder_input_ids is None:
            if not self.fall_back:
                raise ValueError("You have to specify decoder_input_ids")  # T5
            decoder_input_ids = start_with_zero(input_ids)
        source = self.table(input_ids).mean(1, keepdim=True).expand(-1, decoder_input_ids.shape[1], -1)
        logits = self.head(self.decoder(torch.cat([source, self.table(decoder_input_ids)], 2)).tanh())
        loss = None if labels is None else mean_cross_entropy(logits, labels)
        return SimpleNamespace(logits=logits, loss=loss)


class Preparing(Translator):
    """With the method of transformers that makes the decoder's inputs."""

    def prepare_decoder_input_ids_from_labels(self, labels):
        return start_with_zero(labels)


def start_with_zero(tokens: Tensor) -> Tensor:
    """Tokens moved by one place to the right; those that do not count become 0."""
    moved = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], 1)
    return moved.masked_fill(moved < 0, 0)


def draw(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def sentences(n: int = 12, length: int = 7) -> dict[str, Tensor]:
    """Tokens; the ends of some sequences are padded: masked, and with labels that do not count."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(TOKENS, (n, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[::3, 4:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def cut(batch: dict[str, Tensor], first: int) -> list[dict[str, Tensor]]:
    """A batch as two of different length."""
    return [
        {key: value[:first] for key, value in batch.items()},
        {key: value[first:] for key, value in batch.items()},
    ]
