"""dear: the data-parallel optimizer that hides all of its communication.

dear.init()
model = Net().to(dear.device())
optimizer = dear.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
"""

from dearcore.errors import ArgumentError, CommunicatorError, DearError, ScheduleError
from dearcore.layout import NearbyLayers, Plan
from dearcore.profile import Profile
from dearcore.schedule import Schedule

from .collectives import (
    Average,
    Max,
    Min,
    ReduceOp,
    Sum,
    allgather,
    allreduce,
    barrier,
    broadcast,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    reduce_scatter,
)
from .context import device, init, is_initialized, local_rank, local_size, rank, shutdown, size
from .optimizer import DistributedOptimizer
from .stats import Stats
from .timeline import Timeline

__all__ = [
    "ArgumentError",
    "Average",
    "CommunicatorError",
    "DearError",
    "DistributedOptimizer",
    "Max",
    "Min",
    "NearbyLayers",
    "Plan",
    "Profile",
    "ReduceOp",
    "Schedule",
    "ScheduleError",
    "Stats",
    "Sum",
    "Timeline",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "device",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "reduce_scatter",
    "shutdown",
    "size",
]
