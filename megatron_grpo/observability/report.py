"""``report.html``: one page about a run, complete in itself (no network, scripts or fonts from elsewhere)."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import NamedTuple

from megatron_grpo.observability.charts import Axis, Series, line_chart, stacked_chart
from megatron_grpo.observability.console import format_duration
from megatron_grpo.observability.timers import PHASES

Metrics = Mapping[str, Series]

_CURVES: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("Reward", (("mean", "reward/mean"),)),
    ("Validation accuracy", (("accuracy", "validation/accuracy"),)),
    ("Response length, tokens", (("mean", "response_length/mean"),)),
    ("Truncated responses, fraction", (("truncated", "response_length/truncated_fraction"),)),
    ("KL to the reference policy", (("KL", "kl_penalty"),)),
    ("Clip fraction", (("low", "clip_fraction_low"), ("high", "clip_fraction_high"))),
    ("Sequence log-prob error", (("mean", "seq_logprob_error_mean"), ("max", "seq_logprob_error_max"))),
    ("Loss", (("loss", "loss"),)),
    ("Gradient norm", (("norm", "grad_norm"),)),
    ("Learning rate", (("lr", "lr"),)),
    ("Degenerate groups, fraction", (("degenerate", "groups/degenerate_fraction"),)),
)
_SMOOTHED = frozenset({"Reward"})


class Fact(NamedTuple):
    """One line of the summary."""

    label: str
    value: str
    note: str


def write_report(metrics_jsonl: Path, config_yaml: Path, output: Path) -> None:
    """Write the report of a run; ``output`` is replaced atomically.

    Args:
        metrics_jsonl: what ``JSONLSink`` wrote. Lines that are not JSON objects with a step are counted in
            the report and skipped.
        config_yaml: the resolved configuration, shown as it is.
        output: the HTML file.

    Raises:
        FileNotFoundError: one of the two inputs is missing.
    """
    metrics, steps, unreadable = read_metrics(metrics_jsonl)
    name = metrics_jsonl.resolve().parent.name
    page = _page(name, metrics, steps, unreadable, config_yaml.read_text(encoding="utf-8"))
    partial = output.with_name(output.name + ".partial")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, output)


def read_metrics(path: Path) -> tuple[dict[str, Series], list[int], int]:
    """Read ``metrics.jsonl``: (metric -> values, the steps, number of lines that could not be read)."""
    metrics: defaultdict[str, Series] = defaultdict(Series)
    steps: list[int] = []
    unreadable = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                values = json.loads(line)
                step = int(values.pop("step"))
            except (ValueError, KeyError, TypeError, AttributeError):
                unreadable += 1
                continue
            steps.append(step)
            for key, value in values.items():
                if value is None or isinstance(value, int | float):
                    metrics[key].append(step, math.nan if value is None else float(value))
    return dict(metrics), steps, unreadable


def _page(name: str, metrics: Metrics, steps: list[int], unreadable: int, config: str) -> str:
    title = escape(f"{name} - GRPO run")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<section id="summary" aria-label="Summary">{"".join(map(_tile, _facts(metrics, steps)))}</section>
{_warnings(metrics, unreadable)}
<section id="curves" aria-label="Curves">{_curves(metrics, steps)}</section>
<details id="metrics"><summary>All metrics</summary><div class="scroll">{_table(metrics)}</div></details>
<details id="config"><summary>Resolved configuration</summary><pre>{escape(config)}</pre></details>
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def summarize(metrics_jsonl: Path) -> list[Fact]:
    """The facts at the top of the report: reward, validation accuracy, steps, wall time, slowest phase."""
    metrics, steps, _ = read_metrics(metrics_jsonl)
    return _facts(metrics, steps)


def _facts(metrics: Metrics, steps: list[int]) -> list[Fact]:
    span = f"{min(steps)} to {max(steps)}" if steps else ""
    turns = sum(step > 0 for step in steps)
    steps_fact = Fact("Steps", str(turns), span)
    return [_reward(metrics), _validation(metrics), steps_fact, *_times(metrics), _logprob_error(metrics)]


def _reward(metrics: Metrics) -> Fact:
    rewards = metrics["reward/mean"].finite() if "reward/mean" in metrics else []
    if len(rewards) < 2:
        return Fact("Mean reward", f"{rewards[0]:.3f}" if rewards else "-", "")
    count = min(10, len(rewards) // 2)
    first, last = sum(rewards[:count]) / count, sum(rewards[-count:]) / count
    window = f"{count} steps" if count > 1 else "step"
    note = f"first {window}, last {window}: {last - first:+.3f}"
    return Fact("Mean reward", f"{first:.3f} → {last:.3f}", note)


def _validation(metrics: Metrics) -> Fact:
    label, values = "Validation accuracy", metrics.get("validation/accuracy", Series())
    points = [point for point in zip(values.steps, values.values, strict=True) if math.isfinite(point[1])]
    if not points:
        return Fact(label, "-", "not measured")
    (first_step, first), (last_step, last) = points[0], points[-1]
    if len(points) == 1:
        return Fact(label, f"{first:.3f}", f"step {first_step}")
    note = f"steps {first_step} and {last_step}: {last - first:+.3f}"
    return Fact(label, f"{first:.3f} → {last:.3f}", note)


def _logprob_error(metrics: Metrics) -> Fact:
    label, errors = "Log-prob error", metrics.get("seq_logprob_error_max", Series()).finite()
    if not errors:
        return Fact(label, "-", "not measured")
    return Fact(label, f"{max(errors):.6f}", "worst sequence, trainer against engine; 1 is none")


def _times(metrics: Metrics) -> tuple[Fact, Fact]:
    durations = metrics["time/step_s"].finite() if "time/step_s" in metrics else []
    if not durations:
        return Fact("Wall time", "-", ""), Fact("Slowest phase", "-", "")
    wall = sum(durations)
    tiles = [Fact("Wall time", format_duration(wall), f"{wall / len(durations):.1f} s per step")]
    phases = {p: sum(metrics[f"time/{p}_s"].finite()) for p in PHASES if f"time/{p}_s" in metrics}
    if not phases or not wall:
        return tiles[0], Fact("Slowest phase", "-", "")
    slowest = max(phases, key=lambda phase: phases[phase])
    share = f"{phases[slowest] / wall:.0%} of the time"
    return tiles[0], Fact("Slowest phase", slowest, share)


def _tile(fact: Fact) -> str:
    label, value, note = map(escape, fact)
    return f"<div><h2>{label}</h2><strong>{value}</strong><small>{note}</small></div>"


def _warnings(metrics: Metrics, unreadable: int) -> str:
    notes = []
    broken = {key: len(values.values) - len(values.finite()) for key, values in metrics.items()}
    named = ", ".join(f"{key} ({count})" for key, count in sorted(broken.items()) if count)
    if named:
        notes.append(f"NaN or infinite values, shown as gaps: {named}")
    if unreadable:
        notes.append(f"lines of the metrics file that could not be read: {unreadable}")
    return "".join(f'<p class="warning">{escape(note)}</p>' for note in notes)


def _curves(metrics: Metrics, steps: list[int]) -> str:
    if not steps:
        return "<p>No steps recorded.</p>"
    axis = Axis(min(steps), max(steps))
    figures = []
    if axis.width > 1:
        note = f"Each point is the mean of {axis.width} steps, the bar behind it their range."
        figures.append(f'<p class="note">{note}</p>')
    for title, members in _CURVES:
        series = [(label, metrics[key]) for label, key in members if key in metrics]
        figures.append(line_chart(title, axis, series, smooth=title in _SMOOTHED))
    times = [(phase, metrics[f"time/{phase}_s"]) for phase in PHASES if f"time/{phase}_s" in metrics]
    figures.append(stacked_chart("Step time, seconds", axis, times))
    return "".join(figures)


def _table(metrics: Metrics) -> str:
    rows = []
    for key in sorted(metrics):
        values = metrics[key].finite()
        numbers = (
            (f"{x:.6g}" for x in (values[0], values[-1], min(values), max(values))) if values else "----"
        )
        cells = "".join(f"<td>{number}</td>" for number in numbers)
        rows.append(f"<tr><th>{escape(key)}</th>{cells}</tr>")
    head = "<tr><th>metric</th><th>first</th><th>last</th><th>min</th><th>max</th></tr>"
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


_STYLE = """
:root { color-scheme: light dark; --page: #f6f6f4; --card: #fff; --ink: #1b1d20; --soft: #666b73;
  --line: #e5e5e1; --warn: #9a3412;
  --c0: #2b66c4; --c1: #dd7a1c; --c2: #17946a; --c3: #9a4fc4; --c4: #9aa0a8; }
@media (prefers-color-scheme: dark) { :root { --page: #121315; --card: #1c1e21; --ink: #e9e9e6;
  --soft: #9a9fa8; --line: #303338; --warn: #fdba74; --c0: #6fa4f2; --c1: #f0a04f; --c2: #4cc79a;
  --c3: #c48be8; --c4: #70767f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1500px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 22px; margin: 0 0 16px; overflow-wrap: anywhere; }
#summary { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); }
#summary div, figure, details { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 14px; }
#summary h2 { font-size: 13px; font-weight: 500; color: var(--soft); margin: 0; }
#summary strong { display: block; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }
#summary small { color: var(--soft); font-size: 13px; }
.warning { color: var(--warn); margin: 14px 0 0; overflow-wrap: anywhere; }
#curves { display: grid; gap: 12px; margin: 16px 0;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); }
.note { grid-column: 1 / -1; margin: 0; color: var(--soft); }
figure { margin: 0; min-width: 0; display: flex; flex-direction: column; }
figcaption { display: flex; flex-wrap: wrap; gap: 0 12px;
  justify-content: space-between; align-items: baseline; }
h3 { font-size: 15px; font-weight: 600; margin: 0; }
output { color: var(--soft); font-size: 13px; font-variant-numeric: tabular-nums; }
.legend { display: flex; flex-wrap: wrap; gap: 0 14px; list-style: none; margin: 2px 0 0; padding: 0;
  font-size: 13px; color: var(--soft); }
.legend li::before { content: ""; display: inline-block; width: 10px; height: 10px; border-radius: 3px;
  background: var(--key); margin-right: 6px; }
svg { display: block; overflow: visible; width: 100%; height: auto; margin-top: auto; padding-top: 6px; }
svg text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
svg path:not(.area) { fill: none; }
svg .grid { stroke: var(--line); }
svg .curve { stroke-width: 2; stroke-linejoin: round; }
svg .range { stroke-width: 2; opacity: .25; }
svg .raw { stroke-width: 1; opacity: .35; }
svg .dots { stroke-width: 5; stroke-linecap: round; }
.hit rect { fill: transparent; }
.hit path { stroke: var(--soft); opacity: 0; pointer-events: none; }
.hit:hover path { opacity: .6; }
details { margin-top: 12px; }
details summary { cursor: pointer; font-weight: 600; }
pre, .scroll { overflow-x: auto; font-size: 13px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin-top: 8px; }
td, th { padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line); text-align: right; font-weight: 400; }
th:first-child { text-align: left; }
thead th { color: var(--soft); }
@media (max-width: 560px) { svg text { font-size: 16px; } main { padding: 12px 10px 32px; } }
"""

# The <title> of a hit column: the steps, then one line per series.
_SCRIPT = """
document.addEventListener("pointerover", (event) => {
  const hit = event.target.closest(".hit");
  if (!hit) return;
  const [where, ...values] = hit.querySelector("title").textContent.split("\\n");
  const figure = hit.closest("figure"), keys = figure.querySelectorAll(".legend span");
  figure.querySelector("output").textContent = keys.length ? where : where + " · " + values[0];
  keys.forEach((key, n) => { key.textContent = values[n]; });
});
"""
