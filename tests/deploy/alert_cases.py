"""For each alert of deploy/prometheus/alerts.yml: series under which it fires, and under which not.

Values are in promtool's notation, a sample each minute: `0x40` stays 0, `0+2x40` rises by 2.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Series = Mapping[str, str]

LEARNER = '{job="streamrl",run="r",role="learner",id="learner"}'
BUFFER = '{job="streamrl",run="r",role="buffer",id="buffer"}'
GENERATOR = '{job="streamrl",run="r",role="generator",id="generator-0"}'


@dataclass(frozen=True)
class Case:
    """It fires `at_minute` under each of `fires`, and under none of `quiet`."""

    fires: tuple[Series, ...]
    quiet: tuple[Series, ...]
    at_minute: int = 40


def of(labels: str, **more: str) -> str:
    added = "".join(f',{name}="{value}"' for name, value in more.items())
    return labels.replace("}", added + "}")


VERSION, ACTIVITY = (f"streamrl_learner_{name}" for name in ("policy_version", "activity"))
ENDED = ACTIVITY + of(LEARNER, activity="ended")
DROPPED = "streamrl_buffer_groups_dropped_total"
GRANTED = f"streamrl_buffer_leases_granted_total{BUFFER}"
HEARTBEAT = f"streamrl_generator_last_heartbeat_timestamp_seconds{GENERATOR}"
AGE = "streamrl_buffer_generator_heartbeat_age_seconds" + of(BUFFER, generator="generator-0")
ESS = f"streamrl_mismatch_rollout_is_eff_sample_size{LEARNER}"
STALENESS = "streamrl_learner_staleness_versions" + of(LEARNER, statistic="mean")
BOUND = f"streamrl_learner_max_staleness_versions{LEARNER}"
SKIPPED = f"streamrl_learner_skipped_updates_total{LEARNER}"
NOT_FINITE = f"streamrl_learner_nonfinite_sequences_total{LEARNER}"
UNSAVED, EVERY = (
    f"streamrl_learner_{name}{LEARNER}" for name in ("unsaved_steps", "checkpoint_every_steps")
)
CANNOT_SAVE = f"streamrl_learner_cannot_save{LEARNER}"
FREE, SIZE = (f"streamrl_run_disk_{name}_bytes{LEARNER}" for name in ("free", "size"))
WAIT = "streamrl_learner_phase_seconds_total" + of(LEARNER, phase="wait")
STEP = f"streamrl_learner_step_seconds_total{LEARNER}"

CASES: dict[str, Case] = {
    "StreamrlDaemonDown": Case(
        fires=({f"up{GENERATOR}": "1x36 0x4"},),
        quiet=({f"up{GENERATOR}": "1x40"}, {'up{job="other"}': "0x40"}),
    ),
    "StreamrlDaemonRestarts": Case(
        fires=({f"process_start_time_seconds{GENERATOR}": "100x20 200x5 300x5 400x10"},),
        quiet=({f"process_start_time_seconds{GENERATOR}": "100x20 200x20"},),
    ),
    "StreamrlNoStep": Case(
        fires=(
            {f"{VERSION}{LEARNER}": "0+1x20 20x20", ENDED: "0x40"},
            {f"{VERSION}{LEARNER}": "0x40", ENDED: "0x40"},
        ),
        quiet=(
            {f"{VERSION}{LEARNER}": "0+1x40", ENDED: "0x40"},
            {f"{VERSION}{LEARNER}": "0+1x20 20x20", ENDED: "0x20 1x20"},
        ),
    ),
    "StreamrlBooksDoNotClose": Case(
        fires=({f"streamrl_buffer_books_balanced{BUFFER}": "1x30 0x10"},),
        quiet=({f"streamrl_buffer_books_balanced{BUFFER}": "1x40"},),
    ),
    "StreamrlBufferRefuses": Case(
        fires=({f"streamrl_buffer_is_refusing{BUFFER}": "0x30 1x10"},),
        quiet=({f"streamrl_buffer_is_refusing{BUFFER}": "0x30 1x5 0x5"},),
    ),
    "StreamrlGroupsDropped": Case(
        fires=({DROPPED + of(BUFFER, reason="failed"): "0+1x40", GRANTED: "0+10x40"},),
        quiet=(
            {DROPPED + of(BUFFER, reason="failed"): "0+1x40", GRANTED: "0+30x40"},
            {DROPPED + of(BUFFER, reason="uniform"): "0+5x40", GRANTED: "0+10x40"},
        ),
    ),
    "StreamrlGeneratorSilent": Case(
        fires=({HEARTBEAT: "0+60x38 2280x2"}, {AGE: "0x38 12 72"}),
        quiet=({HEARTBEAT: "0+60x40"}, {AGE: "1x40"}),
    ),
    "StreamrlNoGenerator": Case(
        fires=({f"streamrl_buffer_generators{BUFFER}": "2x30 0x10"},),
        quiet=(
            {f"streamrl_buffer_generators{BUFFER}": "2x40"},
            {
                f"streamrl_buffer_generators{BUFFER}": "2x30 0x10",
                f"streamrl_buffer_is_finished{BUFFER}": "0x29 1x11",
            },
        ),
    ),
    "StreamrlEssLow": Case(
        fires=({ESS: "0.9x10 0.5x30"},), quiet=({ESS: "0.9x40"}, {ESS: "0.9x39 0.1"})
    ),
    "StreamrlMismatchHigh": Case(
        fires=({f"streamrl_mismatch_k3_kl{LEARNER}": "0.3x40"},),
        quiet=({f"streamrl_mismatch_k3_kl{LEARNER}": "0.01x40"},),
    ),
    "StreamrlStalenessAtBound": Case(
        fires=({STALENESS: "4x40", BOUND: "4x40"},),
        quiet=(
            {STALENESS: "3.5x40", BOUND: "4x40"},
            {STALENESS: "4x30 2 4x9", BOUND: "4x40"},
            {STALENESS: "1x40", BOUND: "1x40"},
        ),
    ),
    "StreamrlUpdatesSkipped": Case(
        fires=({SKIPPED: "0x30 1x10", NOT_FINITE: "0x40"}, {NOT_FINITE: "0x30 2x10"}),
        quiet=({SKIPPED: "3x40", NOT_FINITE: "0x40"},),
    ),
    "StreamrlStepsUnsaved": Case(
        fires=(
            {CANNOT_SAVE: "0x30 1x10"},
            {CANNOT_SAVE: "0x40", UNSAVED: "0+1x40", EVERY: "10x40"},
        ),
        quiet=({CANNOT_SAVE: "0x40", UNSAVED: "15x40", EVERY: "10x40"},),
    ),
    "StreamrlDiskFull": Case(
        fires=(
            {FREE: "3x100", SIZE: "100x100"},
            {FREE: "90-0.5x100", SIZE: "100x100"},
        ),
        quiet=({FREE: "50x100", SIZE: "100x100"}, {FREE: "90-0.01x100", SIZE: "100x100"}),
        at_minute=100,
    ),
    "StreamrlWeightsNotLoaded": Case(
        fires=({f"streamrl_weights_failed_loads_total{LEARNER}": "0x30 3x10"},),
        quiet=({f"streamrl_weights_failed_loads_total{LEARNER}": "3x40"},),
    ),
    "StreamrlLearnerStarves": Case(
        fires=({WAIT: "0+40x60", STEP: "0+60x60"},),
        quiet=({WAIT: "0+10x60", STEP: "0+60x60"},),
        at_minute=60,
    ),
}
