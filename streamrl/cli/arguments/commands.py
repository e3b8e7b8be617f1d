"""Every command of `streamrl`: a new one is a line here, a set of options, and a module.

Invariant: an entry is a name, so this table imports no command.
"""

from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass

from streamrl.cli.arguments import options


@dataclass(frozen=True)
class Command:
    """`entry` is module:function; it is given the parsed arguments and returns the exit code."""

    entry: str
    summary: str
    add_options: Callable[[ArgumentParser], None]


_RUN = {
    "launch": Command(
        "streamrl.cli.launch:main",
        "run everything that a configuration needs on this machine",
        options.launch,
    ),
    "check": Command(
        "streamrl.cli.check:main",
        "whether a run can start, and the source of each value of its configuration",
        options.check,
    ),
    "buffer": Command("buffers.daemon:main", "start the trajectory buffer", options.config),
    "generator": Command("actors.daemon:main", "start one generator", options.generator),
    "learner": Command("learners.daemon:main", "start the learner", options.learner),
    "make-model": Command(
        "streamrl.cli.make_model:main",
        "make the small local model that model.recipe describes",
        options.config,
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
        "streamrl.cli.status:main", "what a run does, and what is wrong with it", options.status
    ),
    "watch": Command(
        "streamrl.cli.watch:main", "follow the progress of a run folder", options.run_folder
    ),
    "report": Command(
        "streamrl.cli.report:main",
        "print the summary of a run folder and draw report.png",
        options.run_folder,
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
    ),
    "parity score": Command(
        "streamrl.cli.parity.score:main",
        "score samples with the learner, the second half of parity",
        options.parity_score,
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
