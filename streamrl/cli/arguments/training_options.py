"""The arguments of the commands that train several times: ablate and replay."""

from argparse import ArgumentParser

from streamrl.cli.arguments.options import config, overrides, run_folder


def ablate(parser: ArgumentParser) -> None:
    config(parser)
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="SECTION.KEY=A,B,...",
        help="a setting and its values; can be repeated, for every combination",
    )
    parser.add_argument(
        "--variants", metavar="FILE", help="YAML file of named sets of settings, as another axis"
    )
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated; default: 0,1,2")
    parser.add_argument(
        "--lag",
        choices=("even", "uneven"),
        help="run each in one process, with groups that are exactly buffer.max_staleness versions "
        "old, or each of them 0 to twice as many; without, each is a launch",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="of --lag, so many at once; default: 1"
    )


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
