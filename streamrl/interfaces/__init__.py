"""The interfaces between the daemons and their backends, engines and other plug-ins.

Protocols only, each of a few methods, so that a backend, an engine or an environment can be written
without reading the daemons. An implementation keeps the promises stated here; `tests/contract`
tests every implementation for them.
"""

from streamrl.interfaces.buffer import GeneratorBuffer, LearnerBuffer, TrajectoryBuffer
from streamrl.interfaces.engine import CompletionHandle, Engine, Sampler
from streamrl.interfaces.episodes import (
    Environment,
    EnvironmentContext,
    Episode,
    Message,
    Observation,
    Prompt,
    PromptSource,
    Renderer,
    RestorableEnvironment,
    Reward,
    Score,
    ToolSchema,
    Transition,
)
from streamrl.interfaces.tracking import Tracker
