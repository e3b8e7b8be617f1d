"""`streamrl check`: whether a run can start as it is configured, and where each value came from.

    0  it can; the resolved configuration, and what was looked at
    2  it cannot: a sentence for each problem, all at once

Starts nothing and imports no torch; `--deep` samples one group, with the model.
"""

import argparse
import sys

from streamrl.cli.preflight.report import CheckReport, examine
from streamrl.config import render
from streamrl.config.loading.arguments import config_file, configuration
from streamrl.config.loading.load import load_usable
from streamrl.errors import ConfigError


def main(arguments: argparse.Namespace) -> int:
    report = _examine(arguments)
    for sentence in report.warnings:
        print(f"warning: {sentence}", file=sys.stderr)
    if report.problems:
        raise ConfigError("\n".join(report.problems))
    loaded = configuration(arguments)
    if arguments.deep:
        from streamrl.cli.preflight.deep import sample_one_group

        return sample_one_group(loaded.config)
    if not arguments.quiet:
        print(render(loaded), end="")
        print("\n# can start here; checked without starting anything:")
        for sentence in report.facts:
            print(f"#   {sentence}")
    return 0


def _examine(arguments: argparse.Namespace) -> CheckReport:
    loaded, refused = load_usable(config_file(arguments), arguments.overrides)
    if loaded is None:
        assert refused is not None, "something is wrong with a configuration that is not usable"
        raise refused
    return examine(loaded, refused)
