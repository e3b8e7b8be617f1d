"""`streamrl torchrun`: torchrun, but with the exit code and error of the rank that failed.

torchrun's own exit code is 1 whatever a rank returned, so its supervisor would restart a learner
that cannot work. Plans whose learner is on several hosts start this command on each.

Invariant: the exit code and the message are those of a failed rank of this host; if several failed,
of one that did not fail because of another. Waits for the ranks to end.
"""

import argparse
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from learners.executor.starter import failure
from streamrl.errors import ERROR_FILE_VARIABLE, PARENT_VARIABLE, read_record


def main(arguments: argparse.Namespace) -> int:
    """Run torchrun. Raises the error of a failed rank of this host, with its message."""
    # The parser has put "--" before the words.
    words = arguments.words[arguments.words[:1] == ["--"] :]
    parsed = torchrun.parse_args(words)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # nohup ignores SIGHUP; torchrun would undo that.
        names = parsed.signals_to_handle.split(",")
        parsed.signals_to_handle = ",".join(name for name in names if name != "SIGHUP")
    with _folder_of_records() as folder:
        try:
            torchrun.run(parsed)
        except ChildFailedError as error:
            codes = {rank: failed.exitcode for rank, failed in error.failures.items()}
            records = {rank: read_record(folder / str(rank)) for rank in codes}
            # An earlier start of the rank (--max-restarts) may have left a record.
            own = [r for rank, r in records.items() if r and r.exit_code == codes[rank]]
            raise failure(codes, own) from None
        except SignalException as stopped:
            return 128 + stopped.sigval
    return 0


@contextlib.contextmanager
def _folder_of_records() -> Iterator[Path]:
    """A folder in which the ranks, children of this process, say why they fail."""
    with TemporaryDirectory(prefix="streamrl-") as folder:
        before = dict(os.environ)
        os.environ[ERROR_FILE_VARIABLE] = str(Path(folder) / "$RANK")
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        try:
            yield Path(folder)
        finally:
            os.environ.clear()
            os.environ.update(before)
