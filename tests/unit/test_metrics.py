"""The catalogue of metrics: every name that is reported, read or drawn has a row, and every row is
reported; a row alone says how a metric is merged."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.validation import PromptResult, length_metrics, scores
from learners.batch.training_batch import TrainingBatch
from learners.objective.step_metrics import MASKED, of_updates
from streamrl.algorithms.parts import Rescaling
from streamrl.algorithms.rollout_is import rollout_is_weights
from streamrl.algorithms.sequences import Sequences
from streamrl.config.algorithm.rollout_is import REJECTION_STATISTICS
from streamrl.metrics import CATALOGUE, OPEN, OWN, Merge, Metric, Writer, find, metric
from streamrl.tracking.groups import GROUPS, OVERVIEW, label_of
from streamrl.weights.locality import locality_of
from tests.records import with_experts
from tests.settings import RolloutISConfig
from tests.training import make_config, make_groups, make_trainer, with_metrics
from tests.unit.test_learner import Run as LearnerRun, configure
from tests.unit.weights.update_run import run as weight_run
from tests.waiting import until

ROOT = Path(__file__).parents[2]
PACKAGES = ("streamrl", "actors", "learners", "buffers")
READINGS = ROOT / "streamrl/tracking/prometheus.py"
"""Its further names are those of statuses, for Prometheus alone."""

STEP: dict[str, Any] = {
    "generator": {"keep_sampling_mask": True, "top_k": 8},
    "learner": {
        "updates_per_batch": 2,
        "max_tokens_per_micro_batch": 40,
        "peak_tflops": 1.0,
        "dtype": "float16",
    },
    "algorithm": {
        "advantage": "gae",
        "loss": "ppo",
        "entropy_coef": 0.01,
        "kl_loss": {"coef": 0.1},
        "kl_reward": {"coef": 0.1},
        "sft_coef": 0.1,
        "router_replay": "replay",
        "distillation": {"teachers": [{"path": "t"}], "reward_coef": 1.0},
        "reward": {"clip": 0.5, "length": {"max_length": 10, "buffer": 5}},
    },
}


def names_of(rows: Iterable[Metric]) -> set[str]:
    return {name for row in rows for name in row.names()}


def unknown(names: Iterable[str]) -> list[str]:
    return [name for name in names if find(name) is OWN]


def unreported(rows: Iterable[Metric], names: Iterable[str]) -> list[str]:
    """Names of the rows that none of these is, one with open placeholders by its pattern."""
    closed = names_of(row for row in rows if not row.is_open) - {*names}
    found = [find(name) for name in names]
    return sorted(closed) + [row.name for row in rows if row.is_open and row not in found]


def written_by(*writers: Writer) -> list[Metric]:
    return [row for row in CATALOGUE if row.writer in writers and row.group != "mismatch"]


def test_a_step_reports_what_the_catalogue_has_of_it():
    made = map(with_experts, make_groups(num_groups=4))
    groups = [with_metrics(g, success=1.0, num_turns=2.0) for g in made]
    taught = {"distillation": {"teachers": [{"path": "t"}], "top_k": 2}}
    of_turns = {"advantage": "rae", "echo_coef": 0.1}
    metrics: dict[str, float] = {}
    for algorithm in (taught, of_turns):
        given = {"algorithm": algorithm, "generator": {"environment": "tools"}}
        metrics |= make_trainer(make_config(**given)).step(TrainingBatch.of(groups, 4))
    metrics |= make_trainer(make_config(**STEP)).step(TrainingBatch.of(groups, 4))
    assert not unknown(metrics)
    assert not unreported(written_by(Writer.BATCH, Writer.POLICY, Writer.CRITIC), metrics)
    assert find("episode/test/success").name == "episode/{environment}/{name}"
    assert find("episode/test/num_turns").unit == "turns"


def corrections() -> Iterator[RolloutISConfig]:
    rules = [{name: 1.5} for name in REJECTION_STATISTICS]
    for level in ("token", "sequence", "geometric"):
        yield RolloutISConfig(level=level, rejection=rules, batch_normalize=True)
    yield RolloutISConfig(mode="clip", second_moment=0.04, engine_threshold=2, lag_threshold=2)


def test_importance_sampling_reports_what_the_catalogue_has_of_it():
    torch.manual_seed(0)
    sequences = Sequences.from_lengths([3, 5, 4])
    behavior, advantages = -torch.rand(12), torch.randn(12)
    reported = {
        name: value
        for config in corrections()
        for name, value in rollout_is_weights(
            behavior + 0.5 * torch.randn(12),
            behavior,
            sequences,
            config,
            staleness=torch.tensor([0, 1, 2, 3, 5, 9] * 2),
            advantages=None if config.second_moment is None else advantages,
            rescored_logprobs=behavior + 0.1,
        ).metrics.items()
    }
    assert reported.keys() == names_of(row for row in CATALOGUE if row.group == "mismatch")
    assert all(math.isfinite(value) for value in reported.values())


async def test_a_learner_reports_what_the_catalogue_has_of_it_and_of_its_buffer():
    run = LearnerRun(configure())
    await run.buffer.lend(*make_groups(0, 3))
    await run.end()
    (line,) = run.records.lines
    assert not unknown(line.keys() - {"step"})
    rows = written_by(Writer.LEARNER, Writer.BUFFER)
    elsewhere = ("weights", "validation")
    assert not unreported([row for row in rows if row.group not in elsewhere], line)


async def test_a_weight_update_reports_what_the_catalogue_has_of_it(tmp_path: Path):
    store = f"file://{tmp_path}/store"
    async with weight_run(tmp_path, backend="gloo", delta=True, store=store) as started:
        generator, _ = started.join("a", locality_of("cpu"))
        await until(lambda: started.sender.gauges()["num_receivers"] == 1)
        for version in (1, 2):
            started.publish(version, 0.5 * version)
            await until(lambda v=version: generator.policy_version == v)
        expected = {"load_s", "store_s", "difference_bytes"}
        await until(lambda: expected <= started.sender.gauges().keys())
        names = {f"weights/{name}" for name in started.sender.gauges()}
    assert names == names_of(row for row in CATALOGUE if row.group == "weights")


def test_a_validation_reports_what_the_catalogue_has_of_it():
    results = [PromptResult(source, (0.0, 1.0), ("1", "2")) for source in ("math", "a/b")]
    names = {*scores(results, 2, 0.5), *length_metrics(make_groups(0, 1, 1))}
    assert not unknown(names)
    of_all = ("num_failed", "num_too_long", "time_s", "policy_version", "num_missed")
    rows = [row for row in CATALOGUE if row.group == "validation"]
    assert not unreported(rows, {*names, *(f"validation/{name}" for name in of_all)})


def named_in_code() -> Iterator[tuple[Path, str]]:
    """Every text of the code that is a name of a metric in one of the catalogue's groups."""
    groups = "|".join({row.group for row in CATALOGUE if row.group})
    text = re.compile(rf'(?<!\w)"((?:{groups})/[\w/@.]+)"')
    for path in (p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))):
        if not path.is_relative_to(READINGS):
            yield from ((path.relative_to(ROOT), name) for name in text.findall(path.read_text()))


def test_every_metric_that_the_code_names_is_in_the_catalogue():
    named = list(named_in_code())
    assert len(named) > 100
    tables = {"validation/samples"}
    own = [(str(path), name) for path, name in named if find(name) is OWN and name not in tables]
    assert own == []


def test_the_groups_of_the_catalogue_are_those_of_the_views():
    assert {row.group for row in CATALOGUE} - {""} == {group.name for group in GROUPS}
    names = [re.sub(r"\{\w+\}", "1", name) for name in names_of(CATALOGUE)]
    for chart in (*OVERVIEW, *(chart for group in GROUPS for chart in group.charts)):
        for pattern in chart.metrics:
            only = chart._replace(metrics=(pattern,))
            assert any(label_of(only, name) for name in names), pattern


UNITS = {
    *("", "1/s", "10^12/s", "advantage", "any", "bytes", "calls", "candidates", "contexts"),
    *("episodes", "fraction", "generators", "groups", "leases", "messages", "micro-batches"),
    *("nats", "nats^2", "parts", "prompts", "reward", "s", "sequences", "stalls", "steps"),
    *("tokens", "tokens/s", "turns", "updates", "versions", "weight"),
}


def test_a_row_says_what_it_is_in_a_plain_sentence_and_by_a_known_unit():
    for row in CATALOGUE:
        assert row.unit in UNITS, row
        assert row.meaning[0].isupper() or row.meaning[0] in "019`", row
        assert row.meaning.endswith("."), row
        assert not {"|", "\n"} & {*row.meaning}, row
    assert len({row.name for row in CATALOGUE}) == len(CATALOGUE)
    names = Counter(name for row in CATALOGUE if not row.is_open for name in row.names())
    assert not [name for name, count in names.items() if count > 1]


def test_a_name_that_users_choose_is_found_by_its_family():
    assert find("generator/gen-3/tokens_per_s").unit == "tokens/s"
    assert find("reward/f.py:right/num_failures").merge is Merge.SUM
    assert find("reward/f.py:right/steps").name == "reward/{reward}/{name}"
    assert find("reward/mean").meaning == "Training reward of the step."
    assert find("validation/a/b/pass@4").name == "validation/{source}/pass@{k}"
    assert find("episode/g.py:Game/tool/calculator/time_s").unit == "s"
    assert find("actor/soft_clip_frac") is OWN
    assert OPEN.keys() >= {"generator", "environment", "reward"}


def test_a_metric_of_streamrls_own_must_be_in_the_catalogue():
    with pytest.raises(KeyError, match=r"'mismatch/mismatch_kk' is not in the catalogue; did you"):
        metric("mismatch/mismatch_kk")


GOLDEN = {
    "actor/loss": 1.5,
    "actor/pg_clipfrac": 1.5,
    "critic/vf_loss": 1.5,
    "learner/grad_norm": 1.5,
    "learner/lr": 1.5,
    "learner/num_micro_batches": 6.0,
    "learner/num_nonfinite_sequences": 6.0,
    "learner/skipped_update": 0.0,
    "mismatch/mismatch_kl": 1.5,
    "mismatch/mismatch_log_ppl_diff_max": 2.0,
    "mismatch/mismatch_log_ppl_diff_min": 1.0,
    "mismatch/rollout_is_eff_sample_size": 1.5,
    "mismatch/rollout_is_max": 2.0,
    "mismatch/rollout_is_min": 1.0,
    "mismatch/rollout_is_p99": 1.5,
    "mismatch/rollout_is_seq_max": 2.0,
    "mismatch/rollout_is_seq_max_deviation": 2.0,
    "mismatch/rollout_is_seq_min": 1.0,
    "mismatch/rollout_is_seq_fraction_high": 1.5,
    "mismatch/rollout_rs_seq_max_k3_max": 2.0,
    "mismatch/rollout_rs_seq_max_k3_mean": 1.5,
    "mismatch/rollout_rs_token_k1_min": 1.0,
    "mismatch/second_moment": 1.5,
    "mismatch/staleness_1/kl": 1.5,
}
"""What three updates of 1, 2 and, of one without a token to train, 3 came to before there was a
catalogue."""


def test_updates_are_merged_as_they_were_by_the_look_of_a_name():
    skipped = {"learner/skipped_update": 0.0, "critic/skipped_update": 0.0}
    updates = [
        {**dict.fromkeys(GOLDEN, value), **skipped, MASKED: masked}
        for value, masked in ((1.0, 0.0), (2.0, 0.0), (3.0, 1.0))
    ]
    merged = of_updates(updates)
    assert {name: merged[name] for name in GOLDEN} == GOLDEN
    assert (merged[MASKED], merged["learner/num_updates"]) == (1.0, 2)


def test_an_update_without_tokens_of_a_staleness_has_a_share_of_none():
    share = "mismatch/staleness_{}/token_fraction"
    updates = [
        {MASKED: 0.0, share.format("0"): 0.5, share.format("1"): 0.5},
        {MASKED: 0.0, share.format("0"): 1.0},
    ]
    merged = of_updates(updates)
    assert (merged[share.format("0")], merged[share.format("1")]) == (0.75, 0.25)


def test_a_metric_of_ones_own_is_a_mean_whatever_its_name():
    own = ("actor/abs_max", "my/num_clipped", "critic/of_the_loss", "reward/of_the_loss")
    updates = [
        {MASKED: 0.0, "critic/skipped_update": float(skipped), **dict.fromkeys(own, value)}
        for value, skipped in ((1.0, False), (3.0, True))
    ]
    merged = of_updates(updates)
    assert {merged[name] for name in own} == {2.0}


def test_an_earlier_part_is_rescaled_as_its_metric_adds_up():
    rescaling = Rescaling(loss=0.5, mean=0.25)
    terms = ("pg_loss", "kl_loss", "entropy_bonus", "sft_loss", "loss")
    assert {rescaling.of_metric(f"actor/{name}") for name in terms} == {0.5}
    others = ("actor/entropy", "actor/ppo_kl", "actor/trained_token_frac", "actor/of_ones_own")
    assert {rescaling.of_metric(name) for name in others} == {0.25}
