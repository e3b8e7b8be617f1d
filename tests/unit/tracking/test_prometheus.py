"""The metrics endpoint: names, what is exported, and that no scrape touches the daemon."""

import contextlib
import json
import logging
import re
import socket
import threading
import time
from pathlib import Path

import httpx2
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from streamrl.config import RunConfig
from streamrl.config.tracking import PrometheusSettings
from streamrl.errors import ConfigError
from streamrl.metrics import staleness_metrics
from streamrl.tracking.prometheus import (
    ROWS,
    Exported,
    endpoint_port,
    exporting,
    family_of,
    of_buffer,
    of_generator,
    of_learner,
    of_validator,
)
from streamrl.types import (
    Books,
    BufferStats,
    DropReason,
    FailedReward,
    GeneratorStatus,
    GroupHeader,
    LearnerActivity,
    LearnerStatus,
    OverduePolicy,
    ValidatorStatus,
)

GENERATOR = GeneratorStatus(
    generator_id="generator-0",
    session="s",
    policy_version=4,
    lease_ids=("a", "b"),
    lease_ages_s=(1.0, 3.0),
    num_tokens=70,
    busy_s=2.5,
    tokens_per_s=7.0,
    failed_rewards=(FailedReward(reward='a"\\b', num_failures=2),),
)
STATS = BufferStats(
    incarnation="i",
    policy_version=5,
    groups_per_step=4,
    max_staleness=2,
    staleness_bound=2,
    overdue=OverduePolicy.WAIT,
    books=Books(granted=9, leased=2, acknowledged=4, dropped={DropReason.STALE: 3}),
    generators=(GENERATOR,),
    heartbeat_ages_s=(0.5,),
)
LEARNER = LearnerStatus(
    policy_version=5,
    learner_term=1,
    activity=LearnerActivity.WAITING,
    activity_s=2.0,
    time_s=0.0,
    behind=("generator-1",),
)


def make_config(folder: Path, **prometheus: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"folder": folder, "name": "run"},
            "model": {"path": "m"},
            "data": {"source": "addition"},
            "buffer": {"url": "zmq://127.0.0.1:1"},
            "tracking": {"prometheus": {"enabled": True, **prometheus}},
        }
    )


def target_of(config: RunConfig, daemon_id: str) -> Path:
    return config.run.folder / ".prometheus" / f"run@{daemon_id}.json"


def samples_of(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Value by name and labels, as Prometheus reads them."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def values_of(exported: Exported) -> dict[str, float]:
    """Value by name and labels, in the text form."""
    return {
        name + "".join(f"{{{k}={v}}}" for k, v in sorted(labels)): value
        for (name, labels), value in samples_of(generate_latest(exported).decode()).items()
    }


def header(oldest_version: int) -> GroupHeader:
    return GroupHeader(
        group_id="g",
        prompt_index=0,
        environment="e",
        oldest_version=oldest_version,
        newest_version=oldest_version,
        lengths=(1,),
        response_lengths=(1,),
        rewards=(0.0,),
    )


def test_steps_are_added_up_and_states_replaced():
    exported = Exported(is_on=True)
    for version, oldest in ((5, (5, 3)), (6, (0, 6))):
        line = {
            **staleness_metrics([header(v) for v in oldest], version),
            "learner/step_s": 2.0,
            "learner/wait_s": 0.5,
            "learner/skipped_update": 1.0,
            "reward/mean": version / 10,
            "learner/grad_norm": float("nan"),
            "learner/policy_version": version,
        }
        exported.log(line, version)
    values = values_of(exported)
    assert values["streamrl_learner_step_seconds_total"] == 4.0
    assert values["streamrl_learner_phase_seconds_total{phase=wait}"] == 1.0
    assert values["streamrl_learner_skipped_updates_total"] == 2.0
    assert values["streamrl_learner_steps_total"] == 2.0
    assert values["streamrl_reward_mean"] == 0.6
    assert "streamrl_learner_grad_norm" not in values, "what is not a number is not measured"
    buckets = {"0": 2, "1": 2, "2": 3, "4": 3, "8": 4, "+Inf": 4}
    name = "streamrl_group_staleness_versions"
    assert {b: values[f"{name}_bucket{{le={b}}}"] for b in buckets} == buckets
    assert (values[f"{name}_sum"], values[f"{name}_count"]) == (8.0, 4.0)
    assert values["streamrl_learner_staleness_versions{statistic=max}"] == 6.0


def test_metrics_that_have_one_name_for_prometheus_are_one_series():
    exported = Exported(is_on=True)
    exported.log({"mine/a-b": 1.0, "mine/a_b": 2.0}, step=1)
    (metric,) = (m for m in exported.collect() if m.name == "streamrl_mine_a_b")
    assert [sample.value for sample in metric.samples] == [2.0]


def test_the_buffers_families_are_the_buffers_alone():
    line = {"buffer/leased": 2, "buffer/staleness_mean": 1.0, "generator/g/tokens_per_s": 3.0}
    both = {}
    for left_out in ((), ("buffer_",)):
        exported = Exported(is_on=True, left_out=left_out)
        exported.log(line, 1)
        both[left_out] = {name.partition("{")[0] for name in values_of(exported)}
    alone = {"streamrl_buffer_groups", "streamrl_buffer_generator_tokens_per_second"}
    assert both[()] - both["buffer_",] == alone
    assert "streamrl_learner_staleness_versions" in both["buffer_",]


def test_what_each_daemon_reports(tmp_path):
    exported = Exported(is_on=True)
    exported.show("buffer", lambda: of_buffer(STATS))
    exported.show("learner", lambda: of_learner(LEARNER, make_config(tmp_path)))
    exported.show("generator", lambda: of_generator(GENERATOR))
    status = ValidatorStatus(is_busy=True, num_done=3, num_prompts=8)
    exported.show("validator", lambda: of_validator(status, 12.0))
    values = values_of(exported)
    for name, value in {
        "streamrl_buffer_groups{state=leased}": 2,
        "streamrl_buffer_groups_dropped_total{reason=stale}": 3,
        "streamrl_buffer_books_balanced": 1,
        "streamrl_buffer_policy_version": 5,
        "streamrl_buffer_generator_heartbeat_age_seconds{generator=generator-0}": 0.5,
        "streamrl_buffer_capacity_groups": 12,
        "streamrl_generator_busy_seconds_total": 2.5,
        "streamrl_learner_activity{activity=waiting}": 1,
        "streamrl_learner_activity{activity=computing}": 0,
        "streamrl_weights_receivers_behind": 1,
        "streamrl_generator_tokens_total": 70,
        "streamrl_generator_leases": 2,
        "streamrl_generator_oldest_lease_seconds": 3,
        'streamrl_generator_reward_failures_total{reward=a"\\b}': 2,
        "streamrl_validator_prompts_done": 3,
    }.items():
        assert values[name] == value, name


def test_every_row_is_a_name_of_prometheus_and_a_rule_gives_the_others_their_units():
    for row in ROWS:
        assert re.compile(row["pattern"])
        assert re.fullmatch(r"[a-z_{}]+", row["family"])
        assert not row["family"].endswith(("_total", "_count", "_sum", "_bucket"))
    for metric, name in {
        "learner/grad_norm": "learner_grad_norm",
        "learner/tokens_per_s": "learner_tokens_per_second",
        "mine/a-b.c_frac": "mine_a_b_c_ratio",
        "mismatch/mismatch_k3_kl": "mismatch_k3_kl",
        "mismatch/staleness_3_4/kl": "mismatch_by_staleness_kl",
        "buffer/due_wait_s": "buffer_due_wait_seconds",
    }.items():
        assert family_of(metric).name == name


def test_an_endpoint_that_is_off_costs_nothing(tmp_path):
    with exporting(make_config(tmp_path, enabled=False), "buffer", "buffer") as exported:
        exported.show("stats", lambda: pytest.fail("nobody reads it"))
        exported.log({"reward/mean": 1.0}, 1)
        assert values_of(exported) == {}
    assert not (tmp_path / "run").exists()


def test_a_daemon_is_found_by_a_file_and_read_with_its_labels(tmp_path, monkeypatch):
    # Values of prometheus-client lie in the folder of PROMETHEUS_MULTIPROC_DIR, which is another's.
    monkeypatch.setattr("prometheus_client.values.ValueClass", None)
    config = make_config(tmp_path)
    config.run.path.mkdir()
    target = target_of(config, "generator-0")
    with exporting(config, "generator", "generator-0") as exported:
        exported.show("self", lambda: of_generator(GENERATOR))
        (found,) = json.loads(target.read_text())
        labels = {"run": "run", "role": "generator", "id": "generator-0"}
        assert found["labels"] == labels
        reply = httpx2.get(f"http://{found['targets'][0]}/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        samples = samples_of(reply.text)
        assert all(labels.items() <= dict(has).items() for _, has in samples)
        names = {name for name, _ in samples}
        assert {
            "streamrl_generator_policy_version",
            "streamrl_run_disk_free_bytes",
            "streamrl_info",
            "process_resident_memory_bytes",
        } <= names
        assert httpx2.post(f"http://{found['targets'][0]}/metrics").status_code == 405
    assert not target.exists()


def test_the_file_of_a_daemon_that_failed_stays(tmp_path):
    config = make_config(tmp_path)
    config.run.path.mkdir()
    with pytest.raises(RuntimeError), exporting(config, "buffer", "buffer"):
        raise RuntimeError
    assert target_of(config, "buffer").exists()


@pytest.mark.parametrize(
    ("port", "daemon_id", "given"),
    [
        (0, "buffer", 0),
        (9400, "buffer", 9400),
        (9400, "learner", 9401),
        (9400, "generator-0", 9410),
        (9400, "generator-12", 9422),
        (9400, "generator-4c1822", 0),
    ],
)
def test_a_port_for_each_daemon(port, daemon_id, given):
    assert endpoint_port(PrometheusSettings(port=port), daemon_id) == given


def test_a_port_that_is_taken_costs_no_run(tmp_path, caplog):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        config = make_config(tmp_path, port=other.getsockname()[1])
        config.run.path.mkdir()
        with exporting(config, "buffer", "buffer"):
            target = json.loads(target_of(config, "buffer").read_text())
            assert httpx2.get(f"http://{target[0]['targets'][0]}/metrics").status_code == 200
    assert "taking a free port" in caplog.text


def test_an_address_of_another_machine_is_refused(tmp_path):
    config = make_config(tmp_path, host="192.0.2.7")
    with (
        pytest.raises(ConfigError, match=r"tracking\.prometheus\.host: cannot listen at 192\.0\.2"),
        exporting(config, "buffer", "buffer"),
    ):
        pass


def test_off_the_loopback_address_the_log_says_who_can_read(tmp_path, caplog):
    config = make_config(tmp_path, host="0.0.0.0")
    config.run.path.mkdir()
    with caplog.at_level(logging.WARNING), exporting(config, "buffer", "buffer"):
        target = json.loads(target_of(config, "buffer").read_text())
        assert target[0]["targets"][0].startswith(f"{socket.gethostname()}:")
    assert "without a key" in caplog.text


def test_who_is_silent_or_slow_holds_up_nobody_and_not_the_end(tmp_path):
    config = make_config(tmp_path)
    config.run.path.mkdir()
    with contextlib.ExitStack() as clients:
        with exporting(config, "buffer", "buffer"):
            (found,) = json.loads(target_of(config, "buffer").read_text())
            host, _, port = found["targets"][0].rpartition(":")
            for sent in (b"", b"a" * 9000):
                client = clients.enter_context(socket.create_connection((host, int(port))))
                client.sendall(sent)
            url = f"http://{host}:{port}/metrics"
            assert "streamrl_info" in httpx2.get(url, timeout=120).text
            start_s = time.monotonic()
        assert time.monotonic() - start_s < 60
        with pytest.raises(httpx2.HTTPError):
            httpx2.get(url, timeout=120)


def test_a_daemon_that_computes_is_read_all_the_same(tmp_path):
    """And writes meanwhile: nobody waits for the other."""
    config = make_config(tmp_path)
    config.run.path.mkdir()
    has_begun, stop = threading.Event(), threading.Event()
    with exporting(config, "learner", "learner") as exported:
        target = json.loads(target_of(config, "learner").read_text())

        def compute() -> None:
            step = 0
            while not stop.is_set():
                step += 1
                exported.log({"reward/mean": step, f"mine/{step % 50}": step}, step)
                has_begun.set()

        computing = threading.Thread(target=compute)
        computing.start()
        try:
            url = f"http://{target[0]['targets'][0]}/metrics"
            assert has_begun.wait(120)
            seen = [samples_of(httpx2.get(url, timeout=120).text) for _ in range(3)]
        finally:
            stop.set()
            computing.join()
    for samples in seen:
        values = {name: value for (name, _), value in samples.items()}
        assert abs(values["streamrl_learner_steps_total"] - values["streamrl_reward_mean"]) <= 1
