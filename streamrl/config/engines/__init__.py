"""The settings of one inference engine each: `generator.hf`, `.vllm` and `.sglang`."""
