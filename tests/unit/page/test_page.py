"""The page of a run: bounded, self-contained, and all that a model wrote is data in it."""

import base64
import hashlib
import json
import re
import time
from pathlib import Path

import pytest

from streamrl.cli.main import main
from streamrl.cli.report import (
    NUM_EVENTS,
    NUM_POINTS,
    as_data_block,
    as_series,
    page,
    page_data,
    read_events,
    read_points,
    write_page,
)
from streamrl.config import RunConfig, load_config, to_yaml
from streamrl.log_lines import json_line
from streamrl.run_folder import Launch, note_launch, prepare
from streamrl.samples.files import SampleFile
from streamrl.samples.record import Message
from streamrl.tracking.groups import GROUPS, grouped, groups_of, label_of
from tests.records import make_sample
from tests.unit.test_cli import QUICKSTART

ROOT = Path(__file__).parents[3]
HOSTILE = "</script><SCRIPT>alert(1)</script><!-- \u2028 & \"' \x1b[31m"


def make_run(folder: Path, lines: list[dict[str, object]]) -> RunConfig:
    settings = [f"run.folder={folder}", "run.name=run", "data.eval_source=reverse"]
    config = load_config(QUICKSTART, settings, {}).config
    (config.run.path / "logs").mkdir(parents=True)
    (config.run.path / "config.yaml").write_text(to_yaml(config))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (config.run.path / "metrics.jsonl").write_text(text)
    return config


def data_of(text: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    parsed: dict[str, object] = json.loads(found[1])
    return parsed


@pytest.mark.parametrize("num_lines", [0, 1, 5, 399, 400, 401, 5000])
def test_points_are_bounded_and_their_means_are_those_of_all_lines(tmp_path, num_lines):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": i + 1, "time_s": float(i), "a/b": i, "note": "x"} for i in range(num_lines)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "torn')
    points = read_points(path)
    assert len(points) <= 2 * NUM_POINTS
    assert sum(point.num_lines for point in points) == num_lines
    assert len({point.num_lines for point in points[:-1]}) <= 1
    series = as_series(points)
    if num_lines:
        assert series["step"][-1] == num_lines
        total = sum(point.sums["a/b"][0] for point in points)
        assert total == sum(range(num_lines))
        values = series["metrics"]["a/b"]
        assert (min(values.get("low", values["mean"])), list(series["metrics"])) == (0, ["a/b"])
        assert max(values.get("high", values["mean"])) == pytest.approx(num_lines - 1, rel=1e-3)


def test_what_was_not_measured_is_no_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a/b": null, "a/c": 1}\n{"step": 2, "a/b": 2}\nnull\n[]\n\xff\n')
    metrics = as_series(read_points(path))["metrics"]
    assert metrics == {"a/c": {"mean": [1, None]}, "a/b": {"mean": [None, 2]}}
    assert read_points(tmp_path / "none") == []


def test_nothing_in_the_data_ends_its_block():
    data = {HOSTILE: [HOSTILE, {"a": HOSTILE}], "number": 1.5, "none": None}
    block = as_data_block(data)
    assert "<" not in block
    assert "\u2028" not in block
    assert json.loads(block) == data
    text = page(HOSTILE, data)
    assert data_of(text) == data
    assert text.count("<script") == text.lower().count("</script") == 2


def test_the_page_runs_its_own_script_alone_and_loads_nothing(tmp_path):
    config = make_run(tmp_path, [{"step": 1, "reward/mean": 0.5}])
    text = write_page(config).read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
    places = set(re.findall(r"[a-z]+://[^\s\"']+", text))
    assert places == {"https://github.com/leeoniya/uPlot"}, "the library's own name of itself"
    assert "uPlot (v1.6.32)" in script
    assert "Copyright (c) 2022 Leon Sorokin" in script
    assert not re.search(r"\b(src|href)=", text)
    assert "innerHTML" not in script
    assert not re.search(r"\beval\b|document\.write", script)


def test_the_page_has_the_charts_of_its_metrics_and_all_others(tmp_path):
    lines = [{"step": i, "reward/mean": i, "mine/x": 1, "time_s": i, "odd": 1} for i in (1, 2)]
    config = make_run(tmp_path, lines)
    validated = {"step": 1, "validation/mean@1": 0.25, "validation/mean@4": 0.5}
    (config.run.path / "validation.jsonl").write_text(json.dumps(validated) + "\n")
    data = page_data(config, lines)
    (overview,) = (chart["series"] for chart in data["overview"])
    assert overview == {"reward/mean": "training", "validation/mean@1": "held-out"}
    shown = {g["name"]: [chart["series"] for chart in g["charts"]] for g in data["groups"]}
    both = {"validation/mean@1": "mean@1", "validation/mean@4": "mean@4"}
    assert shown == {"validation": [both], "mine": [{"mine/x": "x"}]}, "each metric is drawn"
    assert data["versions"]["metrics"]["validation/mean@4"] == {"mean": [0.5]}


def test_the_page_says_first_what_the_run_is_and_how_it_went(tmp_path):
    lines = [{"step": i, "reward/mean": i / 10, "learner/step_s": 0.5} for i in range(1, 7)]
    config = prepare(make_run(tmp_path, lines), resume=True, new=False, binds=True)
    data = page_data(config, lines)
    assert data["state"] == "6 of 550 steps in 3.0 s"
    known = dict(data["about"])
    assert (known["data"], known["reward"]) == ("reverse", "exact_match")
    assert known["algorithm"].startswith("stream (advantage opob")
    settings = dict(data["settings"])
    assert settings["learner.optimizer.lr"] == "0.0007"
    assert settings["data.source_kwargs.min_length"] == "3"
    assert "learner.optimizer.eps" not in settings, "is the default"
    by_launch = {"run.folder", "buffer.url", "weights.address", "validation.every"}
    assert not by_launch & set(settings)
    (reward,) = (tile for tile in data["tiles"] if tile["name"] == "training reward")
    assert reward["value"] == "0.150 \u2192 0.550"
    assert reward["is_first"]
    note_launch(config.run.path, Launch(failure="learner: out of memory"))
    without = load_config(QUICKSTART, ["algorithm.rollout_is=token_is"], {}).config
    failed = page_data(without.with_values(run=config.run.model_dump()), lines)
    assert failed["state"] == "failed after 6 of 550 steps in 3.0 s"
    assert "{}" not in dict(failed["settings"]).values(), "a section of defaults is no change"


def test_integrity_is_said_by_checks_that_name_the_documentation(tmp_path):
    def shown(*lines: dict[str, object]) -> dict[str, bool]:
        path = config.run.path / "metrics.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        data = page_data(config, [])
        for check in data["checks"]:
            page, _, anchor = check["page"].partition("#")
            titles = re.findall(r"^#+ (.*)", (ROOT / page).read_text(), re.MULTILINE)
            assert "href" not in check, "a link would be dead where the page is sent"
            assert not anchor or anchor in {t.lower().replace(" ", "-") for t in titles}
        return {check["text"].partition(":")[0]: check["holds"] for check in data["checks"]}

    config = make_run(tmp_path, [])
    assert shown() == {}
    books = {"granted": 3, "acknowledged": 3}
    (config.run.path / "books.json").write_text(json.dumps(books))
    healthy = {
        "buffer/staleness_max": 1,
        "learner/skipped_update": 0.0,
        "weights/num_failed_loads": 0.0,
    }
    assert shown({"step": 1, **healthy}) == {
        "every group is accounted for": True,
        "staleness stayed within its bound": True,
        "every gradient was finite": True,
        "every weight update was loaded": True,
    }
    (config.run.path / "books.json").write_text(json.dumps({**books, "granted": 4}))
    broken = dict.fromkeys(healthy, 2)
    assert set(shown({"step": 1, **broken}, {"step": 2, **healthy}).values()) == {False}


def test_tokens_are_colored_as_far_as_their_weights_are_known(tmp_path):
    config = make_run(tmp_path, [])
    message = Message("assistant", f"ab{HOSTILE}", (1, 1), (0.5, 2.0))
    messages = (message, Message("environment", "plain"))
    sample = make_sample(prompt="p" * 20_000, messages=messages)
    SampleFile(config.run.path, 1, 10**6).append([sample])
    (shown,) = page_data(config, [])["samples"]
    (found,) = shown["samples"]
    first, second = found["messages"]
    assert first["pieces"] == [("a", 0.5), ("b", 2.0)]
    assert first["rest"] == HOSTILE.replace("\u2028", "\\u2028").replace("\x1b", "\\x1b")
    assert second == {"role": "environment", "pieces": [], "rest": "plain"}
    assert len(found["prompt"]) < 8100


TEXT_LOG = """2026-11-22 19:28:10,250 generator-0 I actors.daemon: generator-0 serves m with hf
2026-11-22 19:28:11,000 generator-0 I actors.daemon: something else
2026-11-22 19:28:12,000 generator-0 W buffers: lease s/1 is lost; its group is given up
2026-11-22 19:28:13,000 generator-0 C streamrl.service: crashed: no
Traceback (most recent call last):
2026-11-22 19:28:14 launcher: generator-0 was killed by SIGKILL, as when memory runs out
2026-11-22 19:28:15,000 generator-0 I streamrl.service: SIGTERM: draining; a second one stops
2026-11-22 19:28:16,000 generator-0 I streamrl.service: generator-0: done
"""


def test_the_events_of_a_log_are_the_same_as_text_and_as_json(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "generator-0.log").write_text(TEXT_LOG)
    events = read_events(tmp_path)
    assert [(e.kind, e.text.partition(" ")[0]) for e in events] == [
        ("start", "generator-0"),
        ("warning", "lease"),
        ("fault", "crashed:"),
        ("fault", "generator-0"),
        ("stop", "SIGTERM:"),
        ("stop", "generator-0:"),
    ]
    start_s = time.mktime(time.strptime("2026-11-22 19:28:10", "%Y-%m-%d %H:%M:%S"))
    assert events[0].time == pytest.approx(start_s + 0.25)
    levels = {"start": "info", "stop": "info", "warning": "warning", "fault": "error"}
    lines = [json_line("x", levels[e.kind], "n", e.text, time_s=e.time) for e in events]
    (tmp_path / "logs" / "generator-0.log").write_text("\n".join([*lines, "{torn", '{"a": 1}']))
    again = read_events(tmp_path)
    assert [(e.kind, e.text) for e in again] == [(e.kind, e.text) for e in events]
    assert again[0].time == pytest.approx(events[0].time)


def test_events_of_one_moment_stay_in_the_order_of_their_log(tmp_path):
    (tmp_path / "logs").mkdir()
    said = [f"2026-11-22 19:28:14 launcher: {text}\n" for text in ("z was killed", "a is started")]
    (tmp_path / "logs" / "launch.log").write_text("".join(said))
    assert [event.text for event in read_events(tmp_path)] == ["z was killed", "a is started"]


def test_faults_are_kept_where_there_are_too_many_warnings(tmp_path):
    (tmp_path / "logs").mkdir()
    warning = "2026-11-22 19:28:12,000 learner W a: x\n"
    text = TEXT_LOG + 2 * NUM_EVENTS * warning
    (tmp_path / "logs" / "learner.log").write_text(text)
    events = read_events(tmp_path)
    assert len(events) == NUM_EVENTS
    assert sum(event.kind == "fault" for event in events) == 2


def test_the_command_writes_the_page_and_says_where(tmp_path, capsys, monkeypatch):
    config = make_run(tmp_path, [{"step": 1, "reward/mean": 0.5}])
    assert main(["report", str(config.run.path), "--html"]) == 0
    path = str(config.run.path / "report.html")
    assert capsys.readouterr().out.strip() == path
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["report", str(config.run.path)]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"│ report │ {path} │" in rows


def test_groups_are_sections_by_name():
    assert len({group.name for group in GROUPS}) == len(GROUPS)
    names = ["mine/a", "time_s", "reward/mean", "buffer/leased", "step"]
    assert [group.name for group in groups_of(names)] == ["reward", "buffer", "mine"]
    assert grouped(dict.fromkeys(names, 1)).keys() == {"mine/a", "reward/mean", "buffer/leased"}
    charts = [chart for group in GROUPS for chart in group.charts]
    assert all(re.compile(pattern) for chart in charts for pattern in chart.metrics)
    for group in GROUPS:
        for pattern in (pattern for chart in group.charts for pattern in chart.metrics):
            assert pattern.startswith((f"{group.name}/", "learner/(policy_version"))
    labels = [label_of(chart, "mismatch/staleness_3_4/kl") for chart in charts]
    assert [label for label in labels if label] == ["3_4"]


@pytest.mark.parametrize(
    "line",
    [
        "0000-00-00 00:00:00 is the date in the reply",
        "2026-02-30 10:00:00 was the date",
        '{"a":' * 5000,
        '{"time": 1, "level": [], "message": 2}',
    ],
)
def test_what_somebodys_code_prints_is_no_event(tmp_path, line):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "generator-0.log").write_text(line + "\n")
    assert read_events(tmp_path) == []
