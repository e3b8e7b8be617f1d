"""The arguments of `streamrl plan`."""

from argparse import ArgumentParser

from streamrl.cli.arguments.options import config


def plan(parser: ArgumentParser) -> None:
    config(parser)
    parser.add_argument(
        "--hosts",
        metavar="[USER@]HOST[:DEVICES],...",
        help="the machines of the run; short for cluster.hosts",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
