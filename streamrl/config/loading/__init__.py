"""From text to a `RunConfig` and back."""
