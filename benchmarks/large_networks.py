"""How long do relative flatness and traces of all layers of large networks take on a GPU?

Networks: a GPT of GPT-2 small's size (124 million parameters, tied head, 50,257 tokens, sequences of 1,024),
untrained and trained for a while on Python's own standard library; ViT-B/16 and ResNet-50 (timm) at 224². The
unit is one gradient of all samples at its best micro-batch. Errors are relative to the larger of a value and
its Gauss-Newton part. `products` times one Hessian product beside curvlinops, `resnet18` the default measures
beside BackPACK's diagonal and beside other batch sizes. One line per call, and JSON in $OUT if set.

    PYTHONPATH=src python benchmarks/large_networks.py gpt2:8 gpt2-trained:64:0.02:tf32 vit:64 resnet50:256
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import statistics
import sysconfig
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import best_batch, full_precision, machine, peak_memory, peer, seconds
from small_transformers import GPT
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import flatness

MEASURES = ["relative_flatness", "hessian_trace"]
VOCABULARY, LENGTH, WIDTH, BLOCKS, HEADS = 50_257, 1024, 768, 12, 12
SIZE = {"tokens": VOCABULARY, "length": LENGTH, "width": WIDTH, "blocks": BLOCKS, "heads": HEADS}
TINY = {"tokens": 503, "length": 32, "width": 32, "blocks": 2, "heads": 2}


@cache
def stream() -> Tensor:
    """Python's standard library as word tokens: the most frequent words and marks, by number."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in folder.rglob("*.py") if "site-packages" not in path.parts)
    words = [w for path in paths for w in re.findall(r"\w+|[^\w]", path.read_text("utf-8", "replace"))]
    numbers = {word: i for i, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1), start=1)}
    return torch.tensor([numbers.get(word, 0) for word in words])


def text(samples: int, length: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pieces of the stream, with the tokens that follow."""
    all_tokens = stream().clamp(max=tokens - 1)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(all_tokens) - length - 1, (samples,), generator=generator)
    rows = all_tokens[starts[:, None] + torch.arange(length + 1)]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def train(model: nn.Module, shape: dict[str, int], device: torch.device, limit: float) -> float:
    """AdamW in bfloat16 for so many seconds; the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    begun, number, loss = time.perf_counter(), 0, torch.tensor(float("nan"))
    while time.perf_counter() - begun < limit:
        x, y = (part.to(device) for part in text(16, shape["length"], shape["tokens"], seed=1000 + number))
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * min(1.0, (number + 1) / 100)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        number += 1
    model.zero_grad(set_to_none=True)
    print(f"trained: {number} steps, loss {float(loss.detach()):.3f}", flush=True)
    return float(loss.detach())


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Random images kept as bytes, as pictures are; they come as floats of mean 0."""

    def __init__(self, samples: int, side: int, labels: Tensor, device: torch.device) -> None:
        self.pixels = torch.empty(samples, 3, side, side, dtype=torch.uint8)
        for part in self.pixels.split(4096):
            part.copy_(torch.randint(256, part.shape, dtype=torch.uint8, device=device))
        self.labels = labels

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, row: Any) -> tuple[Tensor, Tensor]:
        return (self.pixels[row].float() - 127.5) / 74, self.labels[row]


class Networks:
    """Networks and data by name, made once."""

    def __init__(self, device: torch.device, tiny: bool, train_seconds: float) -> None:
        self.device, self.tiny, self.train_seconds = device, tiny, train_seconds
        self.shape = TINY if tiny else SIZE
        self._made: dict[str, nn.Module] = {}

    def model(self, name: str) -> nn.Module:
        if name not in self._made:
            torch.manual_seed(0)
            self._made[name] = self._new(name).to(self.device).eval()
        return self._made[name]

    def _new(self, name: str) -> nn.Module:
        if name.startswith("gpt2"):
            model = GPT(**self.shape).to(self.device)
            for part in model.modules():
                if isinstance(part, nn.Linear) and part is not model.head:
                    nn.init.normal_(part.weight, std=0.02)
            if name == "gpt2-trained":
                train(model, self.shape, self.device, self.train_seconds)
            return model
        import timm

        names = {
            "vit": ("vit_base_patch16_224", "vit_tiny_patch16_224"),
            "resnet50": ("resnet50", "resnet18"),
        }
        kind = names.get(name, (name, name))[self.tiny]
        return timm.create_model(kind, pretrained=False)

    def data(self, name: str, samples: int) -> Dataset[tuple[Tensor, Tensor]]:
        if name.startswith("gpt2"):
            return TensorDataset(*text(samples, self.shape["length"], self.shape["tokens"]))
        generator = torch.Generator().manual_seed(0)
        side = 64 if self.tiny and name != "vit" else 224
        labels = torch.randint(1000, (samples,), generator=generator)
        if samples > 8192:
            return Images(samples, side, labels, self.device)
        return TensorDataset(torch.randn(samples, 3, side, side, generator=generator), labels)


def gradient_unit(model: nn.Module, data: Dataset[Any], device: torch.device) -> tuple[float, int, int]:
    """Seconds of one gradient per sample at the best micro-batch, that micro-batch, and its peak memory."""

    def one(size: int) -> None:
        rows, labels = (part.to(device) for part in data[:size])
        F.cross_entropy(model(rows).flatten(0, -2), labels.flatten()).backward()
        model.zero_grad(set_to_none=True)

    best = (float("inf"), 0, 0)
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        if size > len(data):  # type: ignore[arg-type]
            break
        try:
            one(size)
            each = min(seconds(lambda size=size: one(size), device) for _ in range(2)) / size
        except torch.OutOfMemoryError:
            model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            break
        if each > 0.98 * best[0]:
            break
        best = (each, size, peak_memory(lambda size=size: one(size), device) if device.type == "cuda" else 0)
    return best


def measured(networks: Networks, text: str) -> dict[str, Any]:
    """One call, `name:samples[:precision][:tf32][:gauss_newton][:batch=N][:max=N][:enough]`."""
    name, samples, *rest = text.split(":")
    model, data, device = networks.model(name), networks.data(name, int(samples)), networks.device
    words = [word for word in rest if not word.replace(".", "").isdigit()]
    asked: dict[str, Any] = {"precision": next((float(w) for w in rest if w not in words), 0.02)}
    if "tf32" in words:
        asked["tf32"] = True
    if "gauss_newton" in words:
        asked["curvature"] = "gauss_newton"
    if "enough" in words:
        asked["samples"] = "enough"
    for word in words:
        if word.startswith("batch="):
            asked["batch_size"] = int(word[6:])
        if word.startswith("max="):
            asked["max_passes"] = int(word[4:])
    unit, size, unit_memory = gradient_unit(model, data, device)
    found: list[flatness.Report] = []

    def call() -> None:
        found.append(flatness.measure(model, data, measures=MEASURES, progress=False, **asked))

    taken = [0.0]

    def timed() -> None:
        taken[0] = seconds(call, device)

    memory = peak_memory(timed, device) if device.type == "cuda" else (timed(), 0)[1]
    report = found[0]
    part = report
    if "gauss_newton" not in words:
        asked |= {"curvature": "gauss_newton", "precision": max(0.05, asked["precision"])}
        part = flatness.measure(model, data[:32], measures=MEASURES, progress=False, **asked)
    errors = {}
    for row in report.results:
        if row.level == "layer" and row.stderr is not None:
            scale = max(abs(row.value), abs(part.value(row.measure, layer=row.layer)))
            errors[f"{row.measure} {row.layer}"] = row.stderr / scale if row.stderr else 0.0
    worst = max(errors, key=errors.__getitem__) if errors else ""
    return {
        "call": text,
        "seconds": taken[0],
        "gradients": taken[0] / (unit * int(samples)),
        "seconds per gradient of all": unit * int(samples),
        "gradient micro-batch": size,
        "gradient memory GB": unit_memory / 1e9,
        "memory GB": memory / 1e9,
        "worst": errors.get(worst, 0.0),
        "worst layer": worst,
        "largest errors": dict(sorted(errors.items(), key=lambda pair: -pair[1])[:12]),
        "median": statistics.median(errors.values()) if errors else 0.0,
        "layers": len(report.layers()),
        "notes": [note[:200] for note in report.meta.get("notes", [])],
    }


def resnet18_calls(text: str, device: torch.device) -> dict[str, Any]:
    """`resnet18[:samples]`: default measures as they are, with other batch sizes, and BackPACK's diagonal."""
    samples = int([*text.split(":"), "2000"][1])
    model = flatness.models.resnet18(seed=0).to(device).eval()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 3, 32, 32, generator=generator).to(device)
    y = torch.randint(10, (samples,), generator=generator).to(device)

    def own(**options: Any) -> Callable[[], Any]:
        return lambda: flatness.measure(model, (x, y), progress=False, **options)

    sizes = (128, 256, 512) if device.type == "cuda" else (16, 64)
    calls = {"default": own()} | {f"batch {size}": own(batch_size=size) for size in sizes}
    backpack = peer("backpack")
    if backpack is not None:
        rival = Diagonal(backpack, model)
        size = best_batch(lambda size: rival(x, y, size), samples, device, turns=1, first=16)
        calls[f"BackPACK {size}"] = lambda: rival(x, y, size)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(4):
        for name, action in calls.items():
            try:
                time_taken = seconds(action, device)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                time_taken = float("inf")
            if turn:
                taken[name].append(time_taken)
    return {"call": text} | {name: statistics.median(times) for name, times in taken.items()}


class Diagonal:
    """The Gauss-Newton diagonal by BackPACK, on a copy of the model that BackPACK has rewritten."""

    def __init__(self, backpack: Any, model: nn.Module) -> None:
        from backpack.extensions import DiagGGNExact

        self.backpack, self.extension = backpack, DiagGGNExact
        self.model = backpack.extend(copy.deepcopy(model), use_converter=True).eval()
        self.loss = backpack.extend(nn.CrossEntropyLoss(reduction="sum"))

    def __call__(self, x: Tensor, y: Tensor, size: int) -> list[Tensor]:
        total = [torch.zeros_like(p) for p in self.model.parameters()]
        for inputs, labels in zip(x.split(size), y.split(size), strict=True):
            with warnings.catch_warnings(), self.backpack.backpack(self.extension()):
                warnings.simplefilter("ignore")
                self.loss(self.model(inputs), labels).backward()
            for held, parameter in zip(total, self.model.parameters(), strict=True):
                held += parameter.diag_ggn_exact / len(x)
                del parameter.diag_ggn_exact
                parameter.grad = None
        return total


def products(networks: Networks, text: str) -> dict[str, Any]:
    """One Hessian product of all parameters, `products[:samples]`: flatness, curvlinops, and a gradient."""
    samples = int([*text.split(":"), "4"][1])
    model, data, device = networks.model("gpt2"), networks.data("gpt2", samples), networks.device
    x, y = data[:samples]
    found: dict[str, Any] = {"call": text}
    unit, _, memory = gradient_unit(model, data, device)
    found |= {"gradient s": unit * samples, "gradient GB": memory / 1e9}

    def flat(count: int) -> Callable[[], Any]:
        # The tolerance is out of reach, so that all products are made; the micro-batch is flatness's choice.
        options = {"max_products": count, "tolerance": 1e-12, "progress": False}
        return lambda: flatness.network_spectrum(model, (x, y), **options)

    def timed(action: Callable[[], Any]) -> float:
        return seconds(action, device)

    timed(flat(2))
    few, many = timed(flat(2)), timed(flat(12))
    found |= {"flatness product s": (many - few) / 10, "flatness before s": few - 2 * (many - few) / 10}
    if device.type == "cuda":
        found["flatness GB"] = peak_memory(flat(3), device) / 1e9
    curvlinops = peer("curvlinops")
    if curvlinops is not None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        class Loss(nn.CrossEntropyLoss):
            """Cross-entropy over tokens."""

            def forward(self, input: Tensor, target: Tensor) -> Tensor:
                return super().forward(input.flatten(0, -2), target.flatten())

        parameters = [p for p in model.parameters() if p.requires_grad]
        # deterministic data, checked by ourselves
        with sdpa_kernel(SDPBackend.MATH):
            batch = [(x.to(device), y.to(device))]
            try:
                operator = curvlinops.HessianLinearOperator(
                    model, Loss(), parameters, batch, check_deterministic=False, num_data=samples
                )
            except TypeError:
                named = {n: p for n, p in model.named_parameters() if p.requires_grad}
                operator = curvlinops.HessianLinearOperator(
                    model, Loss(), named, batch, check_deterministic=False, num_data=samples
                )
            vector = torch.randn(operator.shape[1], device=device)
            timed(lambda: operator @ vector)
            found["curvlinops product s"] = min(timed(lambda: operator @ vector) for _ in range(3))
            if device.type == "cuda":
                found["curvlinops GB"] = peak_memory(lambda: operator @ vector, device) / 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("calls", nargs="+")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small networks, to try the script")
    parser.add_argument("--train-seconds", type=float, default=60)
    parser.add_argument("--limit", type=float, default=120, help="seconds after which a call is given up")
    parser.add_argument("--profile", action="store_true", help="print the operators that take the time")
    given = parser.parse_args()
    full_precision()
    device = torch.device(given.device)
    print(machine(device), flush=True)
    networks = Networks(device, given.tiny, given.train_seconds)
    rows = []
    for call in given.calls:
        try:
            kind = call.split(":")[0]
            if kind != "resnet18":
                networks.model("gpt2" if kind == "products" else kind)  # trained here
            stream()
            with alarm(given.limit), profiled(given.profile, device):
                if kind == "resnet18":
                    rows.append(resnet18_calls(call, device))
                else:
                    rows.append((products if kind == "products" else measured)(networks, call))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            traceback.print_exc(limit=-6)
            rows.append({"call": call, "failed": repr(error)[:300]})
        print(json.dumps(rows[-1], default=str), flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if "OUT" in os.environ:
            Path(os.environ["OUT"], "large_networks.json").write_text(json.dumps(rows, indent=1, default=str))


class alarm:  # noqa: N801
    """Raise TimeoutError after so many seconds."""

    def __init__(self, limit: float) -> None:
        self.limit = int(limit)

    def __enter__(self) -> None:
        import signal

        def ring(*_: object) -> None:
            raise TimeoutError(f"no answer in {self.limit} s")

        signal.signal(signal.SIGALRM, ring)
        signal.alarm(self.limit)

    def __exit__(self, *_: object) -> None:
        import signal

        signal.alarm(0)


class profiled:  # noqa: N801
    """Print the operators that take most of the time."""

    def __init__(self, active: bool, device: torch.device) -> None:
        self.active, self.device, self.found = active, device, None

    def __enter__(self) -> None:
        if self.active:
            self.found = torch.profiler.profile()
            self.found.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.found is not None:
            self.found.__exit__(*error)
            key = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
            print(
                self.found.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=60),
                flush=True,
            )


if __name__ == "__main__":
    main()
