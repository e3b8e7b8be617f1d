"""The engine's half of parity: it samples prompts of the run, which the learner then scores."""

from collections.abc import Sequence

from actors.daemon import prepare
from actors.engines import make_engine
from actors.episodes.mixed_runner import make_runner
from actors.prompts import open_stream
from actors.rendering.renderer import ChatRenderer
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.interfaces import Episode
from streamrl.types import ParitySamples


async def sample(config: RunConfig) -> ParitySamples:
    """One response to each of the first `parity.num_prompts` prompts of the stream.

    Raises:
        ConfigError: none of the prompts fits.
        RolloutError: every prompt failed.
    """
    prepare(config)
    generator = config.generator.reading_weights()
    config = config.model_copy(update={"generator": generator})
    engine = make_engine(config, seed=config.run.seed)
    renderer = ChatRenderer.from_config(config)
    runner = make_runner(config, engine, renderer, open_stream(config, renderer))
    runner = runner.single().changed(reward=_Unscored())
    try:
        num_prompts = config.parity.num_prompts
        first = await runner.run_first(num_prompts, "parity", generator.max_num_seqs)
    finally:
        await engine.close()
    if not first.groups:
        raise ConfigError(
            f"data.max_prompt_length: none of the first {num_prompts} prompts fits, so there is "
            "nothing to compare"
        )
    return ParitySamples(
        engine=config.generator.engine, dtype=config.generator.dtype, groups=first.groups
    )


class _Unscored:
    """Parity is about tokens, and a reward may be expensive."""

    async def score(self, episodes: Sequence[Episode]) -> Sequence[float]:
        return [0.0 for _ in episodes]
