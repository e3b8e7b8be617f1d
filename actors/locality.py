"""Where a generator receives new weights, which decides by which transport they come.

Not always in this process, and not always on the GPU that samples.
"""

import torch

from streamrl.config.generator import GeneratorSettings
from streamrl.types import Locality
from streamrl.weights.locality import locality_of


def weight_locality(generator: GeneratorSettings) -> Locality:
    """By `generator.engine`; that of the engine's workers if they run on this machine."""
    device = generator.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    match generator.engine:
        case "sglang":
            # The relay receives into this process's host memory.
            return locality_of("cpu")
        case "vllm" if generator.vllm.url:
            return Locality(device_type=torch.device(device).type)
        case _:
            return locality_of(device, generator.num_ranks)
