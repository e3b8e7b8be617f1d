"""StreamRL: asynchronous off-policy streaming reinforcement learning for language models.

Importing this package, `streamrl.config`, `streamrl.wire` or `buffers` loads neither torch nor
transformers: the buffer's image needs no CUDA, and the command line answers at once.
"""

__version__ = "0.2.0"
