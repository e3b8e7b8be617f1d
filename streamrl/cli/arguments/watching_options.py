"""The arguments of the commands that watch a run, or look at a machine."""

from argparse import ArgumentParser

from streamrl.cli.arguments.options import config, json_output, seconds


def status(parser: ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="RUN", help="configuration, run folder, or zmq://host:port of its buffer"
    )
    json_output(parser)


def top(parser: ArgumentParser) -> None:
    status(parser)
    parser.add_argument("--once", action="store_true", help="print one reading and end")
    parser.add_argument(
        "--interval", type=seconds, default=1.0, help="seconds between readings; default: 1"
    )


def doctor(parser: ArgumentParser) -> None:
    config(parser)
    json_output(parser)
