"""Who is asked, who is left out, and who shares a broadcast with whom after one that failed."""

import pytest
from msgspec.structs import replace

from streamrl.errors import WeightTransferError
from streamrl.types import ValidatorStatus
from streamrl.weights import membership as module
from streamrl.weights.membership import (
    ALIVE_S,
    FREE_MISSES,
    LATE_FACTOR,
    MAX_WAIT_S,
    Membership,
    Peer,
)
from streamrl.weights.protocol import NO_LEARNER, Hello


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def hello(name: str, session: str = "first") -> Hello:
    return Hello(name, session, 0, "")


def membership(*names: str) -> tuple[Membership, dict[str, Peer], Clock]:
    clock = Clock()
    made = Membership("h", clock)
    for name in names:
        made.on_hello(name.encode(), hello(name))
    return made, {peer.name: peer for peer in made.alive()}, clock


def grouped(made: Membership) -> list[list[str]]:
    return [[peer.name for peer in group] for group in made.groups(made.alive())]


def test_who_lacks_the_version_is_outdated_and_who_is_silent_is_not_asked():
    made, _, clock = membership("a", "b")
    assert made.outdated(0) == [], "version 0 is in every model folder"
    assert [peer.name for peer in made.outdated(1)] == ["a", "b"]
    made.on_hello(b"c", Hello("c", "first", 0, NO_LEARNER))
    assert [peer.name for peer in made.outdated(0)] == ["c"], "nobody knows what it has"
    made.on_loaded("c", 0)
    assert made.outdated(0) == []
    made.on_leave("c")
    made.on_loaded("a", 1)
    assert [peer.name for peer in made.outdated(1)] == ["b"]
    made.on_hello(b"a", replace(hello("a"), policy_version=1, learner_id="of another learner"))
    assert [peer.name for peer in made.outdated(1)] == ["a", "b"]
    clock.now_s += ALIVE_S + 0.1
    made.on_hello(b"b", hello("b"))
    assert [peer.name for peer in made.outdated(1)] == ["b"]


def test_who_is_fenced_comes_back_with_a_hello_that_finds_it_idle():
    made, peers, _ = membership("a", "b")
    made.fence([peers["a"]])
    made.on_hello(b"a", replace(hello("a"), is_loading=True))
    assert ([peer.name for peer in made.alive()], made.fenced) == (["b"], {"a"})
    made.on_hello(b"b", replace(hello("b"), is_loading=True))
    made.on_hello(b"a", hello("a"))
    assert {peer.name for peer in made.alive()} == {"a", "b"}
    assert (made.fenced, made.num_fenced) == (frozenset(), 1)


def test_another_process_of_the_same_name_does_not_pay_for_the_first():
    made, peers, clock = membership("a")
    assert made.on_hello(b"a", hello("a"))
    clock.now_s += ALIVE_S + 0.1
    assert not made.on_hello(b"again", hello("a", "second"))
    made.fence([peers["a"]])
    assert [peer.address for peer in made.alive()] == [b"again"]
    assert made.num_fenced == 0


def test_those_that_answered_try_again_together_without_the_silent_one():
    made, peers, _ = membership("a", "b", "c", "d")
    made.fence([peers["b"]])
    assert made.regroup({"a"}, {"c", "d"}, {"b"}), "at once"
    assert grouped(made) == [["a", "c", "d"]]


def test_where_everybody_answered_those_that_failed_are_sent_it_alone_until_they_have_loaded():
    made, _, _ = membership("a", "b", "c", "d")
    assert made.regroup({"c"}, {"a", "b", "d"}, set())
    assert grouped(made) == [["c"], ["a"], ["b"], ["d"]]
    assert not made.regroup({"a"}, set(), set())
    assert not made.regroup(set(), {"d"}, set()), "it waits for its next Hello"
    assert not made.regroup({"b"}, set(), set())
    assert grouped(made) == [["a", "b", "c"], ["d"]]
    assert made.regroup({"a"}, {"c"}, {"d"}), "a silent one is to blame"
    assert grouped(made) == [["a", "b", "c", "d"]]


def test_a_name_is_bound_to_its_connection_while_its_process_is_alive():
    made, _, clock = membership("a", "b")
    with pytest.raises(WeightTransferError, match="'a' is another process, which is alive"):
        made.on_hello(b"stranger", hello("a", "guessed"))
    with pytest.raises(WeightTransferError, match="its connection is that of 'b'"):
        made.on_hello(b"b", hello("c"))
    assert (made.address_of("a"), made.address_of("c")) == (b"a", None)
    assert made.on_hello(b"a reconnected", hello("a")), "the same process, by its secret"
    assert made.address_of("a") == b"a reconnected"
    made.fence(made.alive())
    with pytest.raises(WeightTransferError, match="another process"):
        made.on_hello(b"stranger", hello("a", "guessed"))
    clock.now_s += ALIVE_S + 0.1
    assert not made.on_hello(b"another", hello("a", "another"))
    assert made.address_of("a") == b"another"


def test_receivers_are_bounded_and_the_dead_make_room(monkeypatch):
    monkeypatch.setattr(module, "MAX_RECEIVERS", 2)
    made, _, clock = membership("a", "b")
    with pytest.raises(WeightTransferError, match="there are 2 receivers already"):
        made.on_hello(b"c", hello("c"))
    clock.now_s += ALIVE_S + 0.1
    made.on_hello(b"b", hello("b"))
    made.on_hello(b"c", hello("c"))
    assert {peer.name for peer in made.alive()} == {"b", "c"}
    assert made.address_of("a") is None


def is_late(made: Membership, clock: Clock, name: str, after_s: float) -> None:
    """It is asked, waited for, and reports to be idle."""
    made.on_asked([name])
    peers = [peer for peer in made.alive() if peer.name == name]
    clock.now_s += after_s
    made.fence(peers)
    for other in ("a", "b"):
        made.on_hello(other.encode(), hello(other))


def names(made: Membership, version: int = 1) -> list[str]:
    return sorted(peer.name for peer in made.outdated(version))


def test_who_exceeds_deadlines_is_left_out_for_as_long_as_it_was_waited_for_and_then_longer():
    made, _, clock = membership("a", "b")
    is_late(made, clock, "a", after_s=0.5)
    assert names(made) == ["a", "b"], "once may be a pause"
    for factor in (1, 2, 4, LATE_FACTOR, LATE_FACTOR):
        is_late(made, clock, "a", after_s=0.5)
        assert names(made) == ["b"]
        clock.now_s += 0.5 * factor - 0.01
        made.on_hello(b"b", hello("b"))
        assert names(made) == ["b"]
        clock.now_s += 0.02
        made.on_hello(b"a", hello("a"))
        made.on_hello(b"b", hello("b"))
        assert names(made) == ["a", "b"]
    is_late(made, clock, "a", after_s=30.0)
    assert [wait_s for _, wait_s in made.late()] == [MAX_WAIT_S]
    made.on_loaded("a", 1)
    assert (made.late(), names(made, 2)) == ([], ["a", "b"])


def test_who_is_late_is_not_left_out_where_nobody_else_waits_for_it():
    made, _, clock = membership("a")
    for _ in range(4):
        made.on_asked(["a"])
        clock.now_s += 2.0
        made.fence(made.alive())
        made.on_hello(b"a", hello("a"))
    assert names(made) == ["a"]
    assert [(peer.name, wait_s) for peer, wait_s in made.late()] == [("a", 0.0)]
    made.on_hello(b"v", replace(hello("v"), validator=ValidatorStatus(next_version=10)))
    assert names(made) == ["a"], "a validator has time"


def test_who_has_loaded_after_the_deadline_has_the_version_and_is_back_at_once():
    made, _, clock = membership("a", "b")
    for attempt in (1, 2):
        made.on_asked(["a"])
        clock.now_s += 0.01
        made.fence([peer for peer in made.alive() if peer.name == "a"])
        had = replace(hello("a"), policy_version=3 + attempt, learner_id="h" if attempt > 1 else "")
        made.on_hello(b"a", replace(had, is_loading=True))
        clock.now_s += 0.29
        assert made.fenced == {"a"}
        made.on_hello(b"a", replace(had, policy_version=4 + attempt, learner_id="h"))
        assert (made.fenced, names(made, 4 + attempt)) == (frozenset(), ["b"])
    ((late, _),) = made.late()
    assert late.took_s == pytest.approx(0.3)
    assert late.late_sentence(1.25, 0.01) == (
        "a has exceeded weights.deadline_s (0.01 s) for 2 updates one after the other, and others "
        "go on without it for 1.2 s more; the last one took 0.3 s: set weights.deadline_s to 2"
    )
    assert (
        replace(late, took_s=0.0)
        .late_sentence(0.0, 0.01)
        .endswith("2 updates one after the other; it has answered none of them")
    )
    clock.now_s += ALIVE_S + 0.1
    assert made.late() == [], "one that is gone is not late"


def test_who_fails_to_load_update_after_update_is_asked_less_and_less_often():
    made, _, clock = membership("a")

    def waits_s() -> float:
        return made.alive()[0].asked_again_s - clock.now_s

    for _ in range(FREE_MISSES):
        made.on_failed("a")
    assert waits_s() == 0
    made.on_failed("a")
    assert waits_s() == 2.0
    assert names(made) == []
    ((failing, wait_s),) = made.failing()
    assert failing.failing_sentence(wait_s) == (
        "a has failed to load 9 updates one after the other, and is asked again in 2 s; its log "
        "says why"
    )


def validator(policy_version: int, learner_id: str, **status: object) -> Hello:
    return replace(
        hello("v"),
        policy_version=policy_version,
        learner_id=learner_id,
        validator=ValidatorStatus(**status),
    )


def wants(made: Membership, said: Hello, version: int) -> bool:
    made.on_hello(b"v", said)
    return bool(made.outdated(version))


def test_a_validator_is_sent_the_version_that_it_wants_next_and_none_while_it_is_busy():
    made, _, _ = membership()
    said = validator(10, "h", next_version=20)
    assert not wants(made, said, 19)
    assert wants(made, said, 20)
    assert wants(made, said, 21), "20 may have been replaced before it could be sent"
    assert not wants(made, validator(10, "h", next_version=20, is_busy=True), 20)
    assert not wants(made, validator(0, NO_LEARNER, next_version=10), 0)
    assert not wants(made, validator(0, "", next_version=10), 9)
    resumed = validator(30, "of another learner", next_version=40)
    assert wants(made, resumed, 25), "its version 30 is not that of this learner"
    resting = validator(10, "h", next_version=11, is_resting=True)
    assert not wants(made, resting, 20)
    made.is_last_version = True
    assert wants(made, resting, 20)
    assert wants(made, said, 19), "the last version of a run comes when it comes"


def test_a_validator_that_has_loaded_a_version_is_asked_nothing_until_it_says_so():
    made, _, _ = membership()
    made.on_hello(b"v", validator(0, NO_LEARNER, next_version=0))
    made.on_loaded("v", 0)
    assert made.outdated(7) == []
    made.on_hello(b"v", validator(0, "h", next_version=5))
    assert [peer.name for peer in made.outdated(7)] == ["v"]


def on_server(made: Membership, name: str, server: str, **fields: object) -> None:
    made.on_hello(name.encode(), replace(hello(name), server=server, **fields))


def split(made: Membership, version: int = 1, *asked: str) -> tuple[list[str], list[str]]:
    outdated = [peer for peer in made.outdated(version) if peer.name not in asked]
    sent, told = made.by_server(outdated, version, set(asked))
    return sorted(peer.name for peer in sent), sorted(peer.name for peer in told)


def test_one_of_the_receivers_on_a_server_is_sent_the_version_and_the_others_are_told():
    made, _, _ = membership("alone")
    for name, server in [("b", "x:1"), ("a", "x:1"), ("c", "y:1"), ("d", "x:1")]:
        on_server(made, name, server)
    assert split(made) == (["a", "alone", "c"], [])
    assert split(made, 1, "a") == (["alone", "c"], []), "one of them is loading"
    made.on_loaded("a", 1)
    assert split(made) == (["alone", "c"], ["b", "d"])
    made.on_loaded("b", 1)
    assert split(made) == (["alone", "c"], ["d"])
    assert split(made, 2) == (["a", "alone", "c"], [])


def test_a_receiver_that_died_is_replaced_by_another_one_on_its_server():
    made, peers, clock = membership()
    for name in ("a", "b"):
        on_server(made, name, "x:1")
    peers = {peer.name: peer for peer in made.alive()}
    clock.now_s += ALIVE_S + 0.1
    on_server(made, "b", "x:1")
    assert split(made) == (["b"], []), "it was idle"

    on_server(made, "a", "x:1")
    made.fence([peers["a"]])
    on_server(made, "b", "x:1")
    assert split(made) == ([], []), "it may be frozen in the middle of a load"
    on_server(made, "a", "x:1", is_loading=True)
    clock.now_s += module.HANDOVER_S - 0.1
    on_server(made, "b", "x:1")
    assert split(made) == ([], [])
    clock.now_s += 0.2
    on_server(made, "b", "x:1")
    assert split(made) == (["b"], [])


def test_of_the_receivers_on_a_server_the_one_that_failed_least_is_sent_the_version():
    made, _, clock = membership()
    for name in ("a", "b"):
        on_server(made, name, "x:1")
    made.fence([peer for peer in made.alive() if peer.name == "a"])
    clock.now_s += module.HANDOVER_S + 0.1
    for name in ("a", "b"):
        on_server(made, name, "x:1")
    assert split(made) == (["b"], []), "the deadline would be exceeded once more"
    for _ in range(FREE_MISSES - 1):
        made.on_failed("b")
    assert split(made) == (["b"], [])
    made.on_failed("b")
    assert split(made) == (["a"], [])


def test_a_server_that_lost_its_weights_is_sent_them_again():
    made, _, _ = membership()
    for name in ("a", "b"):
        on_server(made, name, "x:1")
        made.on_loaded(name, 1)
    assert split(made) == ([], [])
    for name in ("a", "b"):
        on_server(made, name, "x:1", learner_id=NO_LEARNER)
    assert split(made) == (["a"], [])


def test_looking_at_four_times_as_many_of_whom_half_are_left_out_costs_about_four_times_as_much():
    class CountingClock(Clock):
        num_read = 0

        def __call__(self) -> float:
            self.num_read += 1
            return self.now_s

    costs = []
    for size in (100, 400):
        clock = CountingClock()
        made = Membership("h", clock)
        ids = [f"g{i}" for i in range(size)]
        for _ in range(3):
            for name in ids:
                made.on_hello(name.encode(), hello(name))
            made.on_asked(ids[::2])
            clock.now_s += ALIVE_S
            made.fence([peer for peer in made.alive() if peer.name in ids[::2]])
        for name in ids:
            made.on_hello(name.encode(), hello(name))
        clock.num_read = 0
        assert names(made) == sorted(ids[1::2])
        assert len(made.late()) == size // 2
        costs.append(clock.num_read)
    assert costs[1] < 6 * costs[0]
