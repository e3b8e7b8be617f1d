"""TransferQueue (PyPI `TransferQueue` 0.1, which needs Ray), for `bench_buffer`; its own Python.

    PYTHON transfer_queue.py NUM_BYTES COUNT

Puts COUNT payloads one by one, as generators do, and gets and clears them in batches of 16, as a
learner does; then the same with puts in batches of 16, the way its documentation recommends. The
calls are those of its key-value interface. Prints JSON: seconds a group, the better of the two.
"""

import json
import sys
import time

BATCH = 16


def main(num_bytes: int, count: int) -> None:
    import ray
    import torch
    import transfer_queue as tq
    from tensordict import TensorDict

    # Its controller and its storage units ask Ray for a core each; a small machine has fewer.
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    tq.init()
    payload = torch.zeros(num_bytes, dtype=torch.uint8)
    batch = TensorDict({"payload": payload.repeat(BATCH, 1)}, batch_size=BATCH)

    def round_trip(name: str, first: int, *, batched: bool) -> None:
        keys = [f"{name}/{number}" for number in range(first, first + BATCH)]
        if batched:
            tq.kv_batch_put(keys=keys, partition_id="train", fields=batch)
        else:
            for key in keys:
                tq.kv_put(key=key, partition_id="train", fields={"payload": payload})
        assert tq.kv_batch_get(keys=keys, partition_id="train")["payload"].shape[0] == BATCH
        tq.kv_clear(keys=keys, partition_id="train")

    seconds = {}
    for name, batched in (("one_by_one", False), ("batched", True)):
        round_trip(f"warm-{name}", 0, batched=batched)
        start = time.perf_counter()
        for first in range(0, count, BATCH):
            round_trip(name, first, batched=batched)
        seconds[name] = (time.perf_counter() - start) / count
    tq.close()
    per_s = {f"groups_per_s_{name}": round(1 / each, 1) for name, each in seconds.items()}
    print(json.dumps({"seconds": seconds["one_by_one"], **per_s}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
