"""Every interleaving of the threads that meet at a `Gate`, statement by statement, of the gate's own source.

The methods of the class are compiled anew with a pause before each statement that touches what threads share, so
that a thread is a generator and an explorer decides who goes on. Two threads touch a parameter, the training thread
makes two steps and touches the parameter after each, a closer closes the gate, and the network completes the gathers
at any time. States that were seen before are not explored again. Nothing sleeps.

Cannot see: what happens inside one statement (assignments that the interpreter makes at once), or inside torch.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from dear import parameters

Pause = tuple[str, Any]  # ("", None), or what has to be true before the thread can go on: ("event", e), ("lock", l)
Thread = Generator[Pause, None, None]


class Flag:
    """One recording of the event."""

    def __init__(self, step: int) -> None:
        self.step, self.done = step, step == 0


class ModelEvent:
    def __init__(self, flag: Flag) -> None:
        self.flag = flag

    def is_done(self) -> bool:
        return self.flag.done

    def as_of_now(self) -> ModelEvent:
        return ModelEvent(self.flag)

    def __repr__(self) -> str:
        return f"event of step {self.flag.step}"


class ModelLock:
    holder: str = ""


class _Compiling:
    def is_compiling(self) -> bool:
        return False


class _Torch:
    compiler = _Compiling()


class _Clock:
    def perf_counter(self) -> float:
        return 0.0


SHARED = ("_flight", "_pending", "_closed", "__class__", "type(param)")


class _Pauses:
    """A method as a generator: yields before statements on shared state, blocks at `wait_compute` and `with <lock>`."""

    def body(self, statements: list[ast.stmt], has_paused: bool = False) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        for number, statement in enumerate(statements):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # a docstring
            head = ast.unparse(statement).partition("\n")[0]
            if any(name in head for name in SHARED) and not (has_paused and number == 0):
                result += ast.parse("yield ('', None)").body
            result += self.statement(statement)
        return result

    def statement(self, node: ast.stmt) -> list[ast.stmt]:
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr="wait_compute"))):
                return ast.parse(f"yield ('event', {ast.unparse(owner)})").body
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="wait"))):
                return ast.parse(f"yield from {ast.unparse(node)}").body
            case ast.With(items=[ast.withitem(context_expr=lock)]):
                name = ast.unparse(lock)
                return [
                    *ast.parse(f"yield ('lock', {name})").body,
                    *self.body(node.body, has_paused=True),
                    *ast.parse(f"{name}.holder = ''").body,
                ]
            case ast.While() | ast.For() | ast.If():
                node.body = self.body(node.body)
                if isinstance(node, ast.While):  # its condition is looked at again
                    node.body += ast.parse("yield ('', None)").body
                node.orelse = self.body(node.orelse)
        return [node]


def as_threads(source: str) -> dict[str, Callable[..., Thread]]:
    """The methods of the class in `source`, by name, as generators."""
    tree = ast.parse(textwrap.dedent(source))
    (cls,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    methods = {}
    for node in cls.body:
        if isinstance(node, ast.FunctionDef) and node.name in ("arm", "wait", "close"):
            body = _Pauses().body(node.body)
            node.body = [*body, *ast.parse("if False: yield").body]  # a generator in any case
            node.returns = None
            for argument in node.args.args:
                argument.annotation = None
            module = ast.fix_missing_locations(ast.Module([node], []))
            scope: dict[str, Any] = {"torch": _Torch(), "time": _Clock()}
            exec(compile(module, "<gate>", "exec"), scope)
            methods[node.name] = scope[node.name]
    return methods


class Own:
    def __repr__(self) -> str:  # states are compared by what is printed
        return "param"


class Pending(Own):
    pass


class GateState:
    """The fields that the methods work on."""

    def __init__(self, event: ModelEvent) -> None:
        self.param = Own()
        self.buckets, self.is_eager, self.compiler_touched = (0,), False, False
        self._events, self._members = (event,), [(self.param, Own, Pending)]
        self._names = {id(self.param): "w"}
        self._switching = ModelLock()
        self._flight: Any = None
        self._pending = self._closed = False

    def _on_wait(self, *_: Any) -> None:
        pass


class Violation(Exception):
    pass


@dataclass
class World:
    """The gate, its event, and the threads: rebuilt and replayed for each state that is expanded."""

    methods: dict[str, Callable[..., Thread]]
    event: ModelEvent = field(default_factory=lambda: ModelEvent(Flag(0)))
    flags: list[Flag] = field(default_factory=lambda: [Flag(0)])
    num_armed: int = 0
    closed: bool = False

    def __post_init__(self) -> None:
        self.gate = GateState(self.event)
        for name, method in self.methods.items():
            setattr(self.gate, name, functools.partial(method, self.gate))
        self.threads: dict[str, Thread] = {
            "training": self.training(),
            "reader 1": self.touch(),
            "reader 2": self.touch(),
            "closer": self.closer(),
            "network": self.network(),
        }
        self.pauses: dict[str, Pause] = {name: next(thread) for name, thread in self.threads.items()}

    def touch(self) -> Thread:
        """What `__torch_function__` does: waits while the parameter's class is pending, then reads it."""
        yield ("", None)
        armed = self.num_armed
        while type(self.gate.param) is Pending:
            yield from self.gate.wait()  # type: ignore[attr-defined]
        if not self.flags[armed].done:
            raise Violation(f"a touch that began after step {armed} has read the parameter before its gather")

    def training(self) -> Thread:
        for step in (1, 2):
            yield ("", None)
            if self.closed:  # step() refuses
                return
            self.event.flag = Flag(step)  # the gather of this step is enqueued
            self.flags.append(self.event.flag)
            yield ("", None)
            yield from self.gate.arm()  # type: ignore[attr-defined]
            self.num_armed = step
            yield from self.touch()

    def closer(self) -> Thread:
        yield ("", None)
        yield from self.gate.close()  # type: ignore[attr-defined]
        self.closed = True

    def network(self) -> Thread:
        for step in (1, 2):
            yield ("gather", step)
            self.flags[step].done = True

    def can_go_on(self, name: str) -> bool:
        kind, what = self.pauses[name]
        if kind == "event":
            return bool(what.is_done())
        if kind == "lock":
            return not what.holder
        return kind != "gather" or len(self.flags) > what

    def enabled(self) -> list[str]:
        return [name for name in self.threads if self.can_go_on(name)]

    def go_on(self, name: str) -> None:
        kind, what = self.pauses[name]
        if kind == "lock":
            what.holder = name
        try:
            self.pauses[name] = next(self.threads[name])
        except StopIteration:
            del self.threads[name], self.pauses[name]

    def check(self) -> None:
        armed = self.flags[self.num_armed]
        if not armed.done and self.num_armed and not self.closed and type(self.gate.param) is not Pending:
            raise Violation(f"step {armed.step} has not been gathered, but its parameter does not wait")

    def key(self) -> tuple[Any, ...]:
        flags = tuple(flag.done for flag in self.flags)
        gate = self.gate
        fields = (type(gate.param), _plain(gate._flight), gate._pending, gate._closed, gate._switching.holder)
        threads = {name: tuple(_frames(thread)) for name, thread in self.threads.items()}
        readers = sorted(repr(threads.pop(name, ())) for name in ("reader 1", "reader 2"))  # who is who does not matter
        return (flags, self.num_armed, self.closed, fields, *readers, *threads.items())


ALIVE = ("step", "armed", "flight", "event")  # the variables that decide what a thread does next


def _frames(thread: Thread) -> Iterator[Any]:
    """Where a thread stands, and what it knows."""
    at: Any = thread
    while at is not None and at.gi_frame is not None:
        frame = at.gi_frame
        yield frame.f_lasti
        yield tuple((name, _plain(frame.f_locals[name])) for name in ALIVE if name in frame.f_locals)
        at = at.gi_yieldfrom


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)


@dataclass
class Exploration:
    num_states: int
    violation: str = ""
    path: tuple[str, ...] = ()


def explore(methods: dict[str, Callable[..., Thread]]) -> Exploration:
    """Depth first over all states that can be reached; stops at the first violation."""

    def replay(path: tuple[str, ...]) -> World:
        world = World(methods)
        for name in path:
            world.go_on(name)
        return world

    seen = {World(methods).key()}
    stack: list[tuple[tuple[str, ...], World]] = [((), World(methods))]
    while stack:
        path, before = stack.pop()
        last, *others = before.enabled() or [""]
        for name in filter(None, [*others, last]):  # generators cannot be copied; the last one may use this one up
            world = before if name == last else replay(path)
            try:
                world.go_on(name)
                world.check()
            except Violation as violation:
                return Exploration(len(seen), str(violation), (*path, name))
            if not world.enabled() and world.threads.keys() - {"network"}:
                return Exploration(len(seen), f"{sorted(world.threads)} wait for ever", (*path, name))
            key = world.key()
            if key not in seen:
                seen.add(key)
                stack.append(((*path, name), world))
    return Exploration(len(seen))


def test_no_interleaving_disarms_a_later_step_or_lets_anybody_read_early() -> None:
    result = explore(as_threads(inspect.getsource(parameters.Gate)))
    assert not result.violation, f"{result.violation}: {' -> '.join(result.path)}"
    assert result.num_states > 1000, "the explorer has lost its threads"


AS_IT_WAS = """
class Gate:  # of commit 9528731
    def arm(self):
        self._pending = True
        if self.is_eager:
            self.wait()
            return
        for param, _, pending in self._members:
            param.__class__ = pending

    def wait(self, args=()):
        if not self._pending:
            return
        for event in self._events:
            event.wait_compute()
        self._pending = False
        for param, own, _ in self._members:
            param.__class__ = own
        self._on_wait(self.buckets, "", 0.0)

    def close(self):
        self.wait()
"""


def test_the_gate_as_it_was_lets_the_training_thread_read_early() -> None:
    result = explore(as_threads(AS_IT_WAS))
    assert "step" in result.violation, result


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("if self._flight is flight:", "if True:"),  # whoever comes late disarms the next step
        ("with self._switching:", "if True:"),  # between its look at the flight and the switch, the next step arms
    ],
)
def test_the_explorer_sees_what_each_part_of_the_gate_is_for(right: str, wrong: str) -> None:
    source = inspect.getsource(parameters.Gate)
    assert right in source
    result = explore(as_threads(source.replace(right, wrong)))
    assert result.violation, f"{wrong!r} instead of {right!r} was not seen"
