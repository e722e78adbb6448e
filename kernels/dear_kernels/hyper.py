"""Hyper-parameters of the step kernels: one small frozen record per parameter group."""

from dataclasses import dataclass

__all__ = ["AdamHyper", "SGDHyper"]


@dataclass(frozen=True, slots=True)
class SGDHyper:
    """What `torch.optim.SGD` keeps per parameter group, as plain Python numbers (never tensors)."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """What `torch.optim.Adam` and `AdamW` keep per parameter group, as plain Python numbers (never tensors).

    `decoupled_weight_decay=True` is AdamW: the decay shrinks the parameter; False adds it to the gradient.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    decoupled_weight_decay: bool = False
