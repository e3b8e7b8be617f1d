"""The dotted names of all settings, through sections in unions and lists."""

import re
from collections.abc import Iterator

from pydantic import BaseModel, Field

from streamrl.config import RunConfig
from streamrl.config.algorithm import advantages, losses
from streamrl.config.algorithm.advantages import ADVANTAGE_SETTINGS
from streamrl.config.algorithm.losses import LOSS_SETTINGS
from streamrl.config.algorithm.rollout_is import RolloutISSettings

_DOTTED = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")


class LossConfig(
    losses.PpoSettings,
    losses.GspoSettings,
    losses.LuspoSettings,
    losses.GeoMeanSettings,
    losses.CispoSettings,
    losses.ClipCovSettings,
    losses.KlCovSettings,
    losses.SapoSettings,
    losses.DppoSettings,
    losses.VespoSettings,
    losses.ToprSettings,
    losses.DroSettings,
):
    """The numbers of all losses in one record, which every loss accepts."""


class AdvantageConfig(
    advantages.GaeSettings,
    advantages.GpgAdvantageSettings,
    advantages.GdpoSettings,
    advantages.GigpoSettings,
    advantages.RaeSettings,
):
    """The numbers of all advantages in one record, which every one accepts."""


class RolloutISConfig(RolloutISSettings):
    """`algorithm.rollout_is` with verl's default of the veto."""

    veto_threshold: float | None = Field(default=1e-4, gt=0, lt=1)


def setting_names() -> set[str]:
    """Sections and values; those of every advantage and loss, and what vLLM alone knows."""
    return {
        *_settings(RunConfig, ""),
        *(f"algorithm.loss_config.{f}" for r in LOSS_SETTINGS.values() for f in r.model_fields),
        *(
            f"algorithm.advantage_config.{f}"
            for r in ADVANTAGE_SETTINGS.values()
            for f in r.model_fields
        ),
        "generator.engine_kwargs.block_size",
    }


def named_in(text: str) -> list[str]:
    """The dotted names of a text."""
    return _DOTTED.findall(text)


def _settings(model: type[BaseModel], path: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        here = f"{path}{name}"
        yield here
        for nested in _models(field.annotation):
            yield from _settings(nested, f"{here}.")


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models(argument)


def set_options(*settings: str) -> list[str]:
    """The words of a command line that change these settings."""
    return [word for setting in settings for word in ("--set", setting)]
