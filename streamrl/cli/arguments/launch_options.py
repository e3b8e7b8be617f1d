"""The arguments of `streamrl launch`: what is started, and where."""

from argparse import ArgumentParser, ArgumentTypeError

from streamrl.cli.arguments import options


def launch(parser: ArgumentParser) -> None:
    options.config(parser)
    existing = parser.add_mutually_exclusive_group()
    options.resume(existing)
    existing.add_argument("--new", action="store_true", help="move an existing run folder aside")
    parser.add_argument(
        "--no-view", action="store_true", help="print progress lines instead of the live view"
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="end with the reason when a daemon fails, instead of starting it again",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--hosts",
        metavar="[USER@]HOST[:DEVICES],...",
        help="start the run on these machines, over ssh; short for cluster.hosts",
    )
    where.add_argument(
        "--slurm",
        action="store_true",
        help="submit a job to Slurm; within a job or an allocation: start the run on its nodes",
    )
    where.add_argument(
        "--k8s",
        dest="kubernetes",
        action="store_true",
        help="start the run on Kubernetes, by kubectl",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be started, and where"
    )
    _slurm(parser)
    _kubernetes(parser)


def _slurm(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("with --slurm")
    group.add_argument(
        "--nodes", type=_positive, help="nodes of the job; default: those of cluster.hosts, or 1"
    )
    group.add_argument(
        "--sbatch",
        metavar="OPTION[=VALUE]",
        action="append",
        default=[],
        help="option of sbatch, such as partition=gpu or time=8:00:00; can be repeated",
    )


def _kubernetes(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("with --k8s")
    group.add_argument("--namespace", help="of all objects; default: default")
    group.add_argument(
        "--image",
        metavar="[ROLE=]IMAGE",
        action="append",
        default=[],
        help="image of all pods or of those of a role; can be repeated; default: those of deploy/",
    )
    group.add_argument(
        "--gpus-per-node", type=_count, help="GPUs that one pod can have; default: 8"
    )
    group.add_argument("--storage", help="size of the volume with the run; default: 200Gi")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"must be a whole number from 0, was {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"must be a whole number from 1, was {text!r}")
    return int(text)
