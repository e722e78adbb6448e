"""Draws programs, and says which ones make no sense: `draw(seed, ranks)`, `objection(program)`."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.differential.program import (
    NARROW,
    Backward,
    Broken,
    ClipNorm,
    ClipValue,
    Compare,
    CompareState,
    Copy,
    Edit,
    Evaluate,
    Exchange,
    Freeze,
    FullGrad,
    Layer,
    Load,
    Op,
    Optimizer,
    Options,
    Program,
    Replan,
    Rewrap,
    Save,
    SchedulerStep,
    SetGrad,
    SetLr,
    StepNow,
    Synchronize,
    Unscale,
    ZeroGrad,
    has_masters,
    is_sharded,
)

__all__ = ["LATER", "draw", "objection"]

# What the library is known not to do yet, by line of the list of field cases; take the name away when it is mended.
LATER: frozenset[str] = frozenset(
    {
        "readers",  # S1: a reader that waited for the gate of one step disarms the next one's (dear/parameters.py)
        # The first optimizer.zero_grad() after a step() does not ask the other ranks whether they have begun to reduce.
        # Where some have and others have not (an exception, a loop that zeroes by model.zero_grad() or not at all),
        # the ranks differ in what they have launched: Engine.zero_grad in dear/engine.py.
        "uneven, unzeroed",
        # Whole gradients (shard=False, LARS): after full_grad(), a clip or a step(), a backward onto the averages that
        # stand is taken for a mixture of cleared and kept ones where ranks differ in what they use (dear/replica.py).
        "uneven, onto whole averages",
        # Filling: what full_grad() has launched and thereby stepped is not taken back by zero_grad() where every
        # backward was local: Engine.zero_grad in dear/engine.py.
        "filling, looked at",
        "scaler, local",  # S4, H4: GradScaler where gradients of no_sync() are left when it unscales
    }
)

MEASURED = ("horovod", "mg-wfbp", "bytescheduler", "dear-fill")
FILLING = ("dear-fill", "all early")
MAX_TRIES = 200
_NOT_JOINED = (Broken, Compare, Edit, Exchange, Freeze, Load, Replan, Rewrap, Save, SchedulerStep)


def objection(p: Program) -> str:
    """Why this program is not one that must come out right, or ""."""
    ops = [op for step in p.steps for op in step]
    first = p.layers[0]
    if first.used != "always" or first.frozen or any(isinstance(op, Freeze) and op.layer == 0 for op in ops):
        return "every loss needs a gradient"
    for i, layer in enumerate(p.layers):
        if layer.tied_to >= 0:
            other = p.layers[layer.tied_to] if layer.tied_to < i else None
            if other is None or other.tied_to >= 0 or other.kind != "linear" or layer.kind != "linear":
                return "a layer is tied to an earlier linear one"
            if (other.sizes, other.dtype, other.frozen, other.strides) != (layer.sizes, layer.dtype, layer.frozen, ""):
                return "tied layers are alike"
        if layer.group >= len(p.optimizer.groups):
            return "a layer's group exists"
        if layer.dtype in NARROW and not p.whole_numbers:
            return "sums in narrow dtypes depend on their order"
        if layer.checkpointed and (p.whole_numbers or layer.kind in ("bare", "norm")):
            return "checkpointed are modules, and statistics count each forward"
        if (layer.strides == "channels_last") > (layer.kind == "conv"):
            return "channels_last is for convolutions"
        if layer.strides == "transposed" and (len(layer.sizes) != 2 or layer.kind not in ("linear", "bare")):
            return "only matrices are transposed"
    if p.options.reduce_dtype and not p.whole_numbers:
        return "rounding on the wire"
    return _objection_to_options(p, ops) or _objection_to_join(p) or _objection_to_loop(p, ops)


def _objection_to_options(p: Program, ops: list[Op]) -> str:
    fills = p.options.schedule in FILLING
    if p.options.fusion != "sized" and p.options.schedule not in ("dear", "dear-fill"):
        return "these schedules make their own plan"
    if fills and not is_sharded(p):
        return "filling steps shards"
    if fills and (p.scaler or p.join or any(isinstance(op, ClipNorm | ClipValue) for op in ops)):
        return "filling refuses clipping, scaling and join()"
    if p.options.schedule == "all early" and any(isinstance(op, Freeze) for op in ops) and p.options.fusion != "sized":
        return "the plan is made for what is trained"
    if any(isinstance(op, Replan) for op in ops) and p.options.schedule in (*MEASURED, "all early"):
        return "what plans itself is not planned anew"
    if any(isinstance(op, SchedulerStep) for op in ops) != bool(p.scheduler):
        return "a scheduler is there to be stepped"
    return ""


def _objection_to_join(p: Program) -> str:
    if not p.join:
        return ""
    if len(p.join) != p.ranks or not 0 < max(p.join) <= len(p.steps):
        return "join() has a number of steps for each rank"
    for number, step in enumerate(p.steps[: max(p.join)]):
        active = [r for r, n in enumerate(p.join) if n > number]
        for op in step:
            if isinstance(
                op, Save | Load | Exchange | Rewrap | Replan | Broken | Edit | Freeze | SchedulerStep | Compare
            ):
                return "ranks without batches do not follow this"
            if isinstance(op, ZeroGrad) and op.of_model and not op.to_none and not is_sharded(p):
                return "zeros in whole averages are not followed"
            if isinstance(op, Backward) and ((op.inf >= 0 and op.inf not in active) or op.skip >= 0):
                return "only ranks with batches have losses"
        if not any(isinstance(op, ZeroGrad) for op in step) or not any(isinstance(op, StepNow) for op in step):
            return "a rank without batches has cleared its averages"
    if p.scaler and max(p.join) < len(p.steps):
        return "the scaler of a rank without batches does not follow"
    return ""


def _objection_to_loop(p: Program, ops: list[Op]) -> str:
    fills = p.options.schedule in FILLING
    saved = stepped = False
    zeroed, uneven, whole = True, False, False
    synced = pending = local = unscaled = 0  # since the gradients were last cleared, and since the last step
    frozen: set[int] = set()
    for op in ops:
        if isinstance(op, ZeroGrad):
            if fills and (op.of_model or not op.to_none) and pending:
                return "filling: a gradient dropped between backward and step"
            if op.of_model and pending and _ranks_differ(p):
                return "model.zero_grad() in mid-iteration is refused where ranks differ"
            if uneven and "uneven, unzeroed" in LATER:
                return "later: uneven, unzeroed"
            zeroed, whole = zeroed or not op.of_model, False
            synced = pending = local = unscaled = 0
        elif isinstance(op, Broken):
            if not zeroed and not pending and _ranks_differ(p) and "uneven, unzeroed" in LATER:
                return "later: uneven, unzeroed"
            zeroed, whole = True, False
            synced = pending = local = unscaled = 0
        elif isinstance(op, Backward):
            if op.skip >= 0 and (p.scaler or op.local):
                return "a rank without a gradient has nothing to unscale"
            if op.skip >= 0 and op.inf == op.skip:
                return "a rank without a loss does not overflow"
            if op.twice and ((fills and not op.local) or p.scaler):
                return "filling: one backward a step"
            if op.inf >= 0 and not p.scaler:
                return "who overflows has a scaler"
            if unscaled:
                return "no backward after unscale_"
            if whole and not is_sharded(p) and _ranks_differ(p) and "uneven, onto whole averages" in LATER:
                return "later: uneven, onto whole averages"
            uneven = op.skip >= 0 and not zeroed and (uneven or not pending)
            pending += 1
            local += op.local
            if not op.local:
                synced += 1
            if fills and synced > 1:
                return "filling: one backward a step"
            if fills and p.options.accumulate > 1 and synced:
                return "filling: which backward is the last depends on accumulate"
        elif isinstance(op, Unscale):
            if not p.scaler or unscaled or not pending:
                return "unscale_ once, after a backward, with a scaler"
            unscaled = 1
        elif isinstance(op, ClipNorm | ClipValue | FullGrad):
            if fills and local and not synced and "filling, looked at" in LATER:
                return "later: filling, looked at"
            if isinstance(op, ClipNorm) and op.norm_type == float("inf") and any(0 in x.sizes for x in p.layers):
                return "torch has no infinity norm of an empty tensor"
            if p.scaler and pending and not unscaled:
                return "clipping follows unscale_"
        elif isinstance(op, StepNow):
            if p.scaler and (not pending or op.closure >= 0):
                return "a scaler steps with new gradients, without closures"
            if p.scaler and "scaler, local" in LATER and (local or p.options.accumulate > 1):
                return "later: scaler, local"
            if op.closure >= 0:
                synced = 1
            zeroed, uneven = op.closure >= 0, False
            stepped, pending, local, unscaled = True, 0, 0, 0
        elif isinstance(op, SetGrad):
            if pending and _ranks_differ(p):
                return "a gradient assigned in mid-iteration is refused where ranks differ"
            if fills or p.scaler or p.join or op.layer >= len(p.layers) or p.layers[op.layer].frozen:
                return "filling: a gradient assigned after backward"
        elif isinstance(op, Exchange):
            if has_masters(p):
                return "plain PyTorch knows no masters"
        elif isinstance(op, Save):
            saved = True
        elif isinstance(op, Load):
            if not saved:
                return "nothing was saved"
        elif isinstance(op, Rewrap):
            if frozen or p.scheduler or any(layer.kind == "norm" for layer in p.layers) or p.scaler or p.readers:
                return "what is frozen at wrap stays frozen; schedulers, buffers and scalers belong to the first wrap"
            if p.options.schedule in FILLING or (op.schedule in (*FILLING, *MEASURED) and p.readers):
                return "filling is not wrapped again"
            if op.fusion != "sized" and op.schedule != "dear":
                return "these schedules make their own plan"
            synced = pending = local = unscaled = 0
        elif isinstance(op, Replan):
            if pending or not stepped or p.scaler:
                return "a plan changes between steps, which a scaler may skip"
        elif isinstance(op, Freeze):
            if op.layer >= len(p.layers) or p.layers[op.layer].frozen or _is_tied(p, op.layer):
                return "what is frozen at wrap stays frozen"
            (frozen.add if op.frozen else frozen.discard)(op.layer)
        if isinstance(op, ClipNorm | ClipValue | FullGrad | Unscale | StepNow | SetGrad):
            whole = True
        if isinstance(op, Edit | Load | Exchange | Freeze) and pending:
            return "weights change between steps"
        if isinstance(op, FullGrad) and (op.layer >= len(p.layers) or p.layers[op.layer].frozen):
            return "only what is trained has an average"
        if isinstance(op, Broken) and op.layer >= len(p.layers):
            return "a layer fails"
        if isinstance(op, SetLr) and op.group >= len(p.optimizer.groups):
            return "a group has a rate"
        if p.scaler and not isinstance(op, ZeroGrad) and _leaks_infinity(p):
            return "an infinity that nobody clears stays"
    if "readers" in LATER and p.readers:
        return "later: readers"
    return ""


def _ranks_differ(p: Program) -> bool:
    """True if some parameters get a gradient on some ranks only."""
    ops = [op for step in p.steps for op in step]
    by_rank = any(layer.used in ("rank 0", "not rank 0", "by turns") for layer in p.layers)
    return by_rank or any(isinstance(op, Backward) and op.skip >= 0 for op in ops)


def _is_tied(p: Program, index: int) -> bool:
    return p.layers[index].tied_to >= 0 or any(layer.tied_to == index for layer in p.layers)


def _leaks_infinity(p: Program) -> bool:
    """True unless every step begins with cleared gradients and makes one step."""
    for step in p.steps:
        kinds = [type(op) for op in step if isinstance(op, ZeroGrad | Backward | StepNow)]
        if kinds and (kinds[0] is not ZeroGrad or kinds.count(StepNow) != 1 or kinds[-1] is not StepNow):
            return True
    return False


# ---------------------------------------------------------------------------------------------------- drawing


def draw(seed: int, ranks: int = 2) -> Program:
    """The same program for the same seed and number of ranks."""
    rng = random.Random(f"{seed} on {ranks}")
    for _ in range(MAX_TRIES):
        program = _Draw(rng, seed, ranks).program()
        if not objection(program):
            return program
    raise AssertionError(
        f"seed {seed}: {MAX_TRIES} programs in a row make no sense, the last one: {objection(program)}"
    )


class _Draw:
    def __init__(self, rng: random.Random, seed: int, ranks: int) -> None:
        self.rng, self.seed, self.ranks = rng, seed, ranks
        self.batch = 0

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def program(self) -> Program:
        rng = self.rng
        self.whole = self.chance(0.4)
        self.optimizer = self._optimizer()
        self.layers = self._layers()
        self.options = self._options()
        self.fills = self.options.schedule in FILLING
        self.scaler = not self.fills and self.chance(0.15)
        self.scheduler = rng.choice(["before", "after"]) if self.chance(0.15) else ""
        self.join = not self.fills and self.chance(0.12)
        self.deterministic = self.chance(0.5 if self.ranks > 2 else 0.25)
        self.clips = not self.fills and self.chance(0.25)
        self.compares = self.chance(0.5)  # reading all parameters after each step hides what waits too late
        self.rewrapped = self.chance(0.15)
        num_steps = rng.randint(7, 9) if self.options.schedule in MEASURED else rng.randint(2, 7)
        lengths: tuple[int, ...] = ()
        if self.join:
            joined = num_steps if self.scaler else rng.randint(1, num_steps)
            lengths = tuple(rng.choice([joined, rng.randint(0, joined)]) for _ in range(self.ranks - 1))
            lengths = tuple(rng.sample([joined, *lengths], self.ranks))
        self.saved = False
        steps = tuple(self._step(number, number < max(lengths, default=0), lengths) for number in range(num_steps))
        if self.scheduler and not any(isinstance(op, SchedulerStep) for step in steps for op in step):
            self.scheduler = ""
        return Program(
            self.ranks, self.seed, self.deterministic, self.whole, self.layers, self.optimizer, self.options, steps,
            lengths, self.scaler, self.scheduler, 0 if "readers" in LATER else 2 * self.chance(0.15),
        )  # fmt: skip

    def _optimizer(self) -> Optimizer:
        rng, eps = self.rng, 2.0**-6  # a large epsilon: the step is a smooth function of the gradient
        name, options = rng.choice(
            [
                ("SGD", {}), ("SGD", {"momentum": 0.5}), ("SGD", {"momentum": 0.5, "nesterov": True}),
                ("SGD", {"momentum": 0.5, "dampening": 0.25, "weight_decay": 0.125}), ("Lars", {}),
                ("Subclass", {"momentum": 0.5}), ("Adam", {"eps": eps}), ("Adam", {"eps": eps, "amsgrad": True}),
                ("AdamW", {"eps": eps, "weight_decay": 0.1}), ("NAdam", {"eps": eps}), ("RAdam", {"eps": eps}),
                ("Adagrad", {"eps": eps, "lr_decay": 0.01}), ("RMSprop", {"eps": eps, "momentum": 0.5}),
                ("Adadelta", {"eps": eps}), ("Adamax", {"eps": eps}),
            ]
        )  # fmt: skip
        lr = rng.choice([0.125, 0.0625, 0.03125])
        groups: list[dict[str, Any]] = [{}]
        if self.chance(0.4):
            groups = [{}, {"lr": 0.25 * lr, "weight_decay": 0.25}, {"weight_decay": 0.125}][: rng.randint(2, 3)]
            rng.shuffle(groups)
        return Optimizer(name, lr, self.chance(0.15), dict(options), tuple(groups))

    def _layers(self) -> tuple[Layer, ...]:
        rng, layers = self.rng, []
        wide = ["float32", "float32", "float64"]
        dtypes = rng.choice(
            [["float32"], ["float32"], wide, [*wide, "bfloat16", "bfloat16", "float16"] if self.whole else wide]
        )
        for i in range(rng.randint(1, 6)):
            kind = rng.choice(["linear", "linear", "linear", "bare", "conv", "norm"])
            dtype = rng.choice(dtypes)
            sizes: tuple[int, ...] = tuple(rng.choice([1, 2, 3, 5, 7, 11, 17]) for _ in range(2))
            if kind == "conv":
                sizes = (rng.choice([1, 2, 3]), rng.choice([2, 3, 5]), rng.choice([1, 2, 3]))
            elif kind == "norm":
                sizes = (rng.choice([1, 3, 7]),)
                dtype = "float32" if dtype in NARROW else dtype
            elif kind == "bare":
                sizes = rng.choice([(), (1,), (0, 3), (13,), (5, 3), (2, 3, 4), (257,), (0,)])
            used = "always" if self.chance(0.65) else rng.choice(
                ["never", "even", "odd", "rank 0", "not rank 0", "by turns"]
            )  # fmt: skip
            strides = ""
            if self.chance(0.3):
                strides = "channels_last" if kind == "conv" else "transposed" if len(sizes) == 2 else ""
            layer = Layer(kind, sizes, dtype, used, -1, self.chance(0.15), self.chance(0.1), strides)
            partners = [j for j, other in enumerate(layers) if other.kind == "linear" and other.tied_to < 0]
            if kind == "linear" and partners and self.chance(0.25):
                j = rng.choice(partners)
                layer = Layer("linear", layers[j].sizes, layers[j].dtype, used, j, layer.twice, layers[j].frozen)
            if not self.whole and kind in ("linear", "conv") and self.chance(0.12):
                layer = replace(layer, checkpointed=True)
            if i == 0:
                layer = Layer(kind, sizes, dtype, "always", -1, layer.twice, False, strides)
            layers.append(replace(layer, group=rng.randrange(len(self.optimizer.groups))))
        return tuple(layers)

    def _options(self) -> Options:
        rng = self.rng
        schedule = "dear" if self.chance(0.65) else rng.choice(["all early", "all early", "ddp", "wfbp"])
        if self.chance(0.06):  # a second each: they measure
            schedule = rng.choice([*MEASURED, "dear-fill"])
        fusion = (
            rng.choice(["sized", None, None, 3e-5, 3e-4, "near", 25.0])
            if schedule in ("dear", "dear-fill")
            else "sized"
        )
        return Options(
            schedule,
            fusion,
            rng.choice([2, 3]) if self.chance(0.12) else 1,
            rng.choice(["float64", "bfloat16", "float16"]) if self.whole and self.chance(0.15) else "",
            self.chance(0.7),
            self.chance(0.85),
        )

    def _next_batch(self) -> int:
        self.batch += 1
        return self.batch

    def _step(self, number: int, joined: bool, lengths: tuple[int, ...]) -> tuple[Op, ...]:
        rng, ops = self.rng, list[Op]()
        ops += self._between(joined)
        if joined or self.scaler or self.fills or self.chance(0.85):
            of_model = not self.fills and self.chance(0.25)
            ops.append(ZeroGrad(self.chance(0.7), of_model))
        if not joined and self.chance(0.06):
            ops.append(Broken(self._next_batch(), rng.randrange(len(self.layers)), self.chance(0.4)))
        if not self.scaler and not self.clips and self.chance(0.06):
            ops.append(StepNow(self._next_batch()))
            return (*ops, *self._after(joined))
        active = [r for r in range(self.ranks) if not joined or lengths[r] > number]
        num_backwards = rng.choice([1, 1, 1, 2, 2, 3])
        all_local = self.chance(0.06)
        for again in range(num_backwards):
            last = again == num_backwards - 1
            skip = rng.randrange(self.ranks) if not joined and self.chance(0.05) else -1
            local = (all_local or (not last and (self.fills or self.chance(0.5)))) and skip < 0
            ops.append(
                Backward(
                    self._next_batch(),
                    local,
                    self._next_batch() if self.chance(0.1) else -1,
                    skip,
                    rng.choice(active) if self.scaler and self.chance(0.15) else -1,
                    self.chance(0.05) and not self.scaler and not self.fills,
                )
            )
        if self.scaler and self.chance(0.5):
            ops.append(Unscale())
        can_clip = not self.scaler or isinstance(ops[-1], Unscale)
        if can_clip and self.chance(0.1):
            ops.append(FullGrad(rng.randrange(len(self.layers))))
        if self.clips and can_clip and self.chance(0.6):
            clip: Op = ClipNorm(rng.choice([0.5, 2.0]), rng.choice([2.0, 1.0, float("inf")]))
            ops.append(clip if self.chance(0.6) else ClipValue(rng.choice([0.125, 1.0])))
        if can_clip and self.chance(0.05):
            ops.append(FullGrad(rng.randrange(len(self.layers))))
        if not (joined or self.scaler or self.fills or self.join) and self.chance(0.05):
            ops.append(SetGrad(rng.randrange(len(self.layers)), self.chance(0.5)))
        if joined or self.scaler or self.chance(0.95):
            ops.append(StepNow())
            if not self.scaler and not self.fills and self.chance(0.03):
                ops.append(StepNow())
        return (*ops, *self._after(joined))

    def _between(self, joined: bool) -> list[Op]:
        ops: list[Op] = []
        if self.chance(0.1):
            ops.append(Evaluate(self._next_batch(), rng_rank(self.rng, self.ranks)))
        if self.chance(0.1):
            ops.append(
                SetLr(
                    self.rng.randrange(len(self.optimizer.groups)), self.rng.choice([0.03125, 0.25]), self.chance(0.5)
                )
            )
        return ops

    def _after(self, joined: bool) -> list[Op]:
        rng, ops = self.rng, list[Op]()
        if self.scheduler and not joined and self.chance(0.7):
            ops.append(SchedulerStep())
        if self.compares and not joined:
            ops.append(Compare())
        if self.chance(0.12):
            ops.append(Evaluate(self._next_batch(), rng_rank(rng, self.ranks)))
        if self.chance(0.06):
            ops.append(Copy())
        if self.chance(0.08):
            ops.append(CompareState())
        if self.chance(0.08):
            ops.append(Save())
            self.saved = True
        if self.chance(0.04):
            ops.append(Synchronize())
        if joined:
            return ops
        if self.saved and self.chance(0.25):
            ops.append(Load())
        if self.chance(0.05):
            ops.append(Exchange())
        if self.chance(0.06):
            ops.append(Edit(rng.choice(["clamp", "halve_first"])))
        if self.options.schedule in ("dear", "ddp", "wfbp") and self.chance(0.12):
            ops.append(Replan(rng.choice([0, 64, 512, 2**20])))
        if len(self.layers) > 1 and self.chance(0.06):
            ops.append(Freeze(rng.randrange(1, len(self.layers)), self.chance(0.6)))
        if self.rewrapped and self.chance(0.3):
            schedule = rng.choice(["dear", "dear", "ddp", "wfbp"])
            ops.append(Rewrap(schedule, rng.choice([None, 3e-5, "near", "sized"]) if schedule == "dear" else "sized"))
        return ops


def rng_rank(rng: random.Random, ranks: int) -> int:
    """One rank, or -1: all of them."""
    return rng.randrange(ranks) if rng.random() < 0.4 else -1
