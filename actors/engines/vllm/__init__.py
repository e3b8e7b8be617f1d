"""vLLM as an engine, started by this process or reached by URL."""
