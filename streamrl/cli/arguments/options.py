"""The arguments of commands, in sets: one function for each set adds it to a parser.

commands.csv lists the sets of each command.
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
    config(parser, "YAML file of a run; without it, only the machine is checked")
    output = parser.add_mutually_exclusive_group()
    _flag(output, "--deep", "sample one group with the model, score and print it")
    json(output)
    length = parser.add_mutually_exclusive_group()
    _flag(length, "--quiet", "print problems and warnings, not the configuration")
    meaning = "print every setting and every check, including defaults and what is in order"
    _flag(length, "--all", meaning)


def plan(parser: ArgumentParser) -> None:
    config(parser)
    json(parser)
    number = partial(count, least=0)
    _add(parser, "--gpus", "N", "plan for a machine with N GPUs instead of this one", type=number)


def own_id(parser: ArgumentParser) -> None:
    meaning = "name of this generator; {host} stands for the host's name; default: random"
    parser.add_argument("--id", help=meaning)


def torchrun(parser: ArgumentParser) -> None:
    meaning = "torchrun's arguments: --nnodes, --node-rank, ..., --no-python and a rank's command"
    _add(parser, "words", "ARGUMENT", meaning, nargs=REMAINDER)


def evaluate(parser: ArgumentParser) -> None:
    parser.add_argument("--checkpoint", help="model folder; default: the newest")


def books(parser: ArgumentParser) -> None:
    mode = parser.add_mutually_exclusive_group(required=True)
    _flag(mode, "--require-none", "only check that Redis holds no such run")
    _flag(mode, "--forget", "delete all that Redis holds of the run")


def run_folder(parser: ArgumentParser) -> None:
    _add(parser, "folder", "RUN", "run folder, such as runs/quickstart, or its configuration")


def report(parser: ArgumentParser) -> None:
    _flag(parser, "--html", "print the path of report.html instead of the summary")


def export(parser: ArgumentParser) -> None:
    _add(parser, "--output", "FOLDER", "a new folder; default: RUN/export/step-N")
    dtypes = ("float32", "bfloat16", "float16")
    meaning = "precision of the weights; default: float32, in which they are trained"
    parser.add_argument("--dtype", default="float32", choices=dtypes, help=meaning)
    _add(parser, "--step", "N", "step of the checkpoint; default: the newest", type=int)
    meaning = "largest size of one file, such as 500MB; default: 5GB"
    _add(parser, "--max-shard-size", "SIZE", meaning, default="5GB")
    _flag(parser, "--adapter", "export only the adapter of learner.lora, for peft")
    meaning = "upload the folder to this repository of the Hugging Face hub, created if missing"
    _add(parser, "--push", "OWNER/NAME", meaning)
    _flag(parser, "--public", "make a created repository public; default: private")


def new_folder(parser: ArgumentParser) -> None:
    _add(parser, "folder", "FOLDER", "folder to write the keys to")


def new_from_recipe(parser: ArgumentParser) -> None:
    _add(parser, "folder", "FOLDER", "a new folder", nargs="?")
    _add(parser, "--recipe", "NAME", "name of the recipe; without one, all are listed")


def import_file(parser: ArgumentParser) -> None:
    _add(parser, "file", "FILE", "a YAML file, or a shell script with arguments")
    systems = ("verl", "roll", "trl")
    meaning = "the file's system"
    parser.add_argument("--from", dest="system", required=True, choices=systems, help=meaning)
    _add(parser, "--output", "CONFIG", "a new file; default: print it")


def get_model(parser: ArgumentParser) -> None:
    meaning = "smollm2-135m, a name of the Hugging Face hub, a folder or a GGUF file"
    _add(parser, "model", "MODEL", meaning, nargs="?")
    _add(parser, "--output", "FOLDER", "a new folder; default: models/NAME")
    meaning = "instead of MODEL: make the model of this file's model.recipe, as a launch does"
    _add(parser, "--config", "CONFIG", meaning)


def buffer(parser: ArgumentParser) -> None:
    _add(parser, "target", "RUN", "run folder, configuration, or zmq://host:port of its buffer")


def inspect(parser: ArgumentParser) -> None:
    meaning = "seconds between the two readings for the rates; default: 1"
    parser.add_argument("--interval", type=seconds, default=1.0, help=meaning)


def listed_id(parser: ArgumentParser) -> None:
    _add(parser, "id", "ID", "id of the generator, as the list shows it")


def parity(parser: ArgumentParser) -> None:
    _add(parser, "--dtypes", "A,B,...", "precisions of the engine; default: generator.dtype")
    meaning = "folder of the report; default: the run's; with --score: the file to write"
    _add(parser, "--out", "PATH", meaning)
    half = parser.add_mutually_exclusive_group()
    _add(half, "--sample", "FILE", "only sample with the engine, into this file")
    meaning = "only score with the learner: files from --sample, or any sequences with --model"
    _add(half, "--score", "FILE", meaning, nargs="+")
    sequences = parser.add_argument_group(
        "with --model",
        'Lines of {"token_ids": [...], "response_mask": [...]} become lines of '
        '{"logprobs": [...]}, one for each token where the mask is true.',
    )
    _add(sequences, "--model", "PATH", "Hugging Face folder, instead of CONFIG")
    dtypes, meaning = ("float32", "bfloat16"), "precision of the computation; default: float32"
    sequences.add_argument("--dtype", default="float32", choices=dtypes, help=meaning)
    limit, meaning = "--max-tokens-per-micro-batch", "limit of one forward pass; default: 8192"
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
    meaning = "end with the reason when a daemon fails, instead of restarting it"
    _flag(parser, "--strict", meaning)
    where = parser.add_mutually_exclusive_group()
    meaning = (
        "start the run on the nodes of a Ray cluster: by default that of RAY_ADDRESS or of this "
        "machine; HOST:PORT, or ray://HOST:PORT from a machine outside"
    )
    _add(where, "--ray", "ADDRESS", meaning, nargs="?", const="auto")
    _flag(where, "--slurm", "within a Slurm job or allocation: start the run on its nodes")
    _flag(parser, "--dry-run", "only print what would be started, and where")


def samples(parser: ArgumentParser) -> None:
    _add(parser, "--step", "N[-M]", "only samples of this step, or of these steps")
    meaning = (
        "samples of the validation of this version (default: the newest) instead of training; all: "
        "the responses of all versions to the same prompts, side by side"
    )
    _add(parser, "--validation", "VERSION", meaning, nargs="?", const="newest")
    _add(parser, "--min-reward", "R", "only samples with this reward or more", type=float)
    _add(parser, "--max-reward", "R", "only samples with this reward or less", type=float)
    _add(parser, "--environment", "NAME", "only samples of this environment")
    _add(parser, "--data-source", "NAME", "only samples of this data source")
    _add(parser, "--grep", "REGEX", "only samples whose prompt or a message matches")
    order = parser.add_mutually_exclusive_group()
    _flag(order, "--best", "highest rewards first, instead of the newest")
    _flag(order, "--worst", "lowest rewards first")
    _add(parser, "--limit", "N", "largest number of samples; default: 20", type=count, default=20)
    _flag(parser, "--markup", "show the chat template's tokens")
    _flag(parser, "--json", "print JSON Lines")


def replay(parser: ArgumentParser) -> None:
    meaning = "version of the checkpoint to begin with; default: the oldest that the records follow"
    _add(parser, "--from", "VERSION", meaning, dest="start", type=int)
    _add(parser, "--steps", "N", "number of steps; default: all that are recorded", type=int)
    _add(parser, "--out", "FOLDER", "folder of the report; default: RUN/replay")


def status(parser: ArgumentParser) -> None:
    _add(parser, "target", "RUN", "configuration, run folder, or zmq://host:port of its buffer")
    what = parser.add_mutually_exclusive_group()
    json(what)
    meaning = "show the live screen until the run ends; lines if the output is no terminal"
    _flag(what, "--follow", meaning)
    roles = ("buffer", "learner", "generator")
    meaning = "only tell whether one daemon works: a probe for a container"
    what.add_argument("--probe", choices=roles, help=meaning)
    _flag(parser, "--lines", "with --follow: print lines for a log")
    meaning = "with --follow: seconds between readings; default: 1"
    parser.add_argument("--interval", type=seconds, default=1.0, help=meaning)
    meaning = "with --probe generator: its id; {host} stands for the host's name"
    parser.add_argument("--id", help=meaning)
