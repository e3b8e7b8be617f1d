"""vLLM as an engine, in this process's care or by URL."""
