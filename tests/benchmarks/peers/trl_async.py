"""TRL's experimental AsyncGRPOTrainer; runs in an environment that has TRL.

    PYTHON tests/benchmarks/peers/trl_async.py

It samples by a vLLM server beside it, and sends the weights there with vLLM's NCCL engine, so it
needs vLLM in its own environment and two GPUs. Prints JSON: its version, and under `skipped` why it
cannot be made here, in its own words. Nothing of it was measured.
"""

import json
import tempfile


def main() -> None:
    import torch
    import trl

    line = {"benchmark": "trl_async", "system": "trl-async", "version": trl.__version__}
    print(json.dumps({**line, "skipped": reason(), "gpus": torch.cuda.device_count()}))


def reason() -> str:
    """Why there is no trainer; if there is one, what a run of it would need."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    words = Tokenizer(WordLevel({"a": 0, "end": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end", pad_token="end")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2, num_hidden_layers=1, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            AsyncGRPOTrainer(
                model=folder,
                processing_class=tokenizer,
                reward_funcs=lambda completions, **_: [0.0] * len(completions),
                args=AsyncGRPOConfig(output_dir=folder, use_cpu=True, bf16=False, report_to="none"),
                train_dataset=Dataset.from_list([{"prompt": "a"}]),
            )
        except (AssertionError, ImportError, ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return "it was made; a run needs a vLLM server with --weight-transfer-config and two GPUs"


if __name__ == "__main__":
    main()
