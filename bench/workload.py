"""A module with the parameters of a real network and next to no arithmetic, so that what surrounds it shows.

Each leaf module touches its parameters once in the forward. Its backward gives every parameter a gradient, a new tensor
of full size, by one multiplication: the same small work for every way to train it. All arithmetic is exact (gradients
are integers times the number of ranks), so that any order of summation gives the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["LayerNet", "ParamShape", "gradient_sources", "load_shapes", "scaled"]

ParamShape = tuple[str, tuple[int, ...]]  # name as in named_parameters(), shape


def load_shapes(network: str) -> list[ParamShape]:
    """The parameters of bench/shapes/<network>.json, in forward order."""
    stored = json.loads((Path(__file__).parent / "shapes" / f"{network}.json").read_text())
    return [(name, tuple(shape)) for name, shape in stored["parameters"]]


def scaled(shapes: Sequence[ParamShape], scale: float) -> list[ParamShape]:
    """As many tensors of as many dimensions, each with `scale` times the elements, at least one."""
    if scale == 1.0:
        return list(shapes)
    result = []
    for name, shape in shapes:
        numel = torch.Size(shape).numel()
        result.append((name, (max(1, round(numel * scale)), *(1 for _ in shape[1:]))))
    return result


def gradient_sources(shapes: Sequence[ParamShape], rank: int, num_ranks: int) -> list[torch.Tensor]:
    """What the gradients of this rank are multiples of; models may share them."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return [torch.randint(-8, 9, shape, generator=generator).to(torch.float32).mul_(num_ranks) for _, shape in shapes]


class LayerNet(nn.Module):
    """A tree of modules whose parameters have the names and shapes of `shapes`.

    `model(x)` with a number x returns x plus one element of each layer; `backward(c)` of that gives each parameter the
    gradient c times its source.
    """

    def __init__(self, shapes: Sequence[ParamShape], sources: Sequence[torch.Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        layers: dict[str, _Layer] = {}
        for (name, shape), source in zip(shapes, sources, strict=True):
            path, _, leaf = name.rpartition(".")
            if path not in layers:
                layers[path] = self._place(path)
            layers[path].add(leaf, torch.randint(-64, 65, shape, generator=generator) / 64, source)
        self._in_order = list(layers.values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self._in_order:
            x = layer(x)
        return x

    def _place(self, path: str) -> _Layer:
        *parents, last = path.split(".")
        owner: nn.Module = self
        for parent in parents:
            if parent not in owner._modules:
                owner.add_module(parent, nn.Module())
            owner = owner._modules[parent]  # type: ignore[assignment]
        layer = _Layer()
        owner.add_module(last, layer)
        return layer


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sources: list[torch.Tensor] = []
        self.leaf_names: list[str] = []

    def add(self, name: str, value: torch.Tensor, source: torch.Tensor) -> None:
        self.register_parameter(name, nn.Parameter(value))
        self.sources.append(source)
        self.leaf_names.append(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _CheapOp.apply(x, self.sources, *(getattr(self, name) for name in self.leaf_names))  # type: ignore[no-any-return]


class _CheapOp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sources: list[torch.Tensor], *params: torch.Tensor) -> torch.Tensor:
        ctx.sources = sources
        return x + torch.as_strided(params[0], (), ())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return (grad, None, *(torch.mul(source, grad) for source in ctx.sources))
