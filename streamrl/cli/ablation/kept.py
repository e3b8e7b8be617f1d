"""Whether a complete run of an ablation was made with the settings that are asked for now."""

from streamrl.cli.ablation.lag import LAG_FILE
from streamrl.config import RunConfig
from streamrl.config.loading.rendering import values_of
from streamrl.errors import ConfigError
from streamrl.run_folder import config_of

# Ports are picked for each run, and a folder may be named in several ways.
_OWN = ("run.folder", "run.name", "buffer.url", "weights.address")


def require_made_like(config: RunConfig, lag: str | None) -> None:
    """
    Raises:
        ConfigError: the run in the folder of `config` had other settings, or another --lag.
    """
    folder = config.run.path
    file = folder / LAG_FILE
    made = {**values_of(config_of(folder)), "--lag": file.read_text() if file.exists() else None}
    asked = {**values_of(config), "--lag": lag}
    for name in {**asked, **made}:
        if name not in _OWN and made.get(name) != asked.get(name):
            raise ConfigError(
                f"{folder} is complete and was made with {name} {made.get(name)}, not "
                f"{asked.get(name)}: choose another run.name, or remove the folder"
            )
