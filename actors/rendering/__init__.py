"""Converts between messages and token ids, by the run's tokenizer and chat template."""
