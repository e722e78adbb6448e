"""A program is plain data: a model, an optimizer, options, and a loop as a list of operations.

`script(program)` prints it as a Python script that trains the same model under dear and in plain PyTorch and compares.
That script is what runs, in tests as under torchrun, so what is printed is what failed.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import re
from dataclasses import dataclass, field
from typing import Any

from tests.differential import prelude

__all__ = [
    "OPS",
    "Layer",
    "Op",
    "Options",
    "Optimizer",
    "Program",
    "from_json",
    "own_part",
    "script",
    "to_json",
    "tolerance",
]

Side = tuple[str, str]  # "dear", "plain" or "check", and a line of the script
DEAR, PLAIN, CHECK = "dear", "plain", "check"


@dataclass(frozen=True, slots=True)
class Layer:
    """`sizes`: of a linear (in, out), a conv (in, out, kernel), a norm (features,); of a bare parameter any shape."""

    kind: str = "linear"
    sizes: tuple[int, ...] = (3, 2)
    dtype: str = "float32"
    used: str = "always"
    tied_to: int = -1  # an earlier layer whose weight this one shares
    twice: bool = False
    frozen: bool = False
    strides: str = ""  # "transposed", "channels_last"
    group: int = 0
    checkpointed: bool = False

    def made(self) -> str:
        sizes, dtype = ", ".join(map(str, self.sizes)), f"dtype=torch.{self.dtype}"
        if self.kind == "bare":
            return f"nn.Parameter(torch.randn({self.sizes}, {dtype}))"
        name = {"linear": "Linear", "conv": "Conv2d", "norm": "BatchNorm1d"}[self.kind]
        return f"nn.{name}({sizes}, {dtype})"

    def used_if(self) -> str:
        return {
            "always": "", "never": "False", "even": "batch % 2 == 0", "odd": "batch % 2", "rank 0": "rank == 0",
            "not rank 0": "rank > 0", "by turns": "(batch + rank) % 2",
        }[self.used]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Optimizer:
    name: str = "SGD"
    lr: float = 0.125
    tensor_lr: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    groups: tuple[dict[str, Any], ...] = ({},)  # options of each parameter group


@dataclass(frozen=True, slots=True)
class Options:
    """DistributedOptimizer's, where they differ from its defaults. `schedule="all early"`: `prelude.all_early`."""

    schedule: str = "dear"
    fusion: Any = "sized"  # "near" for NearbyLayers(2)
    accumulate: int = 1
    reduce_dtype: str = ""
    masters: bool = True
    shard: bool = True  # where the optimizer can

    def text(self, schedule: str | None = None, fusion: Any = "") -> str:
        schedule, fusion = schedule or self.schedule, self.fusion if fusion == "" else fusion
        parts = []
        if schedule == "all early":
            parts.append("**all_early(model)")
        elif schedule != "dear":
            parts.append(f'schedule="{schedule}"')
        if fusion != "sized" and schedule in ("dear", "dear-fill"):
            parts.append("fusion=dear.NearbyLayers(2)" if fusion == "near" else f"fusion={fusion!r}")
        if self.accumulate > 1:
            parts.append(f"accumulate={self.accumulate}")
        if self.reduce_dtype:
            parts.append(f"reduce_dtype=torch.{self.reduce_dtype}")
        if not self.masters:
            parts.append("master_dtype=None")
        if not self.shard:
            parts.append("shard=False")
        return "".join(f", {part}" for part in parts)


# ---------------------------------------------------------------------------------------------------- operations


@dataclass(frozen=True, slots=True)
class ZeroGrad:
    to_none: bool = True
    of_model: bool = False

    def emit(self, p: Program) -> list[Side]:
        value = "" if self.to_none else "False" if self.of_model else "set_to_none=False"
        return [(DEAR, f"{'model' if self.of_model else 'optimizer'}.zero_grad({value})"),
                (PLAIN, f"plain.zero_grad({self.to_none})")]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Backward:
    """`evaluate`: a batch that is evaluated between forward and backward. `inf`: a rank whose loss overflows."""

    batch: int = 0
    local: bool = False
    evaluate: int = -1
    skip: int = -1  # a rank without this backward
    inf: int = -1
    twice: bool = False  # through the same graph

    def emit(self, p: Program) -> list[Side]:
        loss = f"net({self.batch}, r)"
        if self.inf >= 0:
            loss += f" * (float('inf') if r == {self.inf} else 1)"
        mine = loss.replace("net(", "model(").replace(" r)", " RANK)").replace("if r ", "if RANK ")
        skip = f"if RANK != {self.skip}: " if self.skip >= 0 else ""
        lines = [(DEAR, f"{skip}loss = {mine}")]
        plain = f"plain.backward(lambda net, r: {loss}"
        if p.scaler:
            plain = f"plain.backward(lambda net, r: plain_scaler.scale({loss})"
        more = f", skip={self.skip}" if self.skip >= 0 else ""
        more += ", twice=True" if self.twice else ""
        lines.append((PLAIN, f"{plain}{more})"))
        if self.evaluate >= 0:
            lines += Evaluate(self.evaluate).emit(p)
        scaled = "scaler.scale(loss)" if p.scaler else "loss"
        backward = f"{scaled}.backward({'retain_graph=True' if self.twice else ''})"
        if self.twice:
            backward += f"; {scaled}.backward()"
        if self.local:
            lines.append((DEAR, f"with optimizer.no_sync():\n    {skip}{backward}"))
        else:
            lines.append((DEAR, f"{skip}{backward}"))
        return lines


@dataclass(frozen=True, slots=True)
class Broken:
    """Forward or backward raises on every rank, after or before `layer`; zero_grad() follows."""

    batch: int = 0
    layer: int = 0
    in_forward: bool = False

    def emit(self, p: Program) -> list[Side]:
        call = f"{self.batch}, {{}}, fail={-1 - self.layer if self.in_forward else self.layer}"
        loss = f"model({call.format('RANK')})"
        loss = f"scaler.scale({loss})" if p.scaler else loss
        return [
            (DEAR, f"with contextlib.suppress(ArithmeticError):\n    {loss}.backward()"),
            (DEAR, "optimizer.zero_grad()"),
            (PLAIN, f"plain.fail(lambda net, r: net({call.format('r')}))"),
        ]


@dataclass(frozen=True, slots=True)
class ClipNorm:
    max_norm: float = 1.0
    norm_type: float = 2.0

    def emit(self, p: Program) -> list[Side]:
        kind = "float('inf')" if self.norm_type == float("inf") else repr(self.norm_type)
        return [
            (DEAR, f"norm = optimizer.clip_grad_norm_({self.max_norm}, {kind})"),
            (PLAIN, f"plain_norm = plain.clip_norm({self.max_norm}, {kind})"),
            (CHECK, f'check("norm", float(norm), float(plain_norm), {max(tolerance(p), 1e-5)})'),
        ]


@dataclass(frozen=True, slots=True)
class ClipValue:
    value: float = 0.5

    def emit(self, p: Program) -> list[Side]:
        return [(DEAR, f"optimizer.clip_grad_value_({self.value})"), (PLAIN, f"plain.clip_value({self.value})")]


@dataclass(frozen=True, slots=True)
class Unscale:
    def emit(self, p: Program) -> list[Side]:
        return [(DEAR, "scaler.unscale_(optimizer)"), (PLAIN, "plain.unscale(plain_scaler)")]


@dataclass(frozen=True, slots=True)
class FullGrad:
    layer: int = 0

    def emit(self, p: Program) -> list[Side]:
        name = _first_param(p, self.layer)
        return [
            (DEAR, f'grad = optimizer.full_grad(model.get_parameter("{name}"))'),
            (PLAIN, f'plain_grad = plain.grad("{name}")'),
            (CHECK, f'check("gradient", grad, plain_grad, {tolerance(p)})'),
        ]


def _first_param(p: Program, layer: int) -> str:
    """The first parameter of a layer, by the name that `named_parameters` has for it."""
    owner = p.layers[layer].tied_to if p.layers[layer].tied_to >= 0 else layer
    return f"l{owner}" if p.layers[owner].kind == "bare" else f"l{owner}.weight"


@dataclass(frozen=True, slots=True)
class StepNow:
    """`closure`: the batch of a closure that zeroes and computes gradients, if any."""

    closure: int = -1

    def emit(self, p: Program) -> list[Side]:
        if p.scaler:
            return [(DEAR, "scaler.step(optimizer)"), (DEAR, "scaler.update()"), (PLAIN, "plain.step(plain_scaler)")]
        if self.closure < 0:
            return [(DEAR, "optimizer.step()"), (PLAIN, "plain.step()")]
        body = (
            f"    optimizer.zero_grad()\n    loss = model({self.closure}, RANK)\n    loss.backward()\n    return loss"
        )
        return [
            (DEAR, f"def closure():\n{body}"),
            (DEAR, "optimizer.step(closure)"),
            (PLAIN, "plain.zero_grad()"),
            (PLAIN, f"plain.backward(lambda net, r: net({self.closure}, r))"),
            (PLAIN, "plain.step()"),
        ]


@dataclass(frozen=True, slots=True)
class SetGrad:
    """The gradient of a layer's first parameter, assigned by hand: a number for each rank, or None."""

    layer: int = 0
    to_none: bool = False

    def emit(self, p: Program) -> list[Side]:
        name, value = _first_param(p, self.layer), "None" if self.to_none else "torch.full_like(p.data, SIZE * (r + 1))"
        return [
            (DEAR, f'p = model.get_parameter("{name}")'),
            (DEAR, f"p.grad = {value.replace('(r + 1)', '(RANK + 1)')}"),
            (PLAIN, f'plain.set_grad("{name}", lambda p, r: {value})'),
        ]


@dataclass(frozen=True, slots=True)
class Exchange:
    """The optimizers' states are exchanged: each loads what the other has saved."""

    def emit(self, p: Program) -> list[Side]:
        return [
            (DEAR, "state = copy.deepcopy(optimizer.state_dict())"),
            (DEAR, "optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))"),
            (PLAIN, "plain.optimizer.load_state_dict(state)"),
        ]


@dataclass(frozen=True, slots=True)
class SetLr:
    group: int = 0
    lr: float = 0.0625
    of_base: bool = False

    def emit(self, p: Program) -> list[Side]:
        of = "base" if self.of_base else "optimizer"
        return [(DEAR, f"set_lr({of}, {self.group}, {self.lr})"),
                (PLAIN, f"set_lr(plain.optimizer, {self.group}, {self.lr})")]  # fmt: skip


@dataclass(frozen=True, slots=True)
class SchedulerStep:
    def emit(self, p: Program) -> list[Side]:
        return [(DEAR, "scheduler.step()"), (PLAIN, "plain_scheduler.step()")]


@dataclass(frozen=True, slots=True)
class Evaluate:
    """`only`: on one rank, or -1 for all."""

    batch: int = 0
    only: int = -1

    def emit(self, p: Program) -> list[Side]:
        on = f"if RANK == {self.only}: " if self.only >= 0 else ""
        only = f", only={self.only}" if self.only >= 0 else ""
        return [
            (DEAR, f"with torch.no_grad():\n    {on}out = model({self.batch}, RANK)"),
            (PLAIN, f"plain_out = plain.forward(lambda net, r: net({self.batch}, r){only})"),
            (CHECK, f'{on}check("evaluation", out, plain_out[RANK], {tolerance(p)})'),
        ]


@dataclass(frozen=True, slots=True)
class CompareState:
    def emit(self, p: Program) -> list[Side]:
        got = "without_masters(optimizer.state_dict())" if has_masters(p) else "optimizer.state_dict()"
        return [(DEAR, f"state = {got}"),
                (CHECK, f'check("optimizer state", state, plain.optimizer.state_dict(), {tolerance(p)})')]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Compare:
    def emit(self, p: Program) -> list[Side]:
        return [(CHECK, f'check("parameters", model.state_dict(), plain.replicas[RANK].state_dict(), {tolerance(p)})')]


@dataclass(frozen=True, slots=True)
class Save:
    def emit(self, p: Program) -> list[Side]:
        return [(DEAR, "saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))"),
                (PLAIN, "plain_saved = plain.save()")]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """What the last `Save` before this has saved."""

    def emit(self, p: Program) -> list[Side]:
        return [
            (DEAR, "model.load_state_dict(saved[0])"),
            (DEAR, "optimizer.load_state_dict(copy.deepcopy(saved[1]))"),
            (PLAIN, "plain.load(plain_saved)"),
        ]


@dataclass(frozen=True, slots=True)
class Rewrap:
    schedule: str = "dear"
    fusion: Any = None

    def emit(self, p: Program) -> list[Side]:
        options = p.options.text(self.schedule, self.fusion)
        return [
            (DEAR, "optimizer.zero_grad()"),
            (DEAR, "state = copy.deepcopy(optimizer.state_dict())"),
            (DEAR, "optimizer.close()"),
            (DEAR, "base = make(model)"),
            (DEAR, f"optimizer = dear.DistributedOptimizer(base, model{options})"),
            (DEAR, "optimizer.load_state_dict(state)"),
            (PLAIN, "plain.rewrap()"),
        ]


@dataclass(frozen=True, slots=True)
class Replan:
    threshold_bytes: int = 0

    def emit(self, p: Program) -> list[Side]:
        return [(DEAR, f"replan(optimizer, {self.threshold_bytes})")]


@dataclass(frozen=True, slots=True)
class Copy:
    def emit(self, p: Program) -> list[Side]:
        return [
            (DEAR, "copied = copy.deepcopy(model)"),
            (CHECK, f'check("copy", copied.state_dict(), plain.replicas[RANK].state_dict(), {tolerance(p)})'),
        ]


@dataclass(frozen=True, slots=True)
class Edit:
    how: str = "clamp"  # or "halve_first"

    def emit(self, p: Program) -> list[Side]:
        return [(DEAR, f"{self.how}(model)"), (PLAIN, f"plain.edit({self.how})")]


@dataclass(frozen=True, slots=True)
class Freeze:
    layer: int = 0
    frozen: bool = True

    def emit(self, p: Program) -> list[Side]:
        return [
            (DEAR, f"model.l{self.layer}.requires_grad_({not self.frozen})"),
            (PLAIN, f'plain.freeze("l{self.layer}", {self.frozen})'),
        ]


@dataclass(frozen=True, slots=True)
class Synchronize:
    def emit(self, p: Program) -> list[Side]:
        return [(DEAR, "optimizer.synchronize()")]


Op = (
    ZeroGrad | Backward | Broken | ClipNorm | ClipValue | Unscale | FullGrad | StepNow | SetLr | SchedulerStep
    | SetGrad | Exchange | Evaluate | CompareState | Compare | Save | Load | Rewrap | Replan | Copy | Edit | Freeze
    | Synchronize
)  # fmt: skip
OPS: dict[str, type[Any]] = {cls.__name__: cls for cls in Op.__args__}


@dataclass(frozen=True, slots=True)
class Program:
    ranks: int = 2
    seed: int = 0
    deterministic: bool = False
    whole_numbers: bool = False  # gradients are whole multiples of the number of ranks, whatever the parameters are
    layers: tuple[Layer, ...] = (Layer(),)
    optimizer: Optimizer = Optimizer()
    options: Options = Options()
    steps: tuple[tuple[Op, ...], ...] = ()
    join: tuple[int, ...] = ()  # of each rank: how many of the first max(join) steps it has batches for
    scaler: bool = False
    scheduler: str = ""  # made "before" or "after" wrapping
    readers: int = 0  # threads that touch parameters all the time


# ---------------------------------------------------------------------------------------------------- what is expected

NARROW = ("bfloat16", "float16")
ELEMENTWISE = {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "RMSprop", "Adadelta", "Adamax"}


def is_sharded(p: Program) -> bool:
    return p.options.shard and p.optimizer.name in ELEMENTWISE


def has_masters(p: Program) -> bool:
    return p.options.masters and is_sharded(p) and any(layer.dtype in NARROW for layer in p.layers)


# Reason -> relative to 1 + |expected|. bf16 parameters have 2e-2 wherever anything is allowed at all.
TOLERANCES = {
    "exact": 0.0,
    "torch rounds the norm to bf16 or fp16": 2e-2,
    "a norm is summed in another order": 1e-4,
    "the sum over three ranks is in the order of a ring": 1e-4,
    "several averages are added, or one of the sum": 1e-4,
    "bf16 without masters: torch rounds otherwise in the tail of a vectorised loop": 1e-4,
}


def tolerance(p: Program) -> float:
    return TOLERANCES[_reason(p)]


def _reason(p: Program) -> str:
    ops = [op for step in p.steps for op in step]
    narrow = any(layer.dtype in NARROW for layer in p.layers) and not has_masters(p)
    if narrow and any(isinstance(op, ClipNorm) for op in ops):
        return "torch rounds the norm to bf16 or fp16"
    if any(isinstance(op, ClipNorm) for op in ops):
        return "a norm is summed in another order"
    if narrow:
        return "bf16 without masters: torch rounds otherwise in the tail of a vectorised loop"
    if p.whole_numbers:
        return "exact"
    if p.ranks > 2 and not p.deterministic:
        return "the sum over three ranks is in the order of a ring"
    passes, stands = 0, False  # backwards since gradients were cleared; an average is there already
    for op in ops:
        if isinstance(op, ZeroGrad | Broken | Rewrap):
            passes, stands = 0, False
        elif isinstance(op, Backward):
            if stands or op.twice:
                return "several averages are added, or one of the sum"
            passes += 1
            stands = not op.local and passes >= p.options.accumulate
        elif isinstance(op, StepNow) and op.closure >= 0:
            passes, stands = 1, True
        elif isinstance(op, StepNow | FullGrad | ClipValue | Unscale | SetGrad):
            stands = stands or passes > 0
    return "exact"


# ---------------------------------------------------------------------------------------------------- as data


def to_json(program: Program) -> str:
    data = dataclasses.asdict(program)
    data["steps"] = [[{"op": type(op).__name__, **dataclasses.asdict(op)} for op in step] for step in program.steps]
    return json.dumps(data)


def from_json(text: str) -> Program:
    data = json.loads(text)
    steps = tuple(
        tuple(OPS[op["op"]](**{key: value for key, value in op.items() if key != "op"}) for op in step)
        for step in data.pop("steps")
    )
    layers = tuple(Layer(**{**layer, "sizes": tuple(layer["sizes"])}) for layer in data.pop("layers"))
    optimizer = data.pop("optimizer")
    optimizer["groups"] = tuple(optimizer["groups"])
    data["join"] = tuple(data["join"])
    return Program(
        layers=layers, optimizer=Optimizer(**optimizer), options=Options(**data.pop("options")), steps=steps, **data
    )


# ---------------------------------------------------------------------------------------------------- as a script


def script(program: Program) -> str:
    body = own_part(program)
    head = f'"""torchrun --nproc-per-node {program.ranks} THIS_FILE"""\n\n{prelude.IMPORTS}\n'
    return head + "\n\n".join(_used_of_prelude(body)) + "\n\n\n" + body


def own_part(program: Program) -> str:
    """Its script without the parts that scripts share."""
    return "\n".join([*_model(program), "", *_make(program), "", *_main(program)]) + "\n"


def _used_of_prelude(body: str) -> list[str]:
    """The source of what the script calls, and of what that calls, in the order of the file."""
    sources = _sources()
    used: set[str] = set()
    texts = [body]
    while texts:
        text = texts.pop()
        for name in sources.keys() - used:
            owner, _, called = name.rpartition(".")
            if re.search(rf"\b(?:plain|self)\.{called}\b" if owner else rf"\b{called}\b", text):
                used.add(name)
                texts.append(sources[name])
    return ["problems = []", *(source for name, source in sources.items() if name in used)]


@functools.cache
def _sources() -> dict[str, str]:
    """Of every function and class of the prelude; of `Plain` its head, and each method for itself."""
    text = inspect.getsource(prelude)
    lines, sources = text.splitlines(), dict[str, str]()

    def cut(first: int, last: int) -> str:
        return re.sub(r"\s*# type: ignore\[[\w-]+\]", "", "\n".join(lines[first - 1 : last]))

    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        assert node.end_lineno is not None
        methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
        if node.name != "Plain":
            sources[node.name] = cut(node.lineno, node.end_lineno)
            continue
        assert methods[0].end_lineno is not None
        sources[node.name] = cut(node.lineno, methods[0].end_lineno)
        for method in methods[1:]:
            assert method.end_lineno is not None
            sources[f"{node.name}.{method.name}"] = cut(method.lineno, method.end_lineno)
    return sources


def _model(p: Program) -> list[str]:
    fails = any(isinstance(op, Broken) for step in p.steps for op in step)
    lines = ["class Net(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    for i, layer in enumerate(p.layers):
        lines.append(f"        self.l{i} = {layer.made()}")
        if layer.tied_to >= 0:
            lines.append(f"        self.l{i}.weight = self.l{layer.tied_to}.weight")
        if layer.strides == "channels_last":
            lines.append(f"        self.l{i}.to(memory_format=torch.channels_last)")
        if layer.strides == "transposed":
            name = f"self.l{i}" if layer.kind == "bare" else f"self.l{i}.weight"
            lines.append(f"        {name}.data = {name}.data.t().contiguous().t()")
        if layer.frozen:
            lines.append(f"        self.l{i}.requires_grad_(False)")
    lines += ["", f"    def forward(self, batch, rank{', fail=None' if fails else ''}):", "        h = torch.zeros(())"]
    for i, layer in enumerate(p.layers):
        condition, indent = layer.used_if(), " " * 8
        if condition:
            lines.append(f"{indent}if {condition}:")
            indent += " " * 4
        for again in range(2 if layer.twice else 1):
            lines.append(f"{indent}h = h + {_term(p, layer, i, again)}")
        if fails:
            lines += [f"        if fail == {i}:", "            h = Fail.apply(h)"]
            lines += [f"        if fail == {-1 - i}:", '            raise ArithmeticError("in a forward")']
    return [*lines, "        return h"]


def _term(p: Program, layer: Layer, index: int, again: int) -> str:
    key = f"batch, rank, {index + 100 * again}"
    if p.whole_numbers:
        return f"weighted(self.l{index}, {key})"
    cast = "" if layer.dtype == "float32" else f".to(torch.{layer.dtype})"
    back = "" if layer.dtype == "float32" else ".float()"
    if layer.kind == "bare":
        return f"(self.l{index} * (draw({layer.sizes}, {key}) + h.tanh()){cast}).square().sum(){back} * 0.02"
    shape = {"linear": (4, layer.sizes[0]), "conv": (2, layer.sizes[0], 4, 4), "norm": (4, layer.sizes[0])}[layer.kind]
    inputs = f"(draw({shape}, {key}) + h.tanh()){cast}"
    if layer.checkpointed:
        return f"checkpoint(self.l{index}, {inputs}, use_reentrant=False).square().sum(){back} * 0.02"
    return f"self.l{index}({inputs}).square().sum(){back} * 0.02"


def _make(p: Program) -> list[str]:
    optimizer, groups = p.optimizer, []
    for number, options in enumerate(optimizer.groups):
        names = "".join(f', "l{i}"' for i, layer in enumerate(p.layers) if layer.group == number)
        extra = "".join(f', "{key}": {_value(optimizer, key, value)}' for key, value in options.items())
        groups.append(f'{{"params": own(model{names}){extra}}}')
    cls = optimizer.name if optimizer.name in ("Lars", "Subclass") else f"optim.{optimizer.name}"
    options = {"lr": optimizer.lr, **optimizer.options}
    passed = ", ".join(f"{key}={_value(optimizer, key, value)}" for key, value in options.items())
    return ["def make(model):", f"    groups = [{', '.join(groups)}]", f"    return {cls}(groups, {passed})"]


def _value(optimizer: Optimizer, key: str, value: Any) -> str:
    value = tuple(value) if isinstance(value, list) else value
    return f"torch.tensor({value})" if key == "lr" and optimizer.tensor_lr else repr(value)


def _main(p: Program) -> list[str]:
    lines = [
        f'dear.init(backend="gloo", deterministic={p.deterministic})',
        "RANK, SIZE = dear.rank(), dear.size()",
        "torch.set_num_threads(1)",
        f"torch.manual_seed({p.seed})",
        "model = Net()",
        f"plain = Plain(model, make, masters={has_masters(p)})",
        "base = make(model)",
    ]
    for of, name in (("base", "scheduler"), ("plain.optimizer", "plain_scheduler")):
        if p.scheduler == "before":
            lines.append(f"{name} = optim.lr_scheduler.ExponentialLR({of}, 0.5)")
    lines.append(f"optimizer = dear.DistributedOptimizer(base, model{p.options.text()})")
    for of, name in (("optimizer", "scheduler"), ("plain.optimizer", "plain_scheduler")):
        if p.scheduler == "after":
            lines.append(f"{name} = optim.lr_scheduler.ExponentialLR({of}, 0.5)")
    if p.scaler:
        for name in ("scaler", "plain_scaler"):
            lines.append(f'{name} = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)')
    if p.readers:
        lines += ["stop = threading.Event()"]
        lines += [f"readers = [threading.Thread(target=read, args=(model, stop)) for _ in range({p.readers})]"]
        lines += ["for reader in readers:", "    reader.start()"]
    joined = max(p.join, default=0)
    if p.join:
        lines += ["", "with optimizer.join():"]
        for number in range(joined):
            lines += [f"    # step {number}, on ranks {[r for r, n in enumerate(p.join) if n > number]}"]
            lines += [f"    plain.ranks = [r for r in range(SIZE) if {p.join}[r] > {number}]"]
            lines += ["    " + line for line in _joined_step(p, p.steps[number])]
        lines += ["plain.ranks = list(range(SIZE))"]
    for number, step in enumerate(p.steps[joined:], joined):
        lines += ["", f"# step {number}"]
        for op in step:
            for _, line in op.emit(p):
                lines += line.split("\n")
    lines.append("")
    if p.readers:
        lines += ["stop.set()", "for reader in readers:", "    reader.join()"]
    compare = [line for _, line in Compare().emit(p)]
    return [*lines, *compare, "check_ranks(model)", "optimizer.close()", *compare, "finish()"]


def _joined_step(p: Program, step: tuple[Op, ...]) -> list[str]:
    """dear's lines run on ranks that have a batch; plain PyTorch's on every rank."""
    lines: list[str] = []
    inside = False
    for side, line in (each for op in step for each in op.emit(p)):
        mine = side != PLAIN
        if mine and not inside:
            lines.append("if RANK in plain.ranks:")
        inside = mine
        lines += [("    " if mine else "") + part for part in line.split("\n")]
    return lines
