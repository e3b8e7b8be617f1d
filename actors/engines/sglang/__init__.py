"""SGLang as an engine, started here or by URL."""
