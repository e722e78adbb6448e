"""The timeline's files, and when it may be asked for them."""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dear
from dear.timeline import Timeline

NUM_ITERATIONS = 3
LANES = ["compute", "pack", "communication", "step"]


class Job:
    """A small model in four buckets, after the first backward, which only observes."""

    def __init__(self) -> None:
        self.model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        plain = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = dear.DistributedOptimizer(plain, self.model, fusion=17 * 64 / 2**20)
        assert len(self.optimizer.plan.buckets) == 4
        self.timeline = Timeline(self.optimizer)
        self.train(1)
        self.optimizer.synchronize()  # else a recording begins with all-gathers of this iteration

    def train(self, num_iterations: int) -> None:
        for _ in range(num_iterations):
            self.optimizer.zero_grad()
            with self.timeline.span("forward"):
                loss = self.model(torch.ones(2, 16)).square().mean()
            with self.timeline.span("backward"):
                loss.backward()
            self.optimizer.step()


@pytest.fixture
def job() -> Iterator[Job]:
    dear.init(backend="local")
    yield Job()
    dear.shutdown()


def saved(timeline: Timeline, folder: Path) -> list[dict[str, Any]]:
    timeline.save(folder / "timeline.json")
    record = json.loads((folder / "timeline.json").read_text())
    assert record["displayTimeUnit"] == "ms"
    return record["traceEvents"]


def spans_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def recorded_by_rank(folder: str) -> list[dict[str, Any]]:
    dear.init()
    job = Job()
    with job.timeline:
        job.train(NUM_ITERATIONS)
    own = Path(folder, str(dear.rank()))
    own.mkdir()
    events = saved(job.timeline, own)
    dear.shutdown()
    return events


def test_each_rank_saves_every_op_of_each_iteration(pool: Any, tmp_path: Path) -> None:
    for rank, events in enumerate(pool.run(recorded_by_rank, str(tmp_path), size=2)):
        assert {event["pid"] for event in events} == {rank}
        meta = [(event["name"], event["args"].get("name")) for event in events if event["ph"] == "M"]
        assert ("process_name", f"rank {rank}") in meta
        assert [value for name, value in meta if name == "thread_name"] == LANES
        marks = [event["name"] for event in events if event["ph"] == "i"]
        assert marks == [f"end of iteration {number}" for number in (1, 2, 3)]

        names = [event["name"] for event in spans_of(events)]
        for name in ("forward", "backward", "optimizer.step()"):
            assert names.count(name) == NUM_ITERATIONS, name
        for kind, bucket in itertools.product(("pack", "reduce-scatter", "step", "all-gather"), range(4)):
            assert names.count(f"{kind}[{bucket}]") == NUM_ITERATIONS, (kind, bucket)

        ops = {(e["cat"], e["args"].get("bucket"), e["args"].get("step")): e for e in spans_of(events)}
        for bucket, step in itertools.product(range(4), (1, 2, 3)):
            reduced, gathered = ops["reduce-scatter", bucket, step], ops["all-gather", bucket, step]
            assert reduced["ts"] + reduced["dur"] <= gathered["ts"]
            assert sorted(reduced["args"]["parameters"].split(", ")) == [f"{bucket}.bias", f"{bucket}.weight"]


def test_spans_of_a_lane_nest(job: Job, tmp_path: Path) -> None:
    with job.timeline:
        job.train(NUM_ITERATIONS)
    spans = spans_of(saved(job.timeline, tmp_path))
    assert {span["tid"] for span in spans} == {1, 2, 3, 4}
    for one, other in itertools.combinations(spans, 2):
        if one["tid"] == other["tid"]:
            first, second = sorted((one, other), key=lambda span: (span["ts"], -span["dur"]))
            first_end, second_end = first["ts"] + first["dur"], second["ts"] + second["dur"]
            assert second["ts"] >= first_end - 1e-3 or second_end <= first_end + 1e-3, (first, second)


@pytest.mark.parametrize(
    ("lane", "label", "name", "category", "arguments"),
    [
        ("pack", "pack[3]", "pack[3]", "pack", {"bucket": 3}),
        (
            "communication",
            "reduce_scatter[12] (a.weight, a.bias, ...) in step 17",
            "reduce-scatter[12]",
            "reduce-scatter",
            {"bucket": 12, "parameters": "a.weight, a.bias, ...", "step": 17},
        ),
        ("communication", "gradient norm in step 17", "gradient norm", "gradient norm", {"step": 17}),
        (
            "communication",
            "all_gather of gradients[0] (w) in step 2",
            "all-gather of gradients[0]",
            "all-gather of gradients",
            {"bucket": 0, "parameters": "w", "step": 2},
        ),
        (
            "compute",
            "wait[2, 3, 4] (fc.weight)",
            "wait[2-4]",
            "wait",
            {"bucket": [2, 3, 4], "parameters": "fc.weight"},
        ),
        ("compute", "my [odd] name", "my [odd] name", "my [odd] name", {}),
        ("compute", "optimizer.step()", "optimizer.step()", "optimizer.step()", {}),
    ],
)
def test_labels_are_taken_apart(
    job: Job, tmp_path: Path, lane: str, label: str, name: str, category: str, arguments: dict[str, Any]
) -> None:
    with job.timeline:
        job.optimizer.trace.add(lane, label, 1.0, 1.5)
    (span,) = spans_of(saved(job.timeline, tmp_path))
    assert (span["name"], span["cat"], span["args"]) == (name, category, arguments)
    assert (span["ts"], span["dur"]) == (1e6, 0.5e6)


def test_only_the_last_recording_is_kept(job: Job, tmp_path: Path) -> None:
    with job.timeline:
        job.train(2)
    job.train(1)  # not recorded
    with job.timeline:
        job.train(1)
    job.train(1)
    events = saved(job.timeline, tmp_path)
    assert [event["name"] for event in events].count("forward") == 1
    assert [event["name"] for event in events if event["ph"] == "i"] == ["end of iteration 4"]


def test_plot_writes_a_png(job: Job, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with job.timeline:
        job.train(NUM_ITERATIONS)
    job.timeline.plot(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_plot_shows_lanes_buckets_iterations_and_a_legend(job: Job, tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    trace = job.optimizer.trace
    with job.timeline:
        for lane, name, start_s, end_s in (
            ("compute", "forward", 0.0, 0.4),
            ("compute", "wait[5]", 0.1, 0.2),
            ("compute", "augment", 0.4, 0.5),
            ("communication", "reduce_scatter[41] (w) in step 0", 0.5, 0.7),
            ("communication", "all_gather[42] (w) in step 0", 0.7, 0.701),  # too narrow for its number
            ("communication", "gradient norm in step 0", 0.8, 0.9),
        ):
            trace.add(lane, name, start_s, end_s)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        job.timeline.plot(tmp_path / "timeline.svg")
    drawing = (tmp_path / "timeline.svg").read_text()
    rows = ("compute", "reduce-scatter", "all-gather", "other collectives")
    legend = ("wait for parameters", "augment")
    for text in (*rows, *legend, "5", "41", "rank 0 of 1"):
        assert f">{text}</text>" in drawing, text
    for text in ("42", "pack", "step"):
        assert f">{text}</text>" not in drawing, text


def test_plot_without_matplotlib_names_the_extra(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with job.timeline:
        job.train(1)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'dear-pytorch\[demo\]'"):
        job.timeline.plot(tmp_path / "timeline.png")


def test_calls_in_the_wrong_order_are_errors(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with pytest.raises(dear.ScheduleError, match="has recorded nothing"):
        job.timeline.save(path)
    with pytest.raises(dear.ScheduleError, match="is not recording"):
        job.timeline.stop()
    job.timeline.start()
    job.train(1)
    for call in (job.timeline.start, lambda: job.timeline.save(path), lambda: job.timeline.plot(path)):
        with pytest.raises(dear.ScheduleError, match="recording"):
            call()
    job.timeline.stop()
    job.timeline.save(path)


def test_an_error_inside_ends_the_recording_and_passes(job: Job, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), job.timeline:
        job.train(1)
        _ = 1 / 0
    assert not job.optimizer.trace.enabled
    assert [e["name"] for e in saved(job.timeline, tmp_path)].count("backward") == 1
    with job.timeline:
        job.train(1)
