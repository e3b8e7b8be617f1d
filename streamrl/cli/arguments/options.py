"""The arguments of commands: one function for each set, which adds it to a parser.

commands.csv says which sets a command has.
"""

import math
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError, _ActionsContainer
from functools import partial
from typing import Any


def _add(parser: _ActionsContainer, name: str, metavar: str, meaning: str, **more: Any) -> None:
    parser.add_argument(name, metavar=metavar, help=meaning, **more)


def _flag(parser: _ActionsContainer, name: str, meaning: str) -> None:
    parser.add_argument(name, action="store_true", help=meaning)


def seconds(text: str) -> float:
    """Parse a time to wait; argparse begins the error with the name of the option."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"was {text!r}; it must be a number of seconds, 0 or more")
    return value


def count(text: str, least: int = 1) -> int:
    value = int(text) if text.isascii() and text.isdigit() else -1
    if value < least:
        raise ArgumentTypeError(f"was {text!r}; it must be a whole number, {least} or more")
    return value


def config(parser: ArgumentParser, meaning: str = "YAML file of the run") -> None:
    _add(parser, "file", "CONFIG", meaning, nargs="?")
    _add(parser, "--config", "CONFIG", "the same, as an option")
    overrides(parser)


def overrides(parser: ArgumentParser) -> None:
    meaning = "change one setting; can be repeated"
    more = {"dest": "overrides", "action": "append", "default": []}
    _add(parser, "--set", "SECTION.KEY=VALUE", meaning, **more)


def check(parser: ArgumentParser) -> None:
    config(parser, "YAML file of a run; without, the machine alone")
    output = parser.add_mutually_exclusive_group()
    _flag(output, "--deep", "sample one group with the model, score and print it")
    json(output)
    length = parser.add_mutually_exclusive_group()
    _flag(length, "--quiet", "print problems and warnings, not the configuration")
    meaning = "print every setting and every check, also defaults and what is in order"
    _flag(length, "--all", meaning)


def plan(parser: ArgumentParser) -> None:
    config(parser)
    json(parser)
    number = partial(count, least=0)
    _add(parser, "--gpus", "N", "for a machine with so many, not for this one", type=number)


def own_id(parser: ArgumentParser) -> None:
    meaning = "name of this generator, where {host} is the host's name; default: random"
    parser.add_argument("--id", help=meaning)


def torchrun(parser: ArgumentParser) -> None:
    meaning = "those of torchrun: --nnodes, --node-rank, ..., --no-python and a rank's command"
    _add(parser, "words", "ARGUMENT", meaning, nargs=REMAINDER)


def evaluate(parser: ArgumentParser) -> None:
    parser.add_argument("--checkpoint", help="model folder; default: the newest")


def books(parser: ArgumentParser) -> None:
    mode = parser.add_mutually_exclusive_group(required=True)
    _flag(mode, "--require-none", "only check that Redis holds no such run")
    _flag(mode, "--forget", "delete all that Redis holds of the run")


def run_folder(parser: ArgumentParser) -> None:
    _add(parser, "folder", "RUN", "run folder, such as runs/quickstart, or its file")


def report(parser: ArgumentParser) -> None:
    _flag(parser, "--html", "print where report.html is, and no summary")


def export(parser: ArgumentParser) -> None:
    _add(parser, "--output", "FOLDER", "a new folder; default: RUN/export/step-N")
    dtypes = ("float32", "bfloat16", "float16")
    meaning = "of the weights; default: float32, as they are trained"
    parser.add_argument("--dtype", default="float32", choices=dtypes, help=meaning)
    _add(parser, "--step", "N", "of the checkpoint; default: the newest", type=int)
    meaning = "of one file, such as 500MB; larger models have several; default: 5GB"
    _add(parser, "--max-shard-size", "SIZE", meaning, default="5GB")
    _flag(parser, "--adapter", "the adapter of learner.lora alone, for peft")
    meaning = "upload the folder to this repository of the Hugging Face hub, made if need be"
    _add(parser, "--push", "OWNER/NAME", meaning)
    _flag(parser, "--public", "of a repository that is made; default: private")


def new_folder(parser: ArgumentParser) -> None:
    _add(parser, "folder", "FOLDER", "where the keys are written")


def new_from_recipe(parser: ArgumentParser) -> None:
    _add(parser, "folder", "FOLDER", "a new folder", nargs="?")
    _add(parser, "--recipe", "NAME", "its name; without one they are listed")


def import_file(parser: ArgumentParser) -> None:
    _add(parser, "file", "FILE", "a YAML file, or a shell script with arguments")
    systems = ("verl", "roll", "trl")
    parser.add_argument("--from", dest="system", required=True, choices=systems, help="whose it is")
    _add(parser, "--output", "CONFIG", "a new file; default: print it")


def get_model(parser: ArgumentParser) -> None:
    meaning = "smollm2-135m, a name of the Hugging Face hub, a folder or a GGUF file"
    _add(parser, "model", "MODEL", meaning, nargs="?")
    _add(parser, "--output", "FOLDER", "a new folder; default: models/NAME")
    meaning = "instead of MODEL: make the model of its model.recipe, as a launch does"
    _add(parser, "--config", "CONFIG", meaning)


def buffer(parser: ArgumentParser) -> None:
    _add(parser, "target", "RUN", "run folder, configuration, or zmq://host:port of its buffer")


def inspect(parser: ArgumentParser) -> None:
    meaning = "seconds between the readings that give rates"
    parser.add_argument("--interval", type=seconds, default=1.0, help=meaning)


def listed_id(parser: ArgumentParser) -> None:
    _add(parser, "id", "ID", "id of the generator, as the list shows it")


def parity(parser: ArgumentParser) -> None:
    _add(parser, "--dtypes", "A,B,...", "precisions of the engine; default: generator.dtype")
    meaning = "folder of the report, default: the run's; with --score the file to write"
    _add(parser, "--out", "PATH", meaning)
    half = parser.add_mutually_exclusive_group()
    _add(half, "--sample", "FILE", "only sample, with the engine, to this file")
    meaning = "only score with the learner: files of --sample, or with --model any sequences"
    _add(half, "--score", "FILE", meaning, nargs="+")
    sequences = parser.add_argument_group(
        "with --model",
        'Lines of {"token_ids": [...], "response_mask": [...]} become lines of '
        '{"logprobs": [...]}, one for each token where the mask is true.',
    )
    _add(sequences, "--model", "PATH", "Hugging Face folder, in place of CONFIG")
    dtypes, meaning = ("float32", "bfloat16"), "of the computation; default: float32"
    sequences.add_argument("--dtype", default="float32", choices=dtypes, help=meaning)
    limit, meaning = "--max-tokens-per-micro-batch", "of one forward pass; default: 8192"
    _add(sequences, limit, "N", meaning, type=count, default=8192)


def resume(parser: _ActionsContainer) -> None:
    _flag(parser, "--resume", "continue from the newest checkpoint")


def json(parser: _ActionsContainer) -> None:
    _flag(parser, "--json", "print JSON")


def deadline(parser: ArgumentParser) -> None:
    meaning = "seconds to wait; default: 600"
    parser.add_argument("--deadline", type=seconds, default=600.0, help=meaning)


def launch(parser: ArgumentParser) -> None:
    existing = parser.add_mutually_exclusive_group()
    resume(existing)
    _flag(existing, "--new", "move an existing run folder aside")
    _flag(parser, "--no-view", "print progress lines instead of the live view")
    meaning = "end with the reason when a daemon fails, instead of starting it again"
    _flag(parser, "--strict", meaning)
    where = parser.add_mutually_exclusive_group()
    meaning = (
        "start the run on the nodes of a Ray cluster: that of RAY_ADDRESS or of this machine, "
        "HOST:PORT, or ray://HOST:PORT from a machine outside"
    )
    _add(where, "--ray", "ADDRESS", meaning, nargs="?", const="auto")
    _flag(where, "--slurm", "within a job of Slurm or an allocation: start the run on its nodes")
    _flag(parser, "--dry-run", "print what would be started, and where")


def samples(parser: ArgumentParser) -> None:
    _add(parser, "--step", "N[-M]", "of this step, or of these")
    meaning = (
        "of the validation of this version, or of the newest, instead of training; all: what each "
        "version wrote for the same prompts, side by side"
    )
    _add(parser, "--validation", "VERSION", meaning, nargs="?", const="newest")
    _add(parser, "--min-reward", "R", "with this reward or more", type=float)
    _add(parser, "--max-reward", "R", "with this reward or less", type=float)
    _add(parser, "--environment", "NAME", "of this environment")
    _add(parser, "--data-source", "NAME", "of this data source")
    _add(parser, "--grep", "REGEX", "with a text that this matches")
    order = parser.add_mutually_exclusive_group()
    _flag(order, "--best", "highest rewards first, not the newest")
    _flag(order, "--worst", "lowest rewards first")
    _add(parser, "--limit", "N", "default: 20", type=count, default=20)
    _flag(parser, "--markup", "show the chat template's tokens")
    _flag(parser, "--json", "print JSON Lines")


def replay(parser: ArgumentParser) -> None:
    meaning = "the checkpoint to begin with; default: the oldest that the records continue"
    _add(parser, "--from", "VERSION", meaning, dest="start", type=int)
    _add(parser, "--steps", "N", "so many; default: all recorded", type=int)
    _add(parser, "--out", "FOLDER", "for the report; default: RUN/replay")


def status(parser: ArgumentParser) -> None:
    _add(parser, "target", "RUN", "configuration, run folder, or zmq://host:port of its buffer")
    what = parser.add_mutually_exclusive_group()
    json(what)
    meaning = "the live screen, until the run ends; lines where the output is no terminal"
    _flag(what, "--follow", meaning)
    roles = ("buffer", "learner", "generator")
    meaning = "only whether one daemon works: the probe of a container"
    what.add_argument("--probe", choices=roles, help=meaning)
    _flag(parser, "--lines", "with --follow: lines for a log")
    meaning = "with --follow: seconds between readings; default: 1"
    parser.add_argument("--interval", type=seconds, default=1.0, help=meaning)
    meaning = "with --probe generator: its id, where {host} is the host's name"
    parser.add_argument("--id", help=meaning)
