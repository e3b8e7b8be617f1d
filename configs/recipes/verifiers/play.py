"""One episode of a verifiers environment, as an agent of StreamRL: `play.py TASKSET NUMBER`.

It runs in the Python environment of `verifiers`, which pins other versions of `openai` and `mcp`
than StreamRL's tests. The taskset is unchanged; its roles play with the harness `null` in a process
on this machine.
"""

import asyncio
import itertools
import json
import os
import sys
import urllib.request

import verifiers.v1 as vf
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import environment_class, load_environment

# The tasks used of an endless taskset, which makes all tasks before the requested one.
NUM_TASKS = 1000
ROLE = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


def environment_of(taskset):
    kind = environment_class(taskset)
    settings = concrete_type(kind, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig
    fields = settings.model_fields.items()
    roles = {name: ROLE for name, field in fields if isinstance(field.default, AgentConfig)}
    kwargs = json.loads(os.environ.get("TASKSET_KWARGS", "{}"))
    return load_environment(
        settings.model_validate({"taskset": {"id": taskset, **kwargs}, **roles})
    )


async def play(taskset, number):
    """Return the sum of the rewards of the episode's traces. Waits for the agents."""
    environment = environment_of(taskset)
    tasks = environment.taskset
    number %= sum(1 for _ in tasks) if tasks.bounded else NUM_TASKS
    task = next(itertools.islice(tasks, number, None))
    base_url = os.environ["OPENAI_BASE_URL"]
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        (slot,) = environment.slots(task)
        episode = await environment.run_slot(slot, vf.ModelContext("policy", client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors:
        sys.exit(f"{errors[0].type}: {errors[0].message}")
    return float(sum(trace.reward for trace in episode.traces))


def post(reward):
    request = urllib.request.Request(
        f"{os.environ['STREAMRL_SESSION_URL']}/reward",
        json.dumps({"reward": reward}).encode(),
        {
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    urllib.request.urlopen(request).close()


if __name__ == "__main__":
    post(asyncio.run(play(sys.argv[1], int(sys.argv[2]))))
