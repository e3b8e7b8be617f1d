"""The arguments of `streamrl samples`: the filters of its pager."""

from argparse import ArgumentParser

from streamrl.cli.arguments.options import count, run_folder


def samples(parser: ArgumentParser) -> None:
    run_folder(parser)
    parser.add_argument("--step", metavar="N[-M]", help="of this step, or of these")
    parser.add_argument(
        "--validation",
        metavar="VERSION",
        nargs="?",
        const="newest",
        help="of the validation of this version, or of the newest, instead of training",
    )
    parser.add_argument("--min-reward", type=float, metavar="R", help="with this reward or more")
    parser.add_argument("--max-reward", type=float, metavar="R", help="with this reward or less")
    parser.add_argument("--environment", metavar="NAME", help="of this environment")
    parser.add_argument("--data-source", metavar="NAME", help="of this data source")
    parser.add_argument("--grep", metavar="REGEX", help="with a text that this matches")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--best", action="store_true", help="highest rewards first, not the newest")
    order.add_argument("--worst", action="store_true", help="lowest rewards first")
    parser.add_argument("--limit", type=count, default=20, metavar="N", help="default: 20")
    parser.add_argument("--json", action="store_true", help="print JSON Lines")
