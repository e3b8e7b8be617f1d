"""deploy/ for Prometheus and Grafana: well formed, and about metrics that there are."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamrl.metrics import books_metrics, buffer_metrics, staleness_metrics
from streamrl.tracking.prometheus import (
    PREFIX,
    family_of,
    of_buffer,
    of_generator,
    of_learner,
    of_validator,
)
from streamrl.types import ValidatorStatus
from tests.documents import ROOT
from tests.unit.tracking.test_prometheus import GENERATOR, LEARNER, STATS, header, make_config

ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "streamrl.json"
# Of a step, whose names are made by torch code; `tests/deploy` compares them with a live run.
OF_A_STEP = (
    *("time_s", "learner/num_unsaved_steps", "learner/grad_norm", "actor/entropy"),
    *("learner/step_s", "learner/wait_s", "learner/num_tokens", "learner/num_steps"),
    *("learner/skipped_update", "learner/num_nonfinite_sequences", "learner/num_masked_updates"),
    *("mismatch/rollout_is_eff_sample_size", "mismatch/mismatch_k3_kl", "generator/tokens_per_s"),
    *(f"mismatch/staleness_0/{name}" for name in ("eff_sample_size", "kl", "clipped_fraction")),
    *("mismatch/rollout_is_applied_zero_fraction", "mismatch/rollout_is_veto_fraction"),
    *("reward/mean", "reward/std", "response_length/mean", "response_length/max"),
    *("weights/load_s", "weights/num_fenced", "weights/num_failed_loads"),
    *("weights/num_refused_messages", "validation/mean@1"),
    *("scaling/steps_per_s", "scaling/steps_per_s_generator_added"),
    "scaling/steps_per_s_rank_added",
)


def known(tmp_path: Path) -> set[str]:
    metrics = {
        **of_buffer(STATS),
        **books_metrics(STATS.books),
        **buffer_metrics(STATS),
        **of_learner(LEARNER, make_config(tmp_path)),
        **of_generator(GENERATOR),
        **of_validator(ValidatorStatus(), 0.0),
        **staleness_metrics([header(0)], 1),
        **dict.fromkeys(OF_A_STEP, 0.0),
    }
    families = (family_of(name) for name in metrics)
    names = {
        PREFIX + family.name + ("_total" if family.kind in ("counter", "sum") else "")
        for family in families
    }
    disk = {f"{PREFIX}run_disk_{name}_bytes" for name in ("free", "size")}
    return names | {f"{PREFIX}group_staleness_versions_bucket"} | disk


def names_in(expression: str) -> set[str]:
    return set(re.findall(rf"\b{PREFIX}\w+", expression))


def panels() -> Iterator[dict[str, Any]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield panel
        yield from panel.get("panels", ())


def test_alerts_name_metrics_that_there_are_and_pages_that_help(tmp_path):
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    for rule in group["rules"]:
        assert names_in(rule["expr"]) <= known(tmp_path), rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert anchor in slugs, rule["alert"]


def test_the_configuration_reads_the_targets_of_every_run():
    path = ROOT / "deploy" / "prometheus" / "prometheus.yml"
    settings = yaml.safe_load(path.read_text())
    (job,) = settings["scrape_configs"]
    (files,) = job["file_sd_configs"][0]["files"]
    assert (path.parent / files).parent.resolve() == ROOT / "runs" / ".prometheus"
    assert settings["rule_files"] == [ALERTS.name]
    assert job["honor_labels"]


def test_the_dashboard_names_metrics_that_there_are(tmp_path):
    dashboard = json.loads(DASHBOARD.read_text())
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert variables == {"datasource", "run"}
    found = list(panels())
    assert len({panel["id"] for panel in found}) == len(found)
    for panel in found:
        for target in panel.get("targets", ()):
            assert names_in(target["expr"]) <= known(tmp_path), panel["title"]
            assert 'run="$run"' in target["expr"]
            assert target["datasource"]["uid"] == "${datasource}"


def test_no_two_panels_of_the_dashboard_overlap():
    taken: dict[tuple[int, int], str] = {}
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, (panel["title"], taken.get((x, y)))
                taken[x, y] = panel["title"]


@pytest.mark.parametrize("path", sorted((ROOT / "deploy").rglob("*.yml")), ids=lambda p: p.name)
def test_every_yaml_of_other_programs_can_be_read(path):
    assert yaml.safe_load(path.read_text())
