"""The paper's five models themselves, trained on synthetic batches: a workload of `compare`.

ResNet-50 and DenseNet-201 are torchvision's, Inception-v4 is bench/inception.py, the BERTs are transformers' with their
pre-training heads and a sequence length of 64. No dropout, so that every method sees the same gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dear
from bench.inception import InceptionV4
from bench.methods import Trainee
from dearcore.layout import ParamSpec
from dearcore.profile import Link, Profile, layer_times

__all__ = ["MODELS", "Real", "blocks_of", "make_batch", "make_model"]

TOKENS, VOCABULARY, NUM_CLASSES = 64, 30_528, 1000
IMAGE_SIDE = {"inception-v4": 299}  # pixels; the others 224
BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


class _Classifier(nn.Module):
    """Calls a model and its loss, so that every wrapper sees one module that returns a number."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(images), targets)


class _PreTraining(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, is_next: torch.Tensor) -> torch.Tensor:
        output = self.model(input_ids=tokens, labels=labels, next_sentence_label=is_next)
        return output.loss  # type: ignore[no-any-return]


def _torchvision(name: str) -> nn.Module:
    import torchvision  # type: ignore[import-untyped,unused-ignore]

    return _Classifier(getattr(torchvision.models, name)(num_classes=NUM_CLASSES))


def _bert(**options: Any) -> nn.Module:
    from transformers import BertConfig, BertForPreTraining  # type: ignore[import-not-found,unused-ignore]

    config = BertConfig(vocab_size=VOCABULARY, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options)
    return _PreTraining(BertForPreTraining(config))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": lambda: _torchvision("resnet50"),
    "densenet201": lambda: _torchvision("densenet201"),
    "inception-v4": lambda: _Classifier(InceptionV4(NUM_CLASSES)),
    "bert-base": _bert,
    "bert-large": lambda: _bert(**BERT_LARGE),
}


def make_model(name: str) -> nn.Module:
    """A module that takes a batch of `make_batch` and returns the loss; the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name]()


def make_batch(name: str, batch: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    if name.startswith("bert"):
        tokens = torch.randint(0, VOCABULARY, (batch, TOKENS), generator=generator)
        labels = torch.randint(0, VOCABULARY, (batch, TOKENS), generator=generator)
        return tokens, labels, torch.randint(0, 2, (batch,), generator=generator)
    side = IMAGE_SIDE.get(name, 224)
    images = torch.randn(batch, 3, side, side, generator=generator)
    return images, torch.randint(0, NUM_CLASSES, (batch,), generator=generator)


@dataclass(slots=True)
class _Stamps:
    """When parameters were needed and gradients ready, in one iteration."""

    needed_s: dict[str, float] = field(default_factory=dict)
    ready_s: dict[str, float] = field(default_factory=dict)


class Real:
    """Weights of different methods are equal to rounding: sums of gradients are taken in different orders."""

    exact = False
    warmup_scales = (0.0,)  # gradients of zero: weights stay
    scales = (1.0,)

    def __init__(self, name: str, batch: int) -> None:
        self._name = name
        self._device = dear.device()
        self._batch = tuple(part.to(self._device) for part in make_batch(name, batch, 1 + dist.get_rank()))
        self._spans: list[tuple[str, float, float]] | None = None

    def make(self) -> tuple[nn.Module, Sequence[nn.Module]]:
        model = make_model(self._name).to(self._device)
        return model, blocks_of(model)

    def forward(self, trainee: Trainee) -> torch.Tensor:
        start_s = self._now_s()
        loss = trainee.forward(*self._batch)
        self._note("forward", start_s)
        return loss

    def backward(self, result: torch.Tensor, scale: float) -> None:
        start_s = self._now_s()
        (result * scale).backward()  # type: ignore[no-untyped-call]
        self._note("backward", start_s)

    def settle_memory(self, in_own_memory: bool) -> None:
        pass  # gradients are autograd's

    def spans(self, on: bool) -> list[tuple[str, float, float]]:
        spans, self._spans = self._spans or [], [] if on else None
        return spans

    def profile(self, trainee: Trainee, links: Sequence[Link]) -> Profile:
        stamps = _Stamps()
        handles: list[Any] = []
        names = {id(param): name for name, param in trainee.model.named_parameters()}
        specs = [
            ParamSpec(i, name, tuple(param.shape), param.dtype)
            for i, (name, param) in enumerate(trainee.model.named_parameters())
        ]

        def needed(module: nn.Module, _: Any) -> None:
            now_s = self._now_s(exactly=True)
            for param in module.parameters(recurse=False):
                stamps.needed_s.setdefault(names[id(param)], now_s)

        def ready(param: torch.Tensor) -> None:
            stamps.ready_s[names[id(param)]] = self._now_s(exactly=True)

        for module in trainee.model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                handles.append(module.register_forward_pre_hook(needed))
        handles += [param.register_post_accumulate_grad_hook(ready) for param in trainee.model.parameters()]
        trainee.optimizer.zero_grad()
        loss = self.forward(trainee)
        forward_end_s = self._now_s(exactly=True)
        self.backward(loss, 1.0)
        for handle in handles:
            handle.remove()
        times = layer_times(specs, stamps.needed_s, forward_end_s, forward_end_s, stamps.ready_s)
        return Profile(times, dist.get_world_size(), *links)

    def _now_s(self, exactly: bool = False) -> float:
        if exactly and self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _note(self, name: str, start_s: float) -> None:
        if self._spans is not None:
            self._spans.append((name, start_s, time.perf_counter()))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """What FSDP2 wraps: members of sequences that have parameters and are no sequences themselves."""
    blocks: list[nn.Module] = []
    for child in model.children():
        if isinstance(model, (nn.Sequential, nn.ModuleList)) and not isinstance(child, (nn.Sequential, nn.ModuleList)):
            if next(child.parameters(), None) is not None:
                blocks.append(child)
        else:
            blocks += blocks_of(child)
    return blocks
