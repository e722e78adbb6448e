"""Plain-PyTorch twins of the kernels: the oracle in tests, the CPU path, the thing to read first.

Same signatures and same contracts as the public functions in `dispatch.py`. The optimizer twins issue the operators of
torch.optim's single-tensor path (foreach=False, fused=False) in the same order, so their results are the same bits.
They walk a shard in chunks that stay in cache and join neighbouring segments, which changes no bit of fp32 and fp64.
(For bf16 and fp16 parameters it may: PyTorch's `add_(alpha=)` rounds otherwise in a vector's body than in its tail.)
"""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from dear_kernels.checks import check_adam, check_norm, check_sgd, check_sum_rows
from dear_kernels.hyper import AdamHyper, SGDHyper
from dear_kernels.segments import Run, Segment, SegmentTable, StepTable, compute_dtype

__all__ = [
    "adam_step_",
    "found_nonfinite",
    "norm_stats",
    "pack_",
    "sgd_step_",
    "sum_of_squares",
    "sum_rows_",
    "unpack_",
]

# Elements per thread of one chunk of a step. Origin: AdamW on 8 M fp32 elements, one thread of an AMD EPYC with 1 MiB
# of L2: 11.9 ms with 65536, 10.8 with 131072, 10.5 with 262144, 12.5 in one piece; torch's single-tensor AdamW 38.
CHUNK_NUMEL = 131072


# ---------------------------------------------------------------------------------------------------- pack, unpack


class _FlatViews:
    """Views of one flat buffer, one list entry per tensor, kept between calls.

    A tensor that stands in one piece has a view of its own shape and can be copied by one foreach operator with all
    the others; only cut tensors are taken apart on each call.
    """

    def __init__(self, flat: Tensor, table: SegmentTable) -> None:
        table.check_flat(flat)
        self._table = table
        self.pieces = [flat.narrow(0, s.offset, s.numel) for s in table.segments]
        self._shapes: list[torch.Size | None] = [None] * table.num_tensors
        self._wholes: list[Tensor | None] = [None] * table.num_tensors
        self._complete: tuple[list[torch.Size], list[Tensor]] | None = None  # one attribute: threads may share a table
        self.extents = [flat.narrow(0, begin, end - begin) for begin, end in _merge_extents(table.segments)]
        self.flag_index = torch.tensor(table.flags, dtype=torch.int64, device=flat.device)

    def all_wholes(self, tensors: Sequence[Tensor | None]) -> list[Tensor] | None:
        """The views of all tensors if none is missing or cut and the shapes are those of the last call."""
        complete = self._complete
        if complete is None or [None if t is None else t.shape for t in tensors] != complete[0]:
            return None
        return complete[1]

    def match(self, tensors: Sequence[Tensor | None]) -> "_Match":
        """Sorts list entries into whole ones, cut ones and missing ones."""
        match = _Match([], [], [], [])
        for index, tensor in enumerate(tensors):
            if tensor is None:
                match.missing.append(index)
                continue
            if self._shapes[index] != tensor.shape:
                self._bind(index, tensor)
            whole = self._wholes[index]
            if whole is None:
                match.cut.append(index)
            else:
                match.tensors.append(tensor)
                match.views.append(whole)
        if len(match.tensors) == len(tensors):
            self._complete = ([t.shape for t in match.tensors], match.views)
        return match

    def _bind(self, index: int, tensor: Tensor) -> None:
        self._table.check_tensor(index, tensor)
        indices = self._table.by_tensor[index]
        segment = self._table.segments[indices[0]] if len(indices) == 1 else None
        is_whole = segment is not None and segment.start == 0 and segment.numel == tensor.numel()
        self._wholes[index] = self.pieces[indices[0]].view(tensor.shape) if is_whole else None
        self._shapes[index] = tensor.shape


def _merge_extents(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """(begin, end) of the stretches of the flat buffer that segments cover without a gap."""
    merged: list[tuple[int, int]] = []
    for segment in sorted(segments, key=lambda s: s.offset):
        end = segment.offset + segment.numel
        if merged and merged[-1][1] == segment.offset:
            merged[-1] = (merged[-1][0], end)
        elif segment.numel:
            merged.append((segment.offset, end))
    return merged


class _Match:
    __slots__ = ("cut", "missing", "tensors", "views")

    def __init__(self, tensors: list[Tensor], views: list[Tensor], cut: list[int], missing: list[int]) -> None:
        self.tensors = tensors
        self.views = views
        self.cut = cut
        self.missing = missing


def _flat_views(flat: Tensor, table: SegmentTable) -> _FlatViews:
    # Holding views keeps the storage alive, so an address cannot come to mean another buffer.
    key = (flat.data_ptr(), flat.numel(), flat.dtype, flat.is_contiguous(), flat.device)
    return table.flats.get(key, lambda: _FlatViews(flat, table))


@torch.no_grad()
def pack_(flat: Tensor, tensors: Sequence[Tensor | None], table: SegmentTable, *, scale: float = 1.0) -> None:
    """Twin of `dear_kernels.pack_`."""
    table.check_length(tensors)
    views = _flat_views(flat, table)
    if views.flag_index.numel():
        flat.index_fill_(0, views.flag_index, 1)
    if scale != 1.0 and all(t is None or _rounds_once_in_place(flat.dtype, t.dtype) for t in tensors):
        pack_(flat, tensors, table)
        for extent in views.extents:  # a few long ones, where the segments may be many and short
            extent.mul_(scale)
        return
    wholes = views.all_wholes(tensors)
    if wholes is not None:
        _copy_scaled(wholes, list(tensors), scale)  # type: ignore[arg-type]
        return
    match = views.match(tensors)
    targets, sources = list(match.views), list(match.tensors)
    for index in match.cut:
        for segment, piece in _pieces(table, views, index):
            targets.append(piece)
            sources.append(tensors[index].reshape(-1).narrow(0, segment.start, segment.numel))  # type: ignore[union-attr]
    _copy_scaled(targets, sources, scale)
    if match.missing:
        _clear_missing(flat, table, views, match.missing)


def _pieces(table: SegmentTable, views: _FlatViews, tensor: int) -> list[tuple[Segment, Tensor]]:
    return [(table.segments[i], views.pieces[i]) for i in table.by_tensor[tensor]]


def _clear_missing(flat: Tensor, table: SegmentTable, views: _FlatViews, missing: list[int]) -> None:
    indices = [i for tensor in missing for i in table.by_tensor[tensor]]
    if indices:
        torch._foreach_zero_([views.pieces[i] for i in indices])
    flags = [table.segments[i].flag for i in indices if table.segments[i].flag >= 0]
    if flags:
        flat.index_fill_(0, torch.tensor(flags, dtype=torch.int64, device=flat.device), 0)


@torch.no_grad()
def unpack_(tensors: Sequence[Tensor | None], flat: Tensor, table: SegmentTable, *, scale: float = 1.0) -> None:
    """Twin of `dear_kernels.unpack_`."""
    table.check_length(tensors)
    views = _flat_views(flat, table)
    wholes = views.all_wholes(tensors)
    if wholes is not None:
        _copy_scaled(list(tensors), wholes, scale)  # type: ignore[arg-type]
        return
    match = views.match(tensors)
    _copy_scaled(match.tensors, match.views, scale)
    for index in match.cut:
        tensor: Tensor = tensors[index]  # type: ignore[assignment]
        row_major = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
        pieces = _pieces(table, views, index)
        _copy_scaled([row_major.narrow(0, s.start, s.numel) for s, _ in pieces], [p for _, p in pieces], scale)
        if not tensor.is_contiguous():  # row_major was a copy
            tensor.copy_(row_major.view(tensor.shape))


def _copy_scaled(targets: list[Tensor], sources: list[Tensor], scale: float) -> None:
    """targets = (sources in the compute dtype * scale), rounded once to the dtype of each target."""
    if not targets:
        return
    if scale == 1.0:
        torch._foreach_copy_(targets, sources)
        return
    pairs: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        group = pairs.setdefault((target.dtype, source.dtype), ([], []))
        group[0].append(target)
        group[1].append(source)
    for (target_dtype, source_dtype), (group_targets, group_sources) in pairs.items():
        dtype = compute_dtype(target_dtype, source_dtype)
        if target_dtype == dtype:
            torch._foreach_copy_(group_targets, group_sources)
            torch._foreach_mul_(group_targets, scale)
        else:  # never _foreach_mul_ on bf16 or fp16: it rounds the scale itself to their few digits
            scaled = torch._foreach_mul([s.to(dtype) for s in group_sources], scale)
            torch._foreach_copy_(group_targets, scaled)


def _rounds_once_in_place(target: torch.dtype, source: torch.dtype) -> bool:
    """Whether copying and then scaling in `target` rounds as scaling in the compute dtype and then casting does.

    So it is if the copy is exact: PyTorch multiplies bf16 and fp16 by a number in fp32 and rounds once.
    """
    return target == source or target == compute_dtype(target, source)


# ------------------------------------------------------------------------------------------------ optimizer steps


class _Scratch(threading.local):
    """Chunk-sized work space of one thread, kept between steps so that a step allocates nothing."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def get(self, slot: int, like: Tensor, numel: int) -> Tensor:
        """Work space `slot` of `numel` elements with the dtype and device of `like`; the content is anything."""
        key = (slot, like.dtype, like.device)
        found = self._tensors.get(key)
        if found is None or found.numel() < numel:
            found = self._tensors[key] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return found if found.numel() == numel else found.narrow(0, 0, numel)


def _chunks(run: Run) -> range:
    return range(run.offset, run.offset + run.numel, _chunk_numel())


def _chunk_numel() -> int:
    return CHUNK_NUMEL * torch.get_num_threads()


def _used_list(used: Tensor | None) -> list[float] | None:
    """Which segments are used; None for all of them."""
    if used is None:
        return None
    values: list[float] = used.tolist()
    return None if all(values) else values


def _count_steps_(steps: Tensor, used: Tensor | None, counted: Tensor | None) -> None:
    """steps += 1 where a segment is used and (if given) `counted`."""
    if used is None and counted is None:
        steps.add_(1)
    elif used is None:
        steps.add_(counted)  # type: ignore[arg-type]
    else:
        where = used != 0
        steps.add_(where if counted is None else where & counted)


@torch.no_grad()
def sgd_step_(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    table: StepTable,
    hyper: Sequence[SGDHyper],
    steps: Tensor,
    used: Tensor | None = None,
    *,
    low_precision_param: Tensor | None = None,
) -> None:
    """Twin of `dear_kernels.sgd_step_`."""
    check_sgd(param, grad, momentum_buffer, table, hyper, steps, used, low_precision_param)
    used_list = _used_list(used)
    steps_list = steps.tolist()
    scratch = _scratch
    for run in table.runs([1.0 if s else 0.0 for s in steps_list], used_list):
        h = hyper[run.group]
        is_first = steps_list[run.segment] == 0
        end = run.offset + run.numel
        for begin in _chunks(run):
            numel = min(_chunk_numel(), end - begin)
            p = param.narrow(0, begin, numel)
            buffer = None if momentum_buffer is None else momentum_buffer.narrow(0, begin, numel)
            _sgd_chunk(p, _grad_chunk(p, grad, begin, numel), buffer, h, is_first, scratch.get(1, p, numel))
            if low_precision_param is not None:
                low_precision_param.narrow(0, begin, numel).copy_(p)
    with_momentum = [h.momentum != 0 for h in hyper]
    if any(with_momentum):
        counted = None
        if not all(with_momentum):
            flags = [with_momentum[s.group] for s in table.segments]
            counted = torch.tensor(flags, dtype=torch.bool, device=steps.device)
        _count_steps_(steps, None if used_list is None else used, counted)


def _grad_chunk(p: Tensor, grad: Tensor, begin: int, numel: int) -> Tensor:
    chunk = grad.narrow(0, begin, numel)
    return chunk if chunk.dtype == p.dtype else _scratch.get(0, p, numel).copy_(chunk)


def _sgd_chunk(p: Tensor, g: Tensor, buffer: Tensor | None, h: SGDHyper, is_first: bool, scratch: Tensor) -> None:
    if h.maximize:
        g = torch.neg(g, out=scratch)
    if h.weight_decay != 0:
        g = torch.add(g, p, alpha=h.weight_decay, out=scratch)
    if h.momentum != 0:
        assert buffer is not None
        if is_first:
            buffer.copy_(g)
        else:
            buffer.mul_(h.momentum).add_(g, alpha=1 - h.dampening)
        g = torch.add(g, buffer, alpha=h.momentum, out=scratch) if h.nesterov else buffer
    p.add_(g, alpha=-h.lr)


@torch.no_grad()
def adam_step_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    table: StepTable,
    hyper: Sequence[AdamHyper],
    steps: Tensor,
    used: Tensor | None = None,
    *,
    low_precision_param: Tensor | None = None,
) -> None:
    """Twin of `dear_kernels.adam_step_`."""
    check_adam(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, table, hyper, steps, used, low_precision_param)
    used_list = _used_list(used)
    _count_steps_(steps, None if used_list is None else used, None)
    steps_list = steps.tolist()
    for run in table.runs(steps_list, used_list):
        h = hyper[run.group]
        step = steps_list[run.segment]
        end = run.offset + run.numel
        for begin in _chunks(run):
            numel = min(_chunk_numel(), end - begin)
            p = param.narrow(0, begin, numel)
            maximum = max_exp_avg_sq.narrow(0, begin, numel) if h.amsgrad and max_exp_avg_sq is not None else None
            _adam_chunk(
                p,
                _grad_chunk(p, grad, begin, numel),
                exp_avg.narrow(0, begin, numel),
                exp_avg_sq.narrow(0, begin, numel),
                maximum,
                h,
                step,
                _scratch.get(1, p, numel),
            )
            if low_precision_param is not None:
                low_precision_param.narrow(0, begin, numel).copy_(p)


def _adam_chunk(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, maximum: Tensor | None, h: AdamHyper, step: float, scratch: Tensor
) -> None:
    if h.maximize:
        g = torch.neg(g, out=scratch)
    if h.weight_decay != 0:
        if h.decoupled_weight_decay:
            p.mul_(1 - h.lr * h.weight_decay)
        else:
            g = torch.add(g, p, alpha=h.weight_decay, out=scratch)
    m.lerp_(g, 1 - h.beta1)
    v.mul_(h.beta2).addcmul_(g, g, value=1 - h.beta2)
    bias_correction1 = 1 - h.beta1**step
    bias_correction2 = 1 - h.beta2**step
    if maximum is not None:
        v = torch.maximum(maximum, v, out=maximum)
    denominator = torch.sqrt(v, out=scratch).div_(bias_correction2**0.5).add_(h.eps)
    p.addcdiv_(m, denominator, value=-(h.lr / bias_correction1))


_scratch = _Scratch()


# ---------------------------------------------------------------------------------------------------------- norms


@torch.no_grad()
def norm_stats(shard: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Twin of `dear_kernels.norm_stats`."""
    check_norm(shard, out)
    if out is None:
        out = torch.empty(2, dtype=torch.float64, device=shard.device)
    flat = shard.view(-1)
    total = torch.zeros((), dtype=torch.float64, device=shard.device)
    for begin in range(0, flat.numel(), CHUNK_NUMEL):
        chunk = flat.narrow(0, begin, min(CHUNK_NUMEL, flat.numel() - begin))
        wide = chunk if chunk.dtype == torch.float64 else _scratch.get(0, total, chunk.numel()).copy_(chunk)
        total += torch.dot(wide, wide)
    out[0] = total
    out[1] = _found_nonfinite(flat, total)
    return out


def _found_nonfinite(flat: Tensor, sum_of_squares_fp64: Tensor) -> Tensor:
    if flat.dtype != torch.float64 or not flat.numel():
        # The squares of finite values of the narrower dtypes cannot overflow in fp64: one pass serves both.
        return ~sum_of_squares_fp64.isfinite()
    low, high = torch.aminmax(flat)  # both are NaN as soon as one element is
    return ~(low.isfinite() & high.isfinite())


def sum_of_squares(shard: Tensor) -> Tensor:
    """Twin of `dear_kernels.sum_of_squares`."""
    return norm_stats(shard)[0]


def found_nonfinite(shard: Tensor) -> Tensor:
    """Twin of `dear_kernels.found_nonfinite`."""
    return norm_stats(shard)[1].to(torch.float32)


@torch.no_grad()
def sum_rows_(output: Tensor, rows: Tensor, divisor: int) -> None:
    """Twin of `dear_kernels.sum_rows_`."""
    check_sum_rows(output, rows, divisor)
    output.copy_(rows[0])
    for row in rows[1:]:
        output.add_(row)
    if divisor != 1:
        output.div_(divisor)
