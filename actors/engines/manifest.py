"""Whether an announced update fits the engine's model, checked before it is received."""

from collections.abc import Mapping

from streamrl.errors import WeightTransferError
from streamrl.types import TensorSpec
from streamrl.weights.codecs import lora

Shapes = Mapping[str, tuple[int, ...]]


def require_same_parameters(manifest: tuple[TensorSpec, ...], own: Shapes) -> None:
    """Refuses a manifest of another model; `own` is the engine's shapes by name. One of LoRA's
    factors names some of the matrices only.

    Raises:
        WeightTransferError: naming the first parameter that only one end has, or whose shapes
            differ.
    """
    if lora.is_of_factors(manifest):
        lora.require_fitting_factors(manifest, own)
        return
    offered = {spec.name: spec.shape for spec in manifest}
    for name in offered.keys() ^ own.keys():
        where = "the learner" if name in offered else "the engine"
        raise WeightTransferError(f"only {where}'s model has a parameter {name}")
    for name, shape in own.items():
        if offered[name] != shape:
            raise WeightTransferError(
                f"parameter {name}: the learner's is {offered[name]}, the engine's {shape}"
            )
