"""The endpoint, the alerts and the dashboard with a real Prometheus, on the loopback address."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from streamrl.tracking.groups import GROUPS
from tests.deploy.alert_cases import CASES
from tests.deploy.promtool import ALERTS, ROOT, promtool, require, rule_tests
from tests.ports import free_port
from tests.system.conftest import CONFIG, DEADLINE_S, STREAMRL, Launched, slow_reward

PROMETHEUS = ROOT / "deploy" / "prometheus" / "prometheus.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "streamrl.json"
EXTRA = """
tracking: {{prometheus: {{enabled: true}}}}
validation: {{every: 5}}
"""
# The run is slower than a laptop's, so that the scrapes of a second see it.
REWARD_S = 0.2


def test_rules_and_configuration_are_valid():
    assert f"{len(CASES)} rules found" in promtool("check", "rules", ALERTS)
    promtool("check", "config", PROMETHEUS)


def test_every_alert_fires_and_does_not_fire(tmp_path):
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    assert [rule["alert"] for group in groups for rule in group["rules"]] == list(CASES)
    assert all(case.fires and case.quiet for case in CASES.values())
    tests = tmp_path / "tests.yml"
    tests.write_text(rule_tests())
    assert "SUCCESS" in promtool("test", "rules", tests)


class Server:
    """A Prometheus that reads the targets of a folder of runs each second."""

    def __init__(self, folder: Path) -> None:
        settings = yaml.safe_load(PROMETHEUS.read_text())
        settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        settings["rule_files"] = [str(ALERTS)]
        (targets,) = settings["scrape_configs"][0]["file_sd_configs"]
        targets["files"] = [str(folder / ".prometheus" / "*.json")]
        targets["refresh_interval"] = "1s"
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(settings))
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        command = [
            require("prometheus", program="prometheus"),
            f"--config.file={file}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def is_ready(self) -> bool:
        """Whether it serves requests."""
        try:
            return httpx2.get(f"{self._url}/-/ready", timeout=DEADLINE_S).status_code == 200
        except httpx2.ConnectError:
            return False

    def get(self, path: str, **parameters: str) -> Any:
        reply = httpx2.get(f"{self._url}/api/v1/{path}", params=parameters, timeout=DEADLINE_S)
        content = reply.json()
        assert content["status"] == "success", content
        return content["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def value(self, expression: str) -> float | None:
        """Of the one series that answers."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else None


def until(condition: Callable[[], bool], run: Launched) -> None:
    """Waits for the condition; unblocked by it, by the end of the launch, or the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, run.log("learner")
        assert run.process.poll() is None, run.finish_output()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Launched, Server]]:
    """A run of the small task without an end, and a Prometheus that scrapes it."""
    require("prometheus", program="prometheus")
    folder = tmp_path_factory.mktemp("live")
    text = (CONFIG + EXTRA).format(folder=folder, model=folder / "model")
    text = text.replace("max_steps: 12", "max_steps: 100000").replace("count: 1", "count: 2")
    file = folder / "run.yaml"
    file.write_text(
        text.replace("source: copy", f"source: copy\n  reward: {slow_reward(folder, REWARD_S)}")
    )
    process = subprocess.Popen(
        [STREAMRL, "launch", str(file), "--no-view"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    run, server = Launched(process, folder / "run"), Server(folder)
    try:
        until(lambda: len(run.lines) >= 8 and server.is_ready(), run)
        yield run, server
    finally:
        process.send_signal(signal.SIGINT)
        run.finish_output()
        server.process.terminate()
        server.process.wait()
        assert not list((folder / ".prometheus").iterdir()), "each daemon takes its file away"


def expressions() -> list[tuple[str, str]]:
    """Panel and expression of each query of the dashboard."""
    dashboard = json.loads(DASHBOARD.read_text())
    return [
        (panel["title"], target["expr"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ] + [(note["name"], note["target"]["expr"]) for note in dashboard["annotations"]["list"]]


def filled(expression: str) -> str:
    return expression.replace("$run", "run").replace("$__rate_interval", "20s")


def test_every_daemon_is_scraped_with_its_labels(live):
    run, server = live
    roles = {"buffer": 1, "learner": 1, "generator": 2, "validator": 1}
    counts = 'count by (role) (up{run="run"} == 1)'
    until(lambda: _by(server, counts, "role") == roles, run)
    instances = {each["metric"]["instance"] for each in server.query('up{run="run"}')}
    assert {"run/buffer", "run/generator-1"} <= instances
    tokens = 'streamrl_generator_tokens_total{id="generator-0"}'
    _shown(live, tokens)
    labels = server.query(f"last_over_time({tokens}[5m])")[0]["metric"]
    assert (labels["run"], labels["role"], labels["instance"]) == (
        "run",
        "generator",
        "run/generator-0",
    )
    assert not any("exported_" in name for name in server.get("labels"))


def test_what_prometheus_shows_is_what_the_run_records(live):
    run, server = live
    version = server.value("max(streamrl_learner_policy_version)") or 0
    assert version <= len(run.lines) + 1
    until(lambda: (server.value("max(streamrl_learner_policy_version)") or 0) > version, run)
    # The buffer's reading may be of three seconds before the learner's.
    until(lambda: bool(server.value("streamrl_buffer_leases_granted_total")), run)
    granted = _shown(live, "streamrl_buffer_leases_granted_total")
    assert 0 < granted <= run.lines[-1]["buffer/granted"] + 100
    # Each of both in the reading of another second.
    assert _shown(live, "streamrl_buffer_books_balanced") == 1
    groups = _shown(live, "streamrl_group_staleness_versions_count")
    assert groups / 4 <= len(run.lines)


def test_every_metric_of_a_step_belongs_to_a_group(live):
    run, _ = live
    names = {name.partition("/")[0] for name in run.lines[-1] if "/" in name}
    assert names <= {group.name for group in GROUPS}


def test_every_query_of_the_dashboard_answers(live):
    run, server = live
    until(lambda: bool(server.query("streamrl_validation_policy_version > 0")), run)
    pending = {(title, filled(text)) for title, text in expressions()}
    # Its answer is a restart, which the test below makes.
    pending = {(title, text) for title, text in pending if title != "Starts"}

    def all_answer() -> bool:
        pending.difference_update([p for p in pending if server.query(p[1])])
        return not pending

    deadline = time.monotonic() + DEADLINE_S
    while not all_answer():
        assert time.monotonic() < deadline, pending
        time.sleep(0.5)


def test_alerts_are_evaluated_and_a_healthy_run_has_none(live):
    run, server = live
    # One that has not been evaluated yet has another health.
    until(lambda: _healths(server) == {"ok"}, run)
    firing = [alert for alert in server.get("alerts")["alerts"] if alert["state"] == "firing"]
    assert [a["labels"]["alertname"] for a in firing if a["labels"]["severity"] == "critical"] == []


def test_a_flood_of_scrapes_stops_no_daemon(live):
    run, server = live
    targets = [t for t in server.get("targets")["activeTargets"] if t["health"] == "up"]
    urls = [target["scrapeUrl"] for target in targets]
    stop = threading.Event()

    def flood(url: str) -> None:
        while not stop.is_set():
            try:
                httpx2.get(url, timeout=30)
            except httpx2.HTTPError:
                continue

    threads = [threading.Thread(target=flood, args=(url,)) for url in urls]
    before = len(run.lines)
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(run.lines) >= before + 5, run)
        restarted = [line for line in run.log("learner").splitlines() if "launcher:" in line]
        assert restarted == []
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_daemon_that_is_killed_is_one_instance_with_another_start(live):
    run, server = live
    starts = 'changes(process_start_time_seconds{id="generator-0"}[5m])'
    assert _shown(live, starts) == 0
    os.kill(run.child("generator-0").pid, signal.SIGKILL)
    until(lambda: server.value(starts) == 1, run)
    noted = next(filled(text) for title, text in expressions() if title == "Starts")
    until(lambda: bool(server.query(noted)), run)


def _shown(live: tuple[Launched, Server], expression: str) -> float:
    """Waits for a value: a scrape that a busy machine did not answer leaves a series without."""
    run, server = live
    found: list[float | None] = []

    def is_shown() -> bool:
        found.append(server.value(expression))
        return found[-1] is not None

    until(is_shown, run)
    return found[-1] or 0.0


def _healths(server: Server) -> set[str]:
    return {rule["health"] for group in server.get("rules")["groups"] for rule in group["rules"]}


def _by(server: Server, expression: str, label: str) -> dict[str, float]:
    return {each["metric"][label]: float(each["value"][1]) for each in server.query(expression)}
