"""`generator.hf`: the engine of transformers."""

from streamrl.config.section import Section


class HfSettings(Section):
    """All else is `engine_kwargs`, the arguments of `from_pretrained`."""

    recompute_kv: bool = False
    """At an update, compute what requests in flight have cached again with the new weights. The
    pause is then as long as their prefill."""
