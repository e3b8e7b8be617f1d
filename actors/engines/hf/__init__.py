"""The engine of transformers, in the generator's process."""
