"""The messages of the weight protocol: who sends which when, over one ZeroMQ socket each.

    receiver -> sender   Hello (every HELLO_S), Ready, Loaded, Failed, Leave
    sender -> receiver   Announce, Transfer

One update takes two messages per receiver, or four where it is broadcast:

    broadcast               Announce, Ready, Transfer, Loaded | Failed
    shared memory, files    Transfer, Loaded | Failed

A broadcast needs all its receivers at once, so the sender announces it, and only those that answer
Ready in time take part. Files and shared memory are read by each receiver in its own time.

A joiner, a receiver that missed an update and one that outlived its learner are the same case: they
have another version, so the next round is for them. A receiver that exceeds a deadline is fenced:
left out until its next Hello that finds it idle.

Invariant: a sender waits for one answer at a time from each receiver. Each of its messages has an
`attempt`, a number that it uses once and that the answer repeats, so that a late answer is ignored.
"""

from typing import TypeAlias

from msgspec import Struct

from streamrl.types import LoadReport, Locality, WeightUpdate

HELLO_S = 1.0
UNKNOWN_LOCALITY = Locality()


class Hello(Struct, frozen=True, tag="hello"):
    """`session` identifies the receiver's process, `learner_id` the learner its weights are from:
    "" while they are the model folder's. `locality` is where it receives.

    `is_loading`: it does not read the next message before it has loaded the last one.
    """

    receiver_id: str
    session: str
    policy_version: int
    learner_id: str
    locality: Locality = UNKNOWN_LOCALITY
    num_ranks: int = 1
    is_loading: bool = False


class Announce(Struct, frozen=True, tag="announce"):
    """A broadcast is to begin; the answer is Ready."""

    attempt: int


class Ready(Struct, frozen=True, tag="ready"):
    receiver_id: str
    attempt: int


class Transfer(Struct, frozen=True, tag="transfer"):
    """The version and its endpoint; the answer is Loaded or Failed."""

    attempt: int
    update: WeightUpdate


class Loaded(Struct, frozen=True, tag="loaded"):
    receiver_id: str
    attempt: int
    report: LoadReport


class Failed(Struct, frozen=True, tag="failed"):
    """The receiver has kept the weights it had."""

    receiver_id: str
    attempt: int
    reason: str


class Leave(Struct, frozen=True, tag="leave"):
    """The receiver ends."""

    receiver_id: str


Answer: TypeAlias = Ready | Loaded | Failed
FromReceiver: TypeAlias = Hello | Ready | Loaded | Failed | Leave
FromSender: TypeAlias = Announce | Transfer
