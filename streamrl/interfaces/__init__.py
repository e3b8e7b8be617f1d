"""The interfaces between the daemons and their backends, engines and other plug-ins.

Protocols only, each of a few methods, so that a backend, an engine or an environment can be written
without reading the daemons. An implementation keeps the promises stated here; `tests/contract`
tests every implementation for them.
"""

from streamrl.interfaces.buffer import (
    GeneratorBuffer as GeneratorBuffer,
    TrajectoryBuffer as TrajectoryBuffer,
)
from streamrl.interfaces.engine import (
    CompletionHandle as CompletionHandle,
    Engine as Engine,
    Sampler as Sampler,
)
from streamrl.interfaces.episodes import (
    Environment as Environment,
    EnvironmentContext as EnvironmentContext,
    Episode as Episode,
    Message as Message,
    Observation as Observation,
    Prompt as Prompt,
    PromptSource as PromptSource,
    Renderer as Renderer,
    RestorableEnvironment as RestorableEnvironment,
    Reward as Reward,
    Score as Score,
    ToolSchema as ToolSchema,
    Transition as Transition,
)
from streamrl.interfaces.tracking import Tracker as Tracker
