"""The page: plain HTML and pictures inside it, nothing to load from elsewhere."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from bench.compare.rows import table_rows, targets_of
from bench.record import Target

from .figures import draw_lanes, draw_overhead, draw_scaling, draw_speedups

__all__ = ["build_page"]

Line = Mapping[str, Any]

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1180px; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.6em; } h2 { font-size: 1.25em; margin-top: 2em; } h3 { font-size: 1.05em; margin-top: 1.6em; }
img { max-width: 100%; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 12.5px; margin: .6em 0; }
th, td { padding: 2px 9px; text-align: right; border-bottom: 1px solid #e3e6ea; white-space: nowrap; }
th { background: #f4f6f8; vertical-align: bottom; } td.text, th.text, th.note { text-align: left; }
td.note { white-space: normal; min-width: 15em; text-align: left; color: #555; }
tr.ours td { background: #eef7ee; } .pass { color: #1b7837; } .fail { color: #b2182b; font-weight: 600; }
.small { color: #555; font-size: 13px; }
"""
HEADS = {
    "method": "method",
    "median_ms": "median<br>ms",
    "p20_ms": "p20<br>ms",
    "p80_ms": "p80<br>ms",
    "over_ddp": "speed-up<br>over DDP",
    "over_best_peer": "speed-up over<br>best peer",
    "exposed_ms": "exposed<br>ms",
    "of_bound": "bound /<br>median",
    "sent_mb": "sent MB<br>a rank",
    "live_mb": "live MB<br>a rank",
    "params_equal": "weights<br>equal",
    "peak_rss_mb": "peak RSS<br>MB a rank",
    "num_buckets": "buckets",
    "live_over_params": "live /<br>parameters",
    "note": "plan, or why absent",
}
INTRO = (
    "Every way to train in one run, methods interleaved. Bars: speed-up over DDP with its default buckets; black line: "
    "20th to 80th percentile; red tick: the bound of the method (an ideal network without latency, each byte at the "
    "bus bandwidth of gloo's all_reduce in the same run). Green: dear; grey: peers; yellow: published "
    "schedules run by dear's executor; light: references that train nothing, or the wrong weights. Lanes show compute "
    "of every method, and what moves where dear's executor moves it: DDP and FSDP2 do not tell."
)


def build_page(lines: Sequence[Line]) -> str:
    """`lines` of any order: those of compare become sections by testbed, then memory and scaling."""
    compared = [line for line in lines if line["benchmark"] == "compare"]
    parts = [f"<p>{INTRO}</p>"] if compared else []
    for run in dict.fromkeys(map(_run_of, compared)):
        mine = [line for line in compared if _run_of(line) == run]
        parts += _testbed(f"{mine[0]['testbed']}, {mine[0]['hosts']} ranks", mine)
    memory = [line for line in lines if line["benchmark"] == "memory"]
    for record in memory:
        parts += _memory(record)
    scaling = [line for line in lines if line["benchmark"] == "scaling"]
    for model in dict.fromkeys((line["model"], line["testbed"]) for line in scaling):
        mine = [line for line in scaling if (line["model"], line["testbed"]) == model]
        title = f"Scaling: {model[0]} on {model[1]}, ratio of communication to compute kept"
        parts += [f"<h2>{_text(title)}</h2>", _image(draw_scaling(mine, title)), _origin(mine[0])]
    for record in (line for line in lines if line["benchmark"] == "tensors"):
        parts += _overhead(record)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>dear: benchmarks</title>'
        f"<style>{STYLE}</style></head><body><h1>dear: benchmarks</h1>{''.join(parts)}</body></html>\n"
    )


def _run_of(line: Line) -> tuple[object, ...]:
    """Lines of one run of `compare` share a section."""
    return (line["run"], line["testbed"], line["hosts"])


def _testbed(name: str, lines: Sequence[Line]) -> list[str]:
    by_model = {model: [line for line in lines if line["model"] == model] for model in _models(lines)}
    parts = [f"<h2>{_text(name)}</h2>", _origin(lines[0]), _image(draw_speedups(by_model, name))]
    for model, mine in by_model.items():
        first = mine[0]
        s = first["settings"]
        told = (
            f"{s['cluster']}; {s['mb']:g} MB of parameters; without communication {first['compute_ms']:.1f} ms, one "
            f"all-reduce of everything {first['all_reduce_ms']:.1f} ms (bus bandwidth {first['bus_gbps']:.3f} Gbit/s)"
        )
        if "scale" in s:
            told += f"; tensors x {s['scale']:.4g}, compute {s['speed']:.3g} times as fast as published"
        parts += [f"<h3>{_text(model)}, {_text(name)}</h3>", f'<p class="small">{_text(told)}</p>']
        parts += [_table(table_rows(mine)), _targets(targets_of(mine)) if first["testbed"] != "real" else ""]
        if any(line.get("spans_ms") for line in mine):
            parts.append(
                _image(draw_lanes(mine, f"{model}, {name}: one iteration of rank 0 and what it leaves to the next"))
            )
    return parts


def _models(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line["model"] for line in lines))


def _memory(record: Line) -> list[str]:
    s = record["settings"]
    title = f"Memory: {s['model']}, {s['ranks']} ranks, {s['optimizer']}"
    return [f"<h2>{_text(title)}</h2>", _origin(record), _table(record["rows"]), _targets(_stored(record))]


def _overhead(record: Line) -> list[str]:
    title = f"Host cost against the number of tensors, {record['settings']['ranks']} ranks"
    figure = draw_overhead(record["rows"], record["exponents"], title)
    return [f"<h2>{_text(title)}</h2>", _origin(record), _image(figure), _targets(_stored(record))]


def _stored(record: Line) -> list[Target]:
    return [Target(t["name"], t["value"], t["limit"]) for t in record["targets"]]


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    kinds = {name: "note" if name == "note" else "text" if name == "method" else "" for name in names}
    heads = "".join(f'<th class="{kinds[n]}">{HEADS.get(n, _text(n.replace("_", " ")))}</th>' for n in names)
    body = []
    for row in rows:
        ours = str(row.get("method", "")).partition(":")[0] in ("dear", "dear-fill")
        cells = "".join(f'<td class="{kinds[n]}">{_text(_cell(n, row.get(n)))}</td>' for n in names)
        body.append(f'<tr class="{"ours" if ours else ""}">{cells}</tr>')
    return f'<div class="wide"><table><tr>{heads}</tr>{"".join(body)}</table></div>'


def _cell(name: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.{1 if name.endswith('_ms') and value >= 10 else 2}f}"


def _targets(targets: Sequence[Target]) -> str:
    items = (f'<li class="{"pass" if t.passed else "fail"}">{_text(str(t))}</li>' for t in targets)
    return f"<ul>{''.join(items)}</ul>" if targets else ""


def _origin(line: Line) -> str:
    """The command, the code and the machine."""
    versions, machine = line["versions"], line["machine"]
    commit = (line["commit"] or "no commit")[:12] + ("-dirty" if (line["commit"] or "").endswith("-dirty") else "")
    told = (
        f"{' '.join(line['argv'])} — {line['utc']}, commit {commit}, torch {versions['torch']}, {machine['num_cores']} "
        f"cores of {machine['cpu_model']}" + (f", {machine['gpu']}" if machine["gpu"] else "")
    )
    return f'<p class="small"><code>{_text(told)}</code></p>'


def _image(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return f'<p><img alt="figure" src="data:image/svg+xml;base64,{encoded}"></p>'


def _text(text: object) -> str:
    return html.escape(str(text))
