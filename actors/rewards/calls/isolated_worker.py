"""The process of a reward with `isolation: process`: reads episodes, answers with scores.

`actors.rewards.calls.isolated` starts it. It ends when its standard input closes. A function may
keep it from reading; the kernel then kills it when the process that started it ends.
"""

import os
import signal
import sys
from typing import Any, BinaryIO

import msgspec

from actors.rewards import function_of
from actors.rewards.calls.isolated import LENGTH, WorkerAnswer, WorkerSetup
from actors.rewards.forms import BoundFunction
from actors.sandbox.privileges import end_with_parent
from streamrl.errors import StreamRLError
from streamrl.interfaces import Episode


def main(descriptor: int) -> None:
    """Answer once when the function is loaded, then answer each request. Waits for requests until
    standard input closes."""
    if sys.platform == "linux":
        end_with_parent(signal.SIGKILL)
    # Processes that the function starts would keep the pipe open after this one ends.
    os.set_inheritable(descriptor, False)
    # The function must not read the requests.
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with os.fdopen(descriptor, "wb") as answers:
        setup = msgspec.msgpack.decode(_read(requests), type=WorkerSetup)
        bound = BoundFunction(
            function_of(setup.reward), setup.kwargs, setup.name, setup.data_source_key
        )
        _send(answers, WorkerAnswer())
        while request := _read(requests):
            episodes = msgspec.msgpack.decode(request, type=list[Episode], dec_hook=_field)
            try:
                answer = WorkerAnswer(scores=bound.score(episodes))
            except StreamRLError as error:
                answer = WorkerAnswer(error=str(error))
            _send(answers, answer)


def _field(kind: Any, value: Any) -> Any:
    """Restore a field of an episode that `isolated.plain` has sent as plain data."""
    return kind(value)


def _send(answers: BinaryIO, answer: WorkerAnswer) -> None:
    content = msgspec.msgpack.encode(answer)
    answers.write(LENGTH.pack(len(content)) + content)
    answers.flush()


def _read(requests: BinaryIO) -> bytes:
    """The next message; empty at the end."""
    head = requests.read(LENGTH.size)
    return requests.read(*LENGTH.unpack(head)) if len(head) == LENGTH.size else b""


if __name__ == "__main__":
    main(int(sys.argv[1]))
