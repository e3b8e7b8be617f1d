"""Situations in which a run stands still, and the sentences that name its cause."""

import pytest

from streamrl.diagnosis import Reading, diagnose, pending, waits_for
from streamrl.diagnosis.causes import lasting_wait
from streamrl.types import (
    Books,
    BufferStats,
    DropReason,
    GeneratorStatus,
    LearnerActivity,
    LearnerStatus,
    Lease,
    OverduePolicy,
    RetriedPrompt,
    SchedulingState,
    replace,
)

STALL_S = 300.0
LATE = (
    "gen-1 has exceeded weights.deadline_s (0.01 s) for 5 updates one after the other; the last "
    "one took 0.3 s: set weights.deadline_s to 2"
)
UNSAVED = (
    "runs/first/checkpoints/step-00000040 cannot be saved: [Errno 28] No space left on device; the "
    "steps since 30 are in no checkpoint"
)


def generator(name: str, version: int = 43, **fields: object) -> GeneratorStatus:
    return GeneratorStatus(generator_id=name, session=name, policy_version=version, **fields)


def holding(name: str, *ages_s: float, version: int = 43, num_active: int = 8) -> GeneratorStatus:
    lease_ids = tuple(f"{name}/{i}" for i in range(len(ages_s)))
    return generator(name, version, lease_ids=lease_ids, lease_ages_s=ages_s, num_active=num_active)


def buffer(
    *generators: GeneratorStatus, ages_s: tuple[float, ...] = (), **fields: object
) -> BufferStats:
    account = {name: fields.pop(name) for name in ("leased", "buffered", "taken") if name in fields}
    return BufferStats(
        incarnation="i",
        policy_version=43,
        groups_per_step=16,
        max_staleness=2,
        staleness_bound=2,
        overdue=OverduePolicy.WAIT,
        books=Books(learner_term=1, dropped=fields.pop("dropped", {}), **account),
        generators=generators,
        heartbeat_ages_s=ages_s or (0.5,) * len(generators),
        **fields,
    )


def awaited(*lease_ids: str, wait_s: float = 41.0, due_later: int = 0) -> dict[str, object]:
    """Fields of a buffer whose next batch waits for these leases; the last ones are due later."""
    num_due = len(lease_ids) - due_later
    leases = tuple(
        Lease(lease_id=lease_id, prompt_index=812 + i, min_policy_version=41 + (i >= num_due))
        for i, lease_id in enumerate(lease_ids)
    )
    return {"awaited": leases, "wait_due_s": wait_s, "buffered": 17, "leased": len(lease_ids)}


def learner(
    activity: LearnerActivity = LearnerActivity.WAITING, for_s: float = 310.0, **fields: object
) -> LearnerStatus:
    known = {"policy_version": 43, "learner_term": 1, "num_receivers": 1, **fields}
    return LearnerStatus(activity=activity, activity_s=for_s, time_s=0.0, **known)


def text(stats: BufferStats | None, **fields: object) -> list[str]:
    known = {"learner": learner(), **fields}
    reading = Reading(stall_s=STALL_S, stats=stats, **known)
    return [f"{finding.cause}: {finding.sentence}" for finding in diagnose(reading)]


WORKING = holding("gen-1", 3.0, 2.0)
LONG = replace(holding("gen-3", 40.5, 400.0), lease_num_tokens=(3911, -1))
REMEDY = "raise buffer.max_staleness or set buffer.overdue: train"


class Ordered(BufferStats, frozen=True, kw_only=True):
    scheduling_states: dict[str, str]


SITUATIONS = {
    "one generator holds what is missing": (
        text(buffer(holding("gen-3", 511.5, 80.0, version=41), WORKING, leased=4, buffered=14)),
        [
            "too_few_groups: 14 of 16 groups at version 43; 2 held by gen-3 (version 41), oldest "
            "512 s; 2 held by gen-1 (version 43), oldest 4 s"
        ],
    ),
    "it is frozen": (
        text(
            buffer(
                holding("gen-3", 500.0, version=41), ages_s=(12.0,), leased=1, buffered=15
            )
        ),
        [
            "too_few_groups: 15 of 16 groups at version 43; 1 held by gen-3 (version 41, silent "
            "for 12 s), oldest 512 s",
            "generator_silent: gen-3 has not reported for 12 s; its leases (1 then) go to "
            "others after buffer.lease_ttl_s",
        ],
    ),
    "leases that no generator has reported yet": (
        text(buffer(generator("gen-1"), leased=3, buffered=13)),
        ["too_few_groups: 13 of 16 groups at version 43; 3 leased and not reported yet"],
    ),
    "no generator": (
        text(buffer(last_heartbeat_age_s=330.0)),
        [
            "too_few_groups: 0 of 16 groups at version 43",
            "no_generator: no generator reports to the buffer, for 330 s: start one, or see "
            "whether it reaches buffer.url",
        ],
    ),
    "no generator, long before anything stalls": (
        text(buffer(last_heartbeat_age_s=121.0), learner=learner(for_s=120.0)),
        [
            "no_generator: no generator reports to the buffer, for 121 s: start one, or see "
            "whether it reaches buffer.url"
        ],
    ),
    "a generator that came once and is frozen, long before anything stalls": (
        text(buffer(holding("gen-3", 20.0), ages_s=(121.0,)), learner=learner(for_s=120.0)),
        [
            "generator_silent: gen-3 has not reported for 121 s; its leases (1 then) go to others "
            "after buffer.lease_ttl_s"
        ],
    ),
    "no validator": (
        text(buffer(WORKING, leased=2), learner=learner(for_s=1.0, no_validator_s=121.0)),
        [
            "no_validator: no validator has reported for 121 s, and no version is validated "
            "meanwhile: start one, or see whether it reaches weights.address"
        ],
    ),
    "the buffer drains": (
        text(buffer(generator("gen-1"), draining=True)),
        [
            "too_few_groups: 0 of 16 groups at version 43",
            "nothing_leased: the buffer drains (streamrl buffer drain), so it grants no lease",
        ],
    ),
    "no generator asks for a lease": (
        text(buffer(generator("gen-1"), generator("gen-2"), buffered=9)),
        [
            "too_few_groups: 9 of 16 groups at version 43",
            "nothing_leased: none of 2 generators asks for a lease",
        ],
    ),
    "no generator may ask for a lease": (
        text(
            Ordered(
                incarnation="i",
                policy_version=43,
                groups_per_step=16,
                max_staleness=2,
                staleness_bound=2,
                overdue=OverduePolicy.WAIT,
                books=Books(learner_term=1),
                generators=(generator("gen-1"),),
                heartbeat_ages_s=(0.1,),
                scheduling_states={"gen-1": "cordoned", "gone": "cordoned"},
            )
        )[1:],
        ["nothing_leased: none of 1 generators asks for a lease; gen-1 is cordoned"],
    ),
    "weights do not arrive": (
        text(
            buffer(holding("gen-1", 400.0, version=40, num_active=0), leased=1, buffered=15),
            learner=learner(behind=("gen-1",)),
        ),
        [
            "too_few_groups: 15 of 16 groups at version 43; 1 held by gen-1 (version 40), oldest "
            "400 s",
            "old_weights: gen-1 holds 1 lease and samples nothing: it has version 40, the "
            "learner 43; it has not answered the last weight update",
        ],
    ),
    "no receiver of weights": (
        text(
            buffer(holding("gen-1", 400.0, version=0, num_active=0), leased=1, buffered=15),
            learner=learner(num_receivers=0),
        )[-1:],
        [
            "old_weights: gen-1 holds 1 lease and samples nothing: it has version 0, the learner "
            "43; no generator is on the weight channel (weights.address)"
        ],
    ),
    "a store that is behind": (
        text(
            buffer(holding("gen-1", 400.0, version=40, num_active=0), leased=1, buffered=15),
            learner=learner(num_receivers=0, stored="version 40 in s3://b/run (TimeoutError)"),
        )[-1:],
        [
            "old_weights: gen-1 holds 1 lease and samples nothing: it has version 40, the learner "
            "43; there is version 40 in s3://b/run (TimeoutError)"
        ],
    ),
    "a reward that does not end": (
        text(buffer(holding("gen-1", 400.0, num_active=0), leased=1, buffered=15))[-1:],
        [
            "outside_the_engine: gen-1 holds 1 lease and its engine is idle: they wait for its "
            "environment, its reward, or to be put"
        ],
    ),
    "every group fails": (
        text(
            buffer(WORKING, leased=2, dropped={DropReason.FAILED: 45, DropReason.STALE: 2}),
            learner=learner(dropped={DropReason.FAILED: 5, DropReason.STALE: 2}),
        )[-1:],
        ["groups_dropped: groups dropped since the last step: failed 40"],
    ),
    "the disk is full": (
        text(buffer(WORKING, refusal="the journal cannot be written: No space left"), learner=None),
        [
            "buffer_refuses: the buffer accepts no groups: the journal cannot be written: No space "
            "left"
        ],
    ),
    "the buffer is away": (
        text(None, unreachable="the buffer has not answered for 5 s"),
        ["buffer_unreachable: the buffer has not answered for 5 s"],
    ),
    "a long step": (
        text(buffer(taken=16), learner=learner(LearnerActivity.COMPUTING, 812.0)),
        ["learner_busy: step 44 has computed for 812 s"],
    ),
    "a slow disk": (
        text(buffer(taken=16), learner=learner(LearnerActivity.SAVING, 400.0)),
        ["learner_busy: the learner, at version 43, saves a checkpoint, for 400 s so far"],
    ),
    "a checkpoint that cannot be saved": (
        text(
            buffer(taken=16),
            learner=replace(learner(LearnerActivity.COMPUTING, 1.0), unsaved=UNSAVED),
        ),
        [f"checkpoint_unsaved: {UNSAVED}"],
    ),
    "a learner that is gone": (
        text(buffer(buffered=20), learner=learner(for_s=1.0), learner_age_s=40.0, idle_s=41.0),
        [
            "learner_silent: the learner has not reported for 40 s; its last report: waits for "
            "groups",
            "learner_silent: 20 groups are buffered and no learner takes them: the learner that "
            "attached last, at version 43, is gone",
        ],
    ),
    "no learner yet": (
        text(replace(buffer(WORKING), books=Books()), learner=None),
        ["learner_silent: no learner has attached to the buffer"],
    ),
    "a learner that was replaced": (
        text(
            replace(buffer(), books=Books(learner_term=3, taken=16)),
            learner=learner(LearnerActivity.COMPUTING, 1.0),
        ),
        [
            "learner_fenced: another learner attached to the buffer (number 3, this one was "
            "number 1); this one ends at its next call"
        ],
    ),
    "a group that is due": (
        text(buffer(WORKING, LONG, **awaited("gen-3/0"))),
        [f"due_group: step 44 waits for prompt 812 on gen-3: 3,911 tokens, 41 s; {REMEDY}"],
    ),
    "an engine that reports no tokens, and groups that are as due or due later": (
        text(buffer(WORKING, LONG, **awaited("gen-3/1", "gen-1/0", "gen-1/1", due_later=1))),
        [
            "due_group: step 44 waits for prompt 812 on gen-3: 400 s; 1 other group is as due; "
            f"{REMEDY}"
        ],
    ),
    "more groups that are due than the buffer lists": (
        text(buffer(WORKING, LONG, **awaited("gen-3/1", *(f"gen-1/{i}" for i in range(7))))),
        [
            "due_group: step 44 waits for prompt 812 on gen-3: 400 s; 7 or more other groups are "
            f"as due; {REMEDY}"
        ],
    ),
    "a group that is due, of which nobody reports": (
        text(buffer(WORKING, **awaited("gone/0"))),
        [f"due_group: step 44 waits for prompt 812, which no generator reports; {REMEDY}"],
    ),
    "a group that is due, seen from the buffer alone": (
        text(buffer(LONG, **awaited("gen-3/1"), taken=3), learner=None),
        [f"due_group: step 44 waits for prompt 812 on gen-3: 400 s; {REMEDY}"],
    ),
    "a group that is due where weights do not arrive": (
        text(buffer(holding("gen-3", 41.0, version=40), **awaited("gen-3/0")))[:1],
        [
            "due_group: step 44 waits for prompt 812 on gen-3: 42 s; it needs version 41, and its "
            "generator has 40: weights do not arrive there in time (weights.deadline_s)"
        ],
    ),
    "weights that arrive too late, long before anything stalls": (
        text(buffer(WORKING, leased=2), learner=learner(for_s=1.0, left_out=(LATE,))),
        [f"left_out: {LATE}"],
    ),
    "a group that is due hangs in its reward": (
        text(buffer(holding("gen-3", 400.0, num_active=0), **awaited("gen-3/0"))),
        [
            f"due_group: step 44 waits for prompt 812 on gen-3: 400 s; {REMEDY}",
            "outside_the_engine: gen-3 holds 1 lease and its engine is idle: they wait for its "
            "environment, its reward, or to be put",
        ],
    ),
    "prompts that end each generator, long before anything stalls": (
        text(
            buffer(
                WORKING,
                retried=(
                    RetriedPrompt(prompt_index=812, num_leases=5),
                    RetriedPrompt(prompt_index=9, num_leases=3),
                ),
            ),
            learner=learner(for_s=1.0),
        ),
        [
            "prompt_retried: prompt 812 has been leased 5 times without a result: its generator "
            "died or gave it back each time; see the generators' logs",
            "prompt_retried: prompt 9 has been leased 3 times without a result: its generator "
            "died or gave it back each time; see the generators' logs",
        ],
    ),
    "seen from the buffer alone": (
        text(buffer(holding("gen-3", 400.0), leased=1, buffered=15), learner=None),
        ["too_few_groups: 15 of 16 groups at version 43; 1 held by gen-3 (version 43), oldest "
         "400 s"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_stalled_run_is_reported_with_its_cause(situation: str):
    found, expected = SITUATIONS[situation]
    assert found == expected


AWAY = "; its leases (1 then) go to others after buffer.lease_ttl_s"
STATES = {"gen-1": SchedulingState.CORDONED}
PENDING = {
    "a generator that is started again": (
        {"stats": buffer(holding("gen-1", 9.0), ages_s=(12.0,))},
        [f"generator_silent: gen-1 has not reported for 12 s{AWAY}"],
    ),
    "and forgotten meanwhile": (
        {"stats": buffer(last_heartbeat_age_s=40.0)},
        ["no_generator: no generator reports to the buffer, for 40 s; one may be starting"],
    ),
    "and whose server takes its time": (
        {"stats": buffer(last_heartbeat_age_s=200.0), "startup_s": 600.0},
        ["no_generator: no generator reports to the buffer, for 200 s; one may be starting"],
    ),
    "while the learner computes": (
        {
            "stats": buffer(last_heartbeat_age_s=20.0, taken=16),
            "learner": learner(LearnerActivity.COMPUTING, 20.0),
        },
        ["no_generator: no generator reports to the buffer, for 20 s; one may be starting"],
    ),
    "a launch of which nothing answers yet": (
        {"stats": None, "learner": None, "unreachable": "nothing listens", "launched_s": 9.0},
        ["buffer_unreachable: nothing listens"],
    ),
    "a launch whose learner loads its model": (
        {"stats": replace(buffer(), books=Books()), "learner": None, "launched_s": 9.0},
        ["learner_silent: no learner has attached to the buffer"],
    ),
    "a launch that goes on with a run": (
        {
            "stats": replace(buffer(), books=Books()),
            "learner_age_s": 900.0,
            "is_relaunched": True,
            "launched_s": 9.0,
        },
        ["learner_silent: the learner has not reported for 900 s; its last report: waits for "
         "groups"],
    ),
    "generators that may not ask": (
        {"stats": buffer(generator("gen-1"), scheduling_states=STATES)},
        ["nothing_leased: none of 1 generators asks for a lease; gen-1 is cordoned"],
    ),
    "a buffer that drains": (
        {"stats": buffer(generator("gen-1"), draining=True)},
        ["nothing_leased: the buffer drains (streamrl buffer drain), so it grants no lease"],
    ),
    "a validator that is started again": (
        {"stats": buffer(WORKING, leased=2), "learner": learner(for_s=1.0, no_validator_s=30.0)},
        ["no_validator: no validator has reported for 30 s, and no version is validated "
         "meanwhile; one may be starting"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("situation", PENDING)
def test_what_is_not_there_yet_is_neither_wrong_nor_healthy(situation: str):
    known, expected = PENDING[situation]
    reading = Reading(stall_s=STALL_S, **{"learner": learner(for_s=1.0), **known})
    assert diagnose(reading) == ()
    assert [f"{found.cause}: {found.sentence}" for found in pending(reading)] == expected


def test_a_learner_says_that_it_waits_for_a_generator():
    waiting = Reading(
        stall_s=STALL_S, stats=buffer(last_heartbeat_age_s=15.0), learner=learner(for_s=14.0)
    )
    assert waits_for(waiting).startswith("no generator reports to the buffer, for 15 s")
    assert waits_for(replace(waiting, stats=buffer(WORKING, leased=2))) == ""
    assert waits_for(replace(waiting, stats=buffer(finished=True))) == ""


@pytest.mark.parametrize(
    ("stats", "fields"),
    [
        (buffer(WORKING, leased=2, buffered=9), {"learner": learner(for_s=299.0)}),
        (buffer(WORKING, taken=16), {"learner": learner(LearnerActivity.COMPUTING, 299.0)}),
        (buffer(WORKING, leased=2, taken=16), {"learner": None, "idle_s": 12.0}),
        (buffer(holding("gen-1", 200.0), leased=1), {"learner": None}),
        (buffer(LONG, **awaited("gen-3/1")), {"learner": learner(for_s=41.0)}),
        (buffer(finished=True), {}),
        (buffer(), {"learner": learner(LearnerActivity.VALIDATING, 200.0)}),
        (None, {"learner": learner(LearnerActivity.ENDED), "learner_age_s": 900.0}),
    ],
    ids=[
        *("waits", "computes", "no word", "buffer alone", "waits for what is due"),
        *("finished", "validates the last version", "ended and gone"),
    ],
)
def test_a_run_that_moves_or_is_over_is_healthy(stats, fields):
    assert text(stats, **fields) == []
    reading = Reading(stall_s=STALL_S, stats=stats, **{"learner": learner(), **fields})
    assert pending(reading) == ()


def test_of_many_holders_the_four_that_hold_longest_are_named():
    many = [holding(f"gen-{i}", 399.5 + i, 1.0) for i in range(6)]
    (found,) = text(buffer(*many, leased=12, buffered=4))
    assert found.endswith(
        "2 held by gen-2 (version 43), oldest 402 s; 4 held by 2 other generators"
    )
    assert "gen-5" in found.split(";")[1]


def test_a_wait_for_a_due_group_is_shown_once_it_has_lasted_a_second():
    sentence = f"step 44 waits for prompt 812 on gen-3: 3,911 tokens, 41 s; {REMEDY}"
    assert lasting_wait(buffer(LONG, **awaited("gen-3/0", wait_s=1.0))) == sentence
    assert lasting_wait(buffer(LONG, **awaited("gen-3/0", wait_s=0.9))) == ""
    assert lasting_wait(buffer(LONG)) == ""


def test_a_thousand_generators_alike_are_a_few_sentences():
    many = [holding(f"gen-{i}", 400.0, version=41, num_active=0) for i in range(1000)]
    ages_s = (121.0,) * 500 + (0.5,) * 500
    found = text(buffer(*many, ages_s=ages_s, leased=1000))
    for cause, first in (("generator_silent", "gen-0"), ("old_weights", "gen-500")):
        own = [sentence for sentence in found if sentence.startswith(cause)]
        assert own[0].startswith(f"{cause}: {first} ")
        assert own[4:] == [f"{cause}: 496 more like these"]
