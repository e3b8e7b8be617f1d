"""The messages of the weight protocol: who sends which when, over one ZeroMQ socket each.

    receiver -> sender   Hello (every HELLO_S), Ready, Loaded, Failed, Leave
    sender -> receiver   Announce, Transfer

One update takes two messages per receiver, or four where it is broadcast:

    broadcast               Announce, Ready, Transfer, Loaded | Failed
    shared memory, files    Transfer, Loaded | Failed

A broadcast needs all its receivers at once, so the sender announces it, and only those that answer
Ready in time take part. Files and shared memory are read by each receiver in its own time.

A receiver that joins, that missed an update, or that outlived its learner is the same case: it has
another version, so the next update is for it. A receiver that exceeds a deadline is fenced: left
out until a Hello says that it is idle.

Receivers on one inference server say so in their Hellos. One of them is sent the version; once it
has loaded it, the others get a Transfer without tensors (`HeldEndpoint`).

A validator (`actors.validation`) is a receiver that keeps a version for a while: its Hellos say
which version it wants next, and what it has found.

A receiver is bound to the connection of its Hello: answers in its name from another one are refused
(`streamrl.weights.membership`).

A manifest is sent to a receiver once: its Hellos name the one that it was sent last, which further
updates leave out.

Invariant: a sender waits for one answer at a time from each receiver. Each of its messages has an
`attempt`, a number that it uses once and that the answer repeats, so that a late answer is ignored.
"""

from typing import Annotated, TypeAlias

import xxhash
from msgspec import Meta, Struct

from streamrl import wire
from streamrl.types import LoadReport, Locality, TensorSpec, ValidatorStatus, WeightUpdate
from streamrl.types.ranges import MAX_NAME, Count, Name, PolicyVersion, Text

HELLO_S = 1.0
UNKNOWN_LOCALITY = Locality()

NumRanks: TypeAlias = Annotated[int, Meta(ge=1, le=4096)]
LearnerId: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME)]
Digest: TypeAlias = Annotated[str, Meta(max_length=32)]
NO_LEARNER = "none"


def digest_of(manifest: tuple[TensorSpec, ...]) -> str:
    """What a Hello names a manifest by."""
    return xxhash.xxh3_128_hexdigest(wire.encode(manifest))


class Hello(Struct, frozen=True, tag="hello"):
    """`session` is a secret of the receiver's process and its sender, by which another connection
    proves to be of the same process. `learner_id` is the learner its weights are from: "" while
    they are the model folder's, NO_LEARNER while nobody knows. `locality` is where it receives.

    `is_loading`: it does not read the next message before it has loaded the last one. `server` is
    the inference server that it receives for, "" if nobody else does. `validator`
    says which versions a validator is to be sent; None: each, as a generator is. `manifest` is the
    digest of the one that it was sent last, "" before.
    """

    receiver_id: Name
    session: Name
    policy_version: PolicyVersion
    learner_id: LearnerId
    locality: Locality = UNKNOWN_LOCALITY
    num_ranks: NumRanks = 1
    is_loading: bool = False
    validator: ValidatorStatus | None = None
    server: Text = ""
    manifest: Digest = ""


class Announce(Struct, frozen=True, tag="announce"):
    """A broadcast is to begin; the answer is Ready."""

    attempt: Count


class Ready(Struct, frozen=True, tag="ready"):
    receiver_id: Name
    attempt: Count


class Transfer(Struct, frozen=True, tag="transfer"):
    """The version and its endpoint; the answer is Loaded or Failed."""

    attempt: Count
    update: WeightUpdate


class Loaded(Struct, frozen=True, tag="loaded"):
    receiver_id: Name
    attempt: Count
    report: LoadReport


class Failed(Struct, frozen=True, tag="failed"):
    """The receiver has kept the weights it had."""

    receiver_id: Name
    attempt: Count
    reason: Text


class Leave(Struct, frozen=True, tag="leave"):
    """The receiver ends."""

    receiver_id: Name


Answer: TypeAlias = Ready | Loaded | Failed
FromReceiver: TypeAlias = Hello | Ready | Loaded | Failed | Leave
FromSender: TypeAlias = Announce | Transfer
