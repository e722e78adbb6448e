"""Which gradients to communicate together: neighbouring layers, by latency, bandwidth and measured times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from .layout import ParamSpec, Plan, _Piece, _plan_of, _split, plan_threshold
from .predict import predict_iteration_s
from .profile import Link, Profile, dear_bound_s
from .schedule import plan_dear

__all__ = ["merge_for_dear", "merged_layers", "plan_groups", "plan_partitions"]

MIB = 1024 * 1024
SPLITS_MIB = (25.0, 8.0, 2.0, 0.5)  # larger tensors are cut: the step of a part runs under the reduction of the next
THRESHOLDS_MIB = (0.0625, 0.25, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 64.0, 256.0)
DIVISORS = (2, 3, 4, 6, 8, 12, 16, 32, 64)  # of the model: what is small in MiB can still be cut
NUM_IMPROVED = 4  # of the best groups that one begins with: single moves end in different ones
MAX_TRIALS = 50  # predictions of single moves from each of them; one takes a few milliseconds
WORTH = 1e-4  # of the iteration: what a move has to gain
BUCKET_WORTH = 2.5e-4  # of the iteration: what each bucket more has to gain, for the host work that no profile knows


def plan_groups(
    params: Sequence[ParamSpec],
    num_shards: int,
    groups: Iterable[Sequence[int]],
    fusion: str,
    split_bytes: float = math.inf,
) -> Plan:
    """One bucket for each group of positions in `params` (one for each dtype where a group has several).

    A tensor of more than `split_bytes` gets buckets of its own; it has to be alone in its group.
    """
    pieces: list[list[_Piece]] = []
    for group in groups:
        if len(group) == 1 and params[group[0]].num_bytes > split_bytes:
            pieces.extend([piece] for piece in _split(group[0], params[group[0]], num_shards, split_bytes))
            continue
        by_dtype: dict[object, list[_Piece]] = {}
        for position in sorted(group):
            spec = params[position]
            by_dtype.setdefault(spec.dtype, []).append(_Piece(position, spec, 0, spec.numel))
        pieces.extend(by_dtype.values())
    return _plan_of(pieces, num_shards, fusion)


def plan_partitions(params: Sequence[ParamSpec], num_shards: int, partition_numel: int) -> Plan:
    """One bucket for each tensor, or for each part of a tensor that has more than `partition_numel` elements."""
    pieces: list[list[_Piece]] = []
    for position, spec in enumerate(params):
        if spec.numel > partition_numel:
            parts = _split(position, spec, num_shards, partition_numel * spec.dtype.itemsize)
            pieces.extend([part] for part in parts)
        else:
            pieces.append([_Piece(position, spec, 0, spec.numel)])
    return _plan_of(pieces, num_shards, f"partitions of {partition_numel} elements")


def merged_layers(profile: Profile, link: Link | None = None) -> list[list[int]]:
    """The groups of MG-WFBP (Shi et al., arXiv 1912.09268), in backward order. `link`: cost of the collective
    (default: an all-reduce).

    A gradient joins those before it if it is there before their collective could start, or less than a latency later.
    Example: alpha 1 s, beta 0, gradients ready at 1, 1.5 and 4 s. The second comes 0.5 s after the first could leave,
    so they merge; both would leave at 1.5 s and be done at 2.5 s, before the third comes: [[2, 1], [0]].
    """
    layers, ready_s = profile.layers, profile.ready_s()
    link = link or profile.all_reduce
    groups = [[len(layers) - 1]]
    num_bytes = layers[-1].num_bytes
    start_s = ready_s[-1]  # of the collective of the last group
    for earlier in reversed(range(len(layers) - 1)):
        end_s = start_s + link.time_s(num_bytes)
        wait_s = ready_s[earlier] - start_s  # if the group waited for this gradient
        pays = ready_s[earlier] < end_s and (wait_s < 0 or wait_s < link.alpha_s)
        if pays and layers[earlier].dtype == layers[earlier + 1].dtype:
            groups[-1].append(earlier)
            num_bytes += layers[earlier].num_bytes
            start_s = max(start_s, ready_s[earlier])
        else:
            groups.append([earlier])
            num_bytes = layers[earlier].num_bytes
            start_s = max(end_s, ready_s[earlier])
    return groups


def merge_for_dear(profile: Profile, params: Sequence[ParamSpec]) -> Plan:
    """A plan for one reduce-scatter in the backward and one all-gather in the next forward for each bucket.

    Both run in the same buckets and want different ones: in the backward a gradient should leave unless another latency
    is not worth it; in the forward the first buckets should be small. So groups are searched with the predictor: the
    best of fixed sizes and of MG-WFBP's rule, then single boundaries taken out or put in while that helps. So is the
    size above which a tensor (an embedding, most often) is cut into buckets of its own. Where the network idles, many
    buckets would look as good as few; each counts as a four-thousandth of the iteration.
    """
    candidates = [_contiguous([[i] for i in range(len(params))], len(params))]
    candidates.append(_contiguous(merged_layers(profile, profile.reduce_scatter), len(params)))
    specs = profile.specs()
    num_bytes = sum(spec.num_bytes for spec in specs)
    for threshold_bytes in (*(mib * MIB for mib in THRESHOLDS_MIB), *(num_bytes / num for num in DIVISORS)):
        plan = plan_threshold(specs, 1, threshold_bytes)
        starts = {slot.param for bucket in plan.buckets for slot in bucket.slots[:1]}
        candidates.append(_contiguous([[start] for start in starts], len(params)))
    searches = [_Search(profile, split_bytes) for split_bytes in _split_sizes(params)]
    begun = sorted(itertools.product(searches, dict.fromkeys(candidates)), key=lambda pair: pair[0].cost_s(pair[1]))
    ended = [(search, search.improve(starts)) for search, starts in begun[:NUM_IMPROVED]]
    search, best = min(ended, key=lambda pair: pair[0].cost_s(pair[1]))
    groups = _groups(best, params, search.split_bytes)
    return plan_groups(params, profile.world_size, groups, "merged for both halves", search.split_bytes)


def _split_sizes(params: Sequence[ParamSpec]) -> list[float]:
    """The first cuts as little as possible; the others are those by which some tensor is cut."""
    largest = max(spec.num_bytes for spec in params)
    sizes = [mib * MIB for mib in SPLITS_MIB]
    return [sizes[0], *(size for size in sizes[1:] if size < largest)]


class _Search:
    """Groups are given by the positions at which they start."""

    def __init__(self, profile: Profile, split_bytes: float) -> None:
        self.split_bytes = split_bytes
        # one shard: what is predicted is the same, and plans are made faster
        self._profile = replace(profile, step_s_per_byte=profile.step_s_per_byte / profile.world_size, world_size=1)
        self.params = profile.specs()
        self._known: dict[frozenset[int], float] = {}

    def cost_s(self, starts: frozenset[int]) -> float:
        """The predicted time, and what is counted for buckets."""
        if starts not in self._known:
            groups = _groups(starts, self.params, self.split_bytes)
            plan = plan_groups(self.params, 1, groups, "candidate", self.split_bytes)
            time_s = predict_iteration_s(self._profile, plan, plan_dear(plan))
            self._known[starts] = time_s * (1 + BUCKET_WORTH * len(plan.buckets))
        return self._known[starts]

    def improve(self, starts: frozenset[int]) -> frozenset[int]:
        """Tries boundaries from the first layers on, which nothing hides, until no single one helps."""
        best_s, num_trials = self.cost_s(starts), 0
        if best_s <= dear_bound_s(self._profile) * (1 + BUCKET_WORTH):
            return starts
        improved = True
        while improved:
            improved = False
            for change in [*sorted(starts - {0}), *self._middles(starts)]:
                if num_trials == MAX_TRIALS:
                    return starts
                num_trials += 1
                candidate = starts ^ {change}
                if self.cost_s(candidate) < best_s * (1 - WORTH):
                    starts, best_s, improved = candidate, self.cost_s(candidate), True
        return starts

    def _middles(self, starts: frozenset[int]) -> list[int]:
        """For each group of several, the position that halves its bytes."""
        found = []
        for group in _groups(starts, self.params, self.split_bytes):
            half = sum(self.params[i].num_bytes for i in group) / 2
            before = 0.0
            for position in group[:-1]:
                before += self.params[position].num_bytes
                if before >= half or position == group[-2]:
                    found.append(position + 1)
                    break
        return found


def _contiguous(groups: Iterable[Sequence[int]], num_params: int) -> frozenset[int]:
    return frozenset({0, *(min(group) for group in groups)} & set(range(num_params)))


def _groups(starts: frozenset[int], params: Sequence[ParamSpec], split_bytes: float) -> list[list[int]]:
    """Groups of positions; a tensor that will be split is alone."""
    cuts = set(starts)
    for position, spec in enumerate(params):
        if spec.num_bytes > split_bytes:
            cuts |= {position, position + 1}
    bounds = [*sorted(cut for cut in cuts if cut < len(params)), len(params)]
    return [list(range(start, end)) for start, end in itertools.pairwise(bounds)]
