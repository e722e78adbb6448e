"""Inception-v4 (Szegedy et al., arXiv 1602.07261, figures 3 to 9), which torchvision does not have.

The names of its parameters are those of bench/shapes/inception-v4.json. Input: 299 x 299.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["InceptionV4"]

Step = tuple[int, str, int]  # channels, kernel "height x width", stride; stride 2 goes without padding, as 0 does


class InceptionV4(nn.Module):
    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _Conv(3, 32, "3x3", 2),
            _Conv(32, 32, "3x3", 0),
            _Conv(32, 64, "3x3", 1),
            _PoolBeside(_Conv(64, 96, "3x3", 2)),
            _Branches(
                branch0=_chain(160, (64, "1x1", 1), (96, "3x3", 0)),
                branch1=_chain(160, (64, "1x1", 1), (64, "1x7", 1), (64, "7x1", 1), (96, "3x3", 0)),
            ),
            _PoolBeside(_Conv(192, 192, "3x3", 2)),
            *(_block_a() for _ in range(4)),
            _reduction(
                _chain(384, (384, "3x3", 2)),
                _chain(384, (192, "1x1", 1), (224, "3x3", 1), (256, "3x3", 2)),
            ),
            *(_block_b() for _ in range(7)),
            _reduction(
                _chain(1024, (192, "1x1", 1), (192, "3x3", 2)),
                _chain(1024, (256, "1x1", 1), (256, "1x7", 1), (320, "7x1", 1), (320, "3x3", 2)),
            ),
            *(_BlockC() for _ in range(3)),
        )
        self.last_linear = nn.Linear(1536, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[batch, 3, height, width] -> [batch, classes]."""
        return self.last_linear(self.features(images).mean((2, 3)))  # type: ignore[no-any-return]


class _Conv(nn.Module):
    def __init__(self, num_in: int, num_out: int, kernel: str, stride: int) -> None:
        super().__init__()
        height, width = (int(n) for n in kernel.split("x"))
        padding = (height // 2, width // 2) if stride == 1 else (0, 0)
        self.conv = nn.Conv2d(num_in, num_out, (height, width), max(stride, 1), padding, bias=False)
        self.bn = nn.BatchNorm2d(num_out, eps=1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.bn(self.conv(x)))


def _chain(num_in: int, *steps: Step) -> nn.Sequential:
    convs = []
    for num_out, kernel, stride in steps:
        convs.append(_Conv(num_in, num_out, kernel, stride))
        num_in = num_out
    return nn.Sequential(*convs)


class _Branches(nn.Module):
    """What all branches make of one input, side by side."""

    def __init__(self, **branches: nn.Module) -> None:
        super().__init__()
        for name, branch in branches.items():
            self.add_module(name, branch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.children()], 1)


class _PoolBeside(nn.Module):
    def __init__(self, conv: _Conv) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([nn.functional.max_pool2d(x, 3, 2), self.conv(x)], 1)


def _pooled(chain: nn.Sequential) -> nn.Sequential:
    """The chain behind an average pool, which has no parameters: names stay the chain's."""
    chain.register_forward_pre_hook(_average)
    return chain


def _average(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return nn.functional.avg_pool2d(inputs[0], 3, 1, 1, count_include_pad=False)


def _block_a() -> nn.Module:
    return _Branches(
        branch0=_chain(384, (96, "1x1", 1)),
        branch1=_chain(384, (64, "1x1", 1), (96, "3x3", 1)),
        branch2=_chain(384, (64, "1x1", 1), (96, "3x3", 1), (96, "3x3", 1)),
        branch3=_pooled(_chain(384, (96, "1x1", 1))),
    )


def _block_b() -> nn.Module:
    return _Branches(
        branch0=_chain(1024, (384, "1x1", 1)),
        branch1=_chain(1024, (192, "1x1", 1), (224, "1x7", 1), (256, "7x1", 1)),
        branch2=_chain(1024, (192, "1x1", 1), (192, "7x1", 1), (224, "1x7", 1), (224, "7x1", 1), (256, "1x7", 1)),
        branch3=_pooled(_chain(1024, (128, "1x1", 1))),
    )


def _reduction(*chains: nn.Sequential) -> nn.Module:
    branches: Sequence[nn.Module] = (*chains, nn.MaxPool2d(3, 2))
    return _Branches(**{f"branch{i}": branch for i, branch in enumerate(branches)})


class _BlockC(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch0 = _chain(1536, (256, "1x1", 1))
        self.branch1_0 = _chain(1536, (384, "1x1", 1))
        self.branch1_1a = _chain(384, (256, "1x3", 1))
        self.branch1_1b = _chain(384, (256, "3x1", 1))
        self.branch2 = _chain(1536, (384, "1x1", 1), (448, "3x1", 1), (512, "1x3", 1))
        self.branch2_3a = _chain(512, (256, "1x3", 1))
        self.branch2_3b = _chain(512, (256, "3x1", 1))
        self.branch3 = _pooled(_chain(1536, (256, "1x1", 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        once, twice = self.branch1_0(x), self.branch2(x)
        parts = [self.branch0(x), self.branch1_1a(once), self.branch1_1b(once)]
        parts += [self.branch2_3a(twice), self.branch2_3b(twice), self.branch3(x)]
        return torch.cat(parts, 1)
