"""The arguments of each command: one function for each set, which adds it to a parser."""

import math
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError, _ActionsContainer


def _flag(parser: _ActionsContainer, name: str, meaning: str) -> None:
    parser.add_argument(name, action="store_true", help=meaning)


def config(parser: ArgumentParser, meaning: str = "YAML file of the run") -> None:
    parser.add_argument("file", nargs="?", metavar="CONFIG", help=meaning)
    parser.add_argument("--config", metavar="CONFIG", help="the same, as an option")
    overrides(parser)


def check(parser: ArgumentParser) -> None:
    config(parser, "YAML file of a run; without, the machine alone")
    output = parser.add_mutually_exclusive_group()
    _flag(output, "--deep", "sample one group with the model, score and print it")
    json_output(output)
    length = parser.add_mutually_exclusive_group()
    _flag(length, "--quiet", "print problems and warnings, not the configuration")
    _flag(
        length, "--all", "print every setting and every check, also defaults and what is in order"
    )


def generator(parser: ArgumentParser) -> None:
    config(parser)
    help_text = "name of this generator, where {host} is the host's name; default: random"
    parser.add_argument("--id", default=None, help=help_text)


def learner(parser: ArgumentParser) -> None:
    config(parser)
    resume(parser)


def torchrun(parser: ArgumentParser) -> None:
    help_text = "those of torchrun: --nnodes, --node-rank, ..., --no-python and a rank's command"
    parser.add_argument("words", nargs=REMAINDER, metavar="ARGUMENT", help=help_text)


def evaluate(parser: ArgumentParser) -> None:
    config(parser)
    parser.add_argument("--checkpoint", default=None, help="model folder; default: the newest")


def books(parser: ArgumentParser) -> None:
    config(parser)
    mode = parser.add_mutually_exclusive_group(required=True)
    _flag(mode, "--require-none", "only check that Redis holds no such run")
    _flag(mode, "--forget", "delete all that Redis holds of the run")


def run_folder(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="RUN", help="run folder, such as runs/quickstart, or its file"
    )


def report(parser: ArgumentParser) -> None:
    run_folder(parser)
    _flag(parser, "--html", "print where report.html is, and no summary")


def export(parser: ArgumentParser) -> None:
    run_folder(parser)
    parser.add_argument(
        "--output", metavar="FOLDER", help="a new folder; default: RUN/export/step-N"
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights; default: float32, as they are trained",
    )
    parser.add_argument(
        "--step", metavar="N", type=int, help="of the checkpoint; default: the newest"
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default="5GB",
        help="of one file, such as 500MB; larger models have several; default: 5GB",
    )
    _flag(parser, "--adapter", "the adapter of learner.lora alone, for peft")
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="upload the folder to this repository of the Hugging Face hub, made if need be",
    )
    _flag(parser, "--public", "of a repository that is made; default: private")


def new_folder(parser: ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="where the keys are written")


def new_from_recipe(parser: ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help="a new folder")
    parser.add_argument("--recipe", metavar="NAME", help="its name; without one they are listed")


def import_file(parser: ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="a YAML file, or a shell script with arguments"
    )
    parser.add_argument(
        "--from", dest="system", required=True, choices=("verl", "roll", "trl"), help="whose it is"
    )
    parser.add_argument("--output", metavar="CONFIG", help="a new file; default: print it")


def get_model(parser: ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="smollm2-135m, a name of the Hugging Face hub, a folder or a GGUF file",
    )
    parser.add_argument("--output", metavar="FOLDER", help="a new folder; default: models/NAME")
    help_text = "instead of MODEL: make the model of its model.recipe, as a launch does"
    parser.add_argument("--config", metavar="CONFIG", help=help_text)
    overrides(parser)


def buffer(parser: ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="RUN",
        help="run folder, configuration, or zmq://host:port of its buffer",
    )


def inspect(parser: ArgumentParser) -> None:
    buffer(parser)
    parser.add_argument(
        "--interval",
        type=seconds,
        default=1.0,
        help="seconds between the readings that give rates",
    )


def drain(parser: ArgumentParser) -> None:
    buffer(parser)
    _deadline(parser)


def generators(parser: ArgumentParser) -> None:
    buffer(parser)
    json_output(parser)


def one_generator(parser: ArgumentParser) -> None:
    buffer(parser)
    parser.add_argument("id", metavar="ID", help="id of the generator, as the list shows it")


def drain_generator(parser: ArgumentParser) -> None:
    one_generator(parser)
    _deadline(parser)


def parity(parser: ArgumentParser) -> None:
    config(parser)
    parser.add_argument(
        "--dtypes", metavar="A,B,...", help="precisions of the engine; default: generator.dtype"
    )
    parser.add_argument(
        "--out",
        metavar="PATH",
        help="folder of the report, default: the run's; with --score the file to write",
    )
    half = parser.add_mutually_exclusive_group()
    half.add_argument("--sample", metavar="FILE", help="only sample, with the engine, to this file")
    half.add_argument(
        "--score",
        nargs="+",
        metavar="FILE",
        help="only score with the learner: files of --sample, or with --model any sequences",
    )
    _sequences(parser)


def _sequences(parser: ArgumentParser) -> None:
    group = parser.add_argument_group(
        "with --model",
        'Lines of {"token_ids": [...], "response_mask": [...]} become lines of '
        '{"logprobs": [...]}, one for each token where the mask is true.',
    )
    group.add_argument("--model", metavar="PATH", help="Hugging Face folder, in place of CONFIG")
    group.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="of the computation; default: float32",
    )
    group.add_argument(
        "--max-tokens-per-micro-batch",
        type=count,
        default=8192,
        metavar="N",
        help="of one forward pass; default: 8192",
    )


def overrides(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="change one setting; can be repeated",
    )


def seconds(text: str) -> float:
    """A time to wait; argparse makes the error a sentence that begins with the option."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"was {text!r}; it must be a number of seconds, 0 or more")
    return value


def count(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise ArgumentTypeError(f"was {text!r}; it must be a whole number, 1 or more")
    return value


def resume(parser: _ActionsContainer) -> None:
    _flag(parser, "--resume", "continue from the newest checkpoint")


def json_output(parser: _ActionsContainer) -> None:
    _flag(parser, "--json", "print JSON")


def _deadline(parser: ArgumentParser) -> None:
    help_text = "seconds to wait; default: 600"
    parser.add_argument("--deadline", type=seconds, default=600.0, help=help_text)


def launch(parser: ArgumentParser) -> None:
    config(parser)
    existing = parser.add_mutually_exclusive_group()
    resume(existing)
    _flag(existing, "--new", "move an existing run folder aside")
    _flag(parser, "--no-view", "print progress lines instead of the live view")
    _flag(
        parser, "--strict", "end with the reason when a daemon fails, instead of starting it again"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="start the run on the nodes of a Ray cluster: that of RAY_ADDRESS or of this machine, "
        "HOST:PORT, or ray://HOST:PORT from a machine outside",
    )
    _flag(where, "--slurm", "within a job of Slurm or an allocation: start the run on its nodes")
    _flag(parser, "--dry-run", "print what would be started, and where")


def plan(parser: ArgumentParser) -> None:
    config(parser)
    json_output(parser)


def samples(parser: ArgumentParser) -> None:
    run_folder(parser)
    parser.add_argument("--step", metavar="N[-M]", help="of this step, or of these")
    parser.add_argument(
        "--validation",
        metavar="VERSION",
        nargs="?",
        const="newest",
        help="of the validation of this version, or of the newest, instead of training; all: what "
        "each version wrote for the same prompts, side by side",
    )
    parser.add_argument("--min-reward", type=float, metavar="R", help="with this reward or more")
    parser.add_argument("--max-reward", type=float, metavar="R", help="with this reward or less")
    parser.add_argument("--environment", metavar="NAME", help="of this environment")
    parser.add_argument("--data-source", metavar="NAME", help="of this data source")
    parser.add_argument("--grep", metavar="REGEX", help="with a text that this matches")
    order = parser.add_mutually_exclusive_group()
    _flag(order, "--best", "highest rewards first, not the newest")
    _flag(order, "--worst", "lowest rewards first")
    parser.add_argument("--limit", type=count, default=20, metavar="N", help="default: 20")
    _flag(parser, "--markup", "show the chat template's tokens")
    _flag(parser, "--json", "print JSON Lines")


def replay(parser: ArgumentParser) -> None:
    run_folder(parser)
    overrides(parser)
    parser.add_argument(
        "--from",
        dest="start",
        type=int,
        metavar="VERSION",
        help="the checkpoint to begin with; default: the oldest that the records continue",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="so many; default: all recorded")
    parser.add_argument("--out", metavar="FOLDER", help="for the report; default: RUN/replay")


def status(parser: ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="RUN", help="configuration, run folder, or zmq://host:port of its buffer"
    )
    what = parser.add_mutually_exclusive_group()
    _flag(what, "--json", "print JSON")
    _flag(
        what,
        "--follow",
        "the live screen, until the run ends; lines where the output is no terminal",
    )
    what.add_argument(
        "--probe",
        choices=("buffer", "learner", "generator"),
        help="only whether one daemon works: the probe of a container",
    )
    _flag(parser, "--lines", "with --follow: lines for a log")
    parser.add_argument(
        "--interval",
        type=seconds,
        default=1.0,
        help="with --follow: seconds between readings; default: 1",
    )
    parser.add_argument(
        "--id", help="with --probe generator: its id, where {host} is the host's name"
    )
