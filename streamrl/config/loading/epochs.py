"""`run.total_epochs` as a number of steps, resolved when a configuration is read.

Invariant: what has been read has its length in `run.max_steps` alone, so every reader of it reads
one setting, and a daemon that is given the resolved file needs no data to know when the run ends.
"""

from typing import Any

from pydantic import ValidationError

from streamrl.config.data import DataSettings
from streamrl.config.learner import LearnerSettings
from streamrl.config.run import RunSettings
from streamrl.data_files import SUFFIXES, count_rows, has_rows
from streamrl.errors import ConfigError

_FIELD, _RESOLVED = "run.total_epochs", "run.max_steps"


def with_steps(
    tree: dict[str, Any], origins: dict[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings and their origins with `run.max_steps` in the place of `run.total_epochs`.

    Returns them as they are where a section is refused, whose validation says why.

    Raises:
        ConfigError: `data.source` is no file that can be read, or has too few rows for a step.
    """
    try:
        run = RunSettings.model_validate(tree.get("run", {}))
        if run.total_epochs is None:
            return tree, origins
        data = DataSettings.model_validate(tree.get("data"))
        num_groups = LearnerSettings.model_validate(tree.get("learner", {})).groups_per_step
    except ValidationError:
        return tree, origins
    num_rows = _count(run.total_epochs, data)
    num_steps = int(num_rows * run.total_epochs) // num_groups
    counted = f"{_FIELD} {run.total_epochs:g} of {num_rows} rows"
    if num_steps < 1:
        raise ConfigError(
            f"{counted} is less than a step of learner.groups_per_step {num_groups} prompts"
        )
    where = {_FIELD: f"{run.total_epochs:g} epochs are in {_RESOLVED} ({origins.get(_FIELD, '')})"}
    if "max_steps" in run.model_fields_set and run.max_steps <= num_steps:
        num_steps = run.max_steps
    else:
        where = {**where, _RESOLVED: f"{counted}, {num_groups} a step"}
    length = {"max_steps": num_steps, "total_epochs": None}
    return {**tree, "run": {**tree["run"], **length}}, {**origins, **where}


def _count(total_epochs: float, data: DataSettings) -> int:
    for source in data.sources:
        if not has_rows(source.path):
            raise ConfigError(
                f"{_FIELD}: was {total_epochs:g}, and data.source {source.path} has no end; only "
                f"the rows of a file ({', '.join(SUFFIXES)}) or of a data set are counted: set "
                f"{_RESOLVED}"
            )
    setting = f"{_FIELD}: data.source"
    return sum(
        count_rows(setting, source.path, subset=source.subset, split=source.split)
        for source in data.sources
    )
