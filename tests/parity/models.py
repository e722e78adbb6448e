"""Models and optimizers of the parity ring that `tests.support.reference` does not have."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class WideMLP(nn.Module):
    """7 -> 129 -> 251 -> 5: 34,925 elements, so that 0.1 MiB makes several buckets and splits a tensor."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.fc1 = nn.Linear(7, 129)
            self.fc2 = nn.Linear(129, 251)
            self.fc3 = nn.Linear(251, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))
        return y

    def example(self, generator: torch.Generator, num_samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(num_samples, 7, generator=generator), torch.randn(num_samples, 5, generator=generator)


class Matrices(nn.Module):
    """Two linear layers without bias, for optimizers that take matrices only."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.fc1 = nn.Linear(7, 12, bias=False)
            self.fc2 = nn.Linear(12, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(torch.tanh(self.fc1(x)))
        return y

    def example(self, generator: torch.Generator, num_samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(num_samples, 7, generator=generator), torch.randn(num_samples, 5, generator=generator)


class Transposed(nn.Module):
    """A matrix that is stored column by column, one with permuted dimensions, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(7, 6, generator=generator).t())
        self.cube = nn.Parameter(torch.randn(3, 5, 6, generator=generator).permute(1, 2, 0))
        self.bias = nn.Parameter(torch.randn(5, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.matrix.t())
        return torch.einsum("bi,oic->bo", hidden, self.cube) + self.bias

    def example(self, generator: torch.Generator, num_samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(num_samples, 7, generator=generator), torch.randn(num_samples, 5, generator=generator)


class MixedDtypes(nn.Module):
    """fp32, bf16 and fp64 layers one after the other, twice."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            dtypes = (torch.float32, torch.bfloat16, torch.float64) * 2
            self.layers = nn.ModuleList(nn.Linear(7, 7 if i < 5 else 5).to(d) for i, d in enumerate(dtypes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float()

    def example(self, generator: torch.Generator, num_samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(num_samples, 7, generator=generator), torch.randn(num_samples, 5, generator=generator)


class LayerwiseSGD(torch.optim.Optimizer):
    """LARS without its details: p -= lr * g * |p| / |g|. On a part of a parameter it would compute something else."""

    def __init__(self, params: object, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.grad.norm() > 0:
                    param.sub_(param.grad * (param.norm() / param.grad.norm()), alpha=group["lr"])


__all__ = ["LayerwiseSGD", "Matrices", "MixedDtypes", "Transposed", "WideMLP"]
