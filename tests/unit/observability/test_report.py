from __future__ import annotations

import math
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_grpo.observability.report import write_report
from megatron_grpo.observability.sinks import JSONLSink

VOID = {"meta", "path", "rect", "link", "br", "img"}
CHARTS = [
    "Reward",
    "Validation accuracy",
    "Response length, tokens",
    "Truncated responses, fraction",
    "KL to the reference policy",
    "Clip fraction",
    "Sequence log-prob error",
    "Loss",
    "Gradient norm",
    "Learning rate",
    "Degenerate groups, fraction",
    "Step time, seconds",
]


class Page(HTMLParser):
    """The page as data; fails on tags that are not closed in order and on anything fetched from elsewhere."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.tags: list[str] = []
        self.text: dict[str, list[str]] = {}
        self.feed(html)
        self.close()
        assert self.open_tags == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href", "xlink:href", "onclick", "onload"} & {name for name, _ in attrs}
        self.tags.append(tag)
        if tag not in VOID:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open_tags and data.strip():
            self.text.setdefault(self.open_tags[-1], []).append(data)


def report(tmp_path: Path, steps: dict[int, dict[str, float]], config: str = "seed: 1\n") -> tuple[str, Page]:
    run = tmp_path / "run-7"
    sink = JSONLSink(run / "metrics.jsonl")
    for step, metrics in steps.items():
        sink.log(step, metrics)
    sink.close()
    (run / "config.yaml").write_text(config)
    write_report(run / "metrics.jsonl", run / "config.yaml", run / "report.html")
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "metrics.jsonl", "report.html"]
    html = (run / "report.html").read_text()
    return html, Page(html)


def training_run() -> dict[int, dict[str, float]]:
    """30 steps: reward 0.01 n, 5 s each of which 3 s rollout; accuracy 0.125 before and 0.75 after."""
    steps: dict[int, dict[str, float]] = {0: {"validation/accuracy": 0.125}}
    for n in range(1, 31):
        steps[n] = {
            "reward/mean": 0.01 * n,
            "response_length/mean": 200.0 + n,
            "response_length/truncated_fraction": 0.1,
            "kl_penalty": 0.001 * n,
            "clip_fraction_low": 0.01,
            "clip_fraction_high": 0.02,
            "seq_logprob_error_mean": 1.01,
            "seq_logprob_error_max": 1.05,
            "loss": 0.5,
            "grad_norm": math.nan if n == 7 else 0.4,
            "lr": 1e-6,
            "groups/degenerate_fraction": 0.25,
            "time/rollout_s": 3.0,
            "time/train_s": 1.5,
            "time/refit_s": 0.5,
            "time/step_s": 5.0,
        }
    steps[30]["validation/accuracy"] = 0.75
    return steps


def test_summary_numbers(tmp_path: Path) -> None:
    _, page = report(tmp_path, training_run())
    # first ten: mean of 0.01 ... 0.10; last ten: 0.21 ... 0.30; 30 steps of 5 s
    assert page.text["strong"] == ["0.055 → 0.255", "0.125 → 0.750", "30", "0:02:30", "rollout", "1.050000"]
    assert page.text["small"] == [
        "first 10 steps, last 10 steps: +0.200",
        "steps 0 and 30: +0.625",
        "0 to 30",
        "5.0 s per step",
        "60% of the time",
        "worst sequence, trainer against engine; 1 is none",
    ]
    assert page.text["h1"] == ["run-7 - GRPO run"]


def test_every_curve_is_drawn_with_its_last_values(tmp_path: Path) -> None:
    html, page = report(tmp_path, training_run())
    assert page.text["h3"] == CHARTS
    assert page.tags.count("svg") == len(CHARTS)
    assert page.text["output"][:3] == ["step 30 · 0.3", "step 30 · 0.75", "step 30 · 230"]
    assert "step 7\nnan" in page.text["title"]
    assert "step 12\nlow 0.01\nhigh 0.02" in page.text["title"]
    assert "step 30\nrollout 3\ntrain 1.5\nrefit 0.5" in page.text["title"]
    assert page.text["p"] == ["NaN or infinite values, shown as gaps: grad_norm (1)"]
    assert page.text["th"][5:8] == ["clip_fraction_high", "clip_fraction_low", "grad_norm"]
    assert "http://" not in html
    assert "https://" not in html
    assert "url(" not in html
    assert "@import" not in html


def test_everything_from_outside_is_escaped(tmp_path: Path) -> None:
    nasty = '<script>alert("x")</script> & </pre>'
    html, page = report(tmp_path, {1: {f"reward/{nasty}": 1.0, "reward/mean": 0.5}}, f"note: '{nasty}'\n")
    assert page.tags.count("script") == 1
    assert nasty not in html
    assert f"note: '{nasty}'\n" in "".join(page.text["pre"])
    assert f"reward/{nasty}" in "".join(page.text["th"])


def test_missing_metrics_say_so(tmp_path: Path) -> None:
    _, page = report(tmp_path, {1: {"reward/mean": 0.5}, 2: {"reward/mean": math.nan}})
    assert page.text["output"] == ["step 2 · nan"] + ["not recorded"] * (len(CHARTS) - 1)
    assert page.text["strong"] == ["0.500", "-", "2", "-", "-", "-"]


def test_a_single_step(tmp_path: Path) -> None:
    _, page = report(tmp_path, {30: training_run()[30]})
    assert page.text["strong"] == ["0.300", "0.750", "1", "0:00:05", "rollout", "1.050000"]
    assert page.tags.count("svg") == len(CHARTS)


def test_no_steps_at_all(tmp_path: Path) -> None:
    _, page = report(tmp_path, {})
    assert page.text["p"] == ["No steps recorded."]
    assert page.text["strong"] == ["-", "-", "0", "-", "-", "-"]


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    run = tmp_path / "long"
    run.mkdir()
    line = (
        '{{"step": {0}, "reward/mean": {1}, "grad_norm": {2}, "time/step_s": 2.0, "time/rollout_s": 1.0}}\n'
    )
    spike = 77_777
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(line.format(n, n / 1e5, 900.0 if n == spike else 1.0) for n in range(1, 100_001))
        file.write('{"step": 100001, "rew')
    (run / "config.yaml").write_text("seed: 1\n")
    write_report(run / "metrics.jsonl", run / "config.yaml", run / "report.html")
    html = (run / "report.html").read_text()
    page = Page(html)
    assert len(html) < 400_000
    assert page.text["strong"][2:] == ["100000", "55:33:20", "rollout", "-"]
    assert page.text["output"][0] == "steps 99501 to 100000 · 0.9975"
    assert ">1000</text>" in html  # the axis of the gradient norm reaches the one spike of 900
    assert page.text["p"] == [
        "lines of the metrics file that could not be read: 1",
        "Each point is the mean of 500 steps, the bar behind it their range.",
    ]


def test_missing_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        write_report(tmp_path / "metrics.jsonl", tmp_path / "config.yaml", tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
