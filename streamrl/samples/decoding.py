"""Token ids to the text that a person reads: special tokens stay."""

from streamrl.config.model import ModelSettings
from streamrl.samples.record import Decode


def open_decoder(model: ModelSettings) -> Decode:
    """That of the model's tokenizer.

    Raises:
        OSError, ValueError: the model has none.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        model.tokenizer_path, trust_remote_code=model.trust_remote_code
    )
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=False))
