"""`streamrl plan`: what a launch would start, on which hosts, GPUs and ports. Starts nothing.

Invariant: what is printed is what a launch starts, but for ports given as 0 on one machine, which
are chosen when it starts.
"""

import argparse

from rich.console import Console

from streamrl.cli.launchers.hosts import with_hosts
from streamrl.cli.plans.view import as_json, tables
from streamrl.config.arguments import configuration
from streamrl.placement.assign import make_plan
from streamrl.placement.hosts import hosts_of
from streamrl.placement.plan import Plan


def main(arguments: argparse.Namespace) -> int:
    config = configuration(with_hosts(arguments)).config
    print_plan(make_plan(config, hosts_of(config)), is_json=arguments.json)
    return 0


def print_plan(plan: Plan, *, is_json: bool = False) -> None:
    """A table for each host and the notes of the plan, or JSON."""
    if is_json:
        print(as_json(plan))
        return
    console = Console(soft_wrap=True, highlight=False)
    for part in tables(plan):
        console.print(part, markup=False, emoji=False)
    for note in plan.notes:
        console.print(f"note: {note}", markup=False)
