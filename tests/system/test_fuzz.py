"""The fuzzers of `tests/fuzz` with a small budget; each is a command for a large one."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_buffer_outlives_hostile_messages():
    """In a process of its own: what Hypothesis draws depends on the modules that are imported."""
    command = [sys.executable, "-m", "tests.fuzz.buffer_port"]
    command += ["--messages", "4000", "--seed", "1", "--drawn", "800"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["num_messages"] == 4000
    # Of what reaches the records and the ledger some is answered with success.
    assert counts["num_refused"] > 400
    assert counts["num_replies"] - counts["num_refused"] > 100
    # All but the leases and takes that wait for groups; some of them have an answer, too.
    assert counts["num_unanswered"] == 0
    assert counts["num_waiting"] < 0.9 * counts["num_may_wait"]
