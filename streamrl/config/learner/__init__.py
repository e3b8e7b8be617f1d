"""`learner`: the batch of a step, the optimizer, the checkpoints, the ranks and the device."""

from streamrl.config.learner.checkpoint import CheckpointSettings
from streamrl.config.learner.lora import LoraSettings
from streamrl.config.learner.memory import ForwardPassSettings, OffloadSettings
from streamrl.config.learner.mesh import MeshSettings
from streamrl.config.learner.optimizer import OptimizerGroup, OptimizerSettings
from streamrl.config.learner.profiler import ProfilerSettings
from streamrl.config.learner.settings import LearnerSettings, setting_without_pass

__all__ = [
    "CheckpointSettings",
    "ForwardPassSettings",
    "LearnerSettings",
    "LoraSettings",
    "MeshSettings",
    "OffloadSettings",
    "OptimizerGroup",
    "OptimizerSettings",
    "ProfilerSettings",
    "setting_without_pass",
]
