"""`learner.max_tokens_per_forward_pass`, `learner.offload`: what memory a step takes, and where."""

from pydantic import model_validator

from streamrl.config.numbers import Positive
from streamrl.config.section import Section


class ForwardPassSettings(Section):
    """Tokens of one forward pass without gradient, which needs less memory than a training pass;
    null takes `learner.max_tokens_per_micro_batch`."""

    proximal: Positive | None = None
    """Of the policy before the step, where the algorithm needs such a pass."""
    reference: Positive | None = None
    """Of the reference policy."""
    values: Positive | None = None
    """Of the critic before the step."""


class OffloadSettings(Section):
    """What waits in the host's memory instead of the GPU's: less memory, more time."""

    parameters: bool = False
    """Parameters, gradients and optimizer state of all roles: layers are copied to the GPU as they
    are computed, and the CPU makes the update."""
    optimizer: bool = False
    """The optimizer's state, but for the update."""
    activations: bool = False
    """The inputs of the layers that `gradient_checkpointing` keeps."""
    reference: bool = False
    """The reference policy: its layers are copied to the GPU as they are computed."""

    @model_validator(mode="after")
    def _acts(self) -> "OffloadSettings":
        if self.parameters and (self.optimizer or self.reference):
            raise ValueError(
                f"{'optimizer' if self.optimizer else 'reference'} does nothing beside parameters, "
                "which puts the parameters and the optimizer state of all roles on the host"
            )
        return self

    @property
    def chosen(self) -> tuple[str, ...]:
        """The options that are on."""
        return tuple(name for name, is_on in self.model_dump().items() if is_on)
