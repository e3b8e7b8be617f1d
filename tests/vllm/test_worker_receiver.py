"""What a model of vLLM does with an update that its worker has received."""

import pytest
import torch
from vllm.model_executor.model_loader.reload import (
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from actors.engines.vllm.worker_receiver import require_kept
from streamrl.errors import WeightTransferError


class Sinks(torch.nn.Module):
    """With a parameter that it copies by itself, as gpt-oss does, or by the parameter's loader."""

    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.attention = torch.nn.Linear(3, 2, bias=False)
        self.attention.sinks = torch.nn.Parameter(torch.zeros(2))
        self._copies = copies

    def load_weights(self) -> set[str]:
        for parameter in self.parameters():
            tensor = torch.ones(parameter.shape)
            if self._copies and parameter.ndim == 1:
                parameter.data.copy_(tensor)
            else:
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
        return {name for name, _ in self.named_parameters()}


@pytest.mark.parametrize("copies", [False, True])
def test_a_parameter_whose_new_value_vllm_would_lose_is_named(copies: bool):
    model = Sinks(copies=copies)
    record_metadata_for_reloading(model)
    initialize_layerwise_reload(model)
    loaded = model.load_weights()
    if copies:
        with pytest.raises(WeightTransferError, match=r"Sinks loads attention\.sinks at its start"):
            require_kept(model, loaded)
    else:
        require_kept(model, loaded)
