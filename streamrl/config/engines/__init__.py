"""The settings of one inference engine each: `generator.vllm` and `generator.sglang`."""
