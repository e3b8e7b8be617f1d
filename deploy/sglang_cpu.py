"""Makes SGLang importable on a machine without a GPU: `PYTHON deploy/sglang_cpu.py`.

PYTHON is that of the environment that it is installed in. Nothing outside that environment changes,
and doing it twice is as good as once.

Two packages that SGLang imports have no build for a CPU beside this torch:

    torchvision   PyPI's is built for CUDA, and its operators do not load. SGLang needs it for
                  images alone, but its import describes two of the missing operators to torch,
                  which refuses that: those two lines become comments.
    sgl_kernel    SGLang's CUDA kernels. On a CPU it imports the names of some and calls none: a
                  module takes their place that has every name, and whose functions raise.
"""

import sys
import sysconfig
from pathlib import Path

PATCHED = "@torch.library.register_fake("
NO_KERNELS = '''"""Stands in for SGLang's CUDA kernels, made by StreamRL's deploy/sglang_cpu.py."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments, **named):
        raise NotImplementedError(f"sgl_kernel.{name} has no build for this CPU")

    return missing
'''


def without_operators(source: str) -> str:
    """The source of torchvision's `_meta_registrations` without what needs its operators.

    >>> without_operators("@torch.library.register_fake('torchvision::nms')")
    "# @torch.library.register_fake('torchvision::nms')"
    """
    lines = source.split("\n")
    return "\n".join(f"# {line}" if line.startswith(PATCHED) else line for line in lines)


def prepare(packages: Path) -> None:
    """Patches the environment whose packages lie in this folder."""
    registrations = packages / "torchvision" / "_meta_registrations.py"
    source = registrations.read_text()
    if (patched := without_operators(source)) != source:
        # The installer may have linked the file into its cache: replace it, do not write into it.
        registrations.unlink()
        registrations.write_text(patched)
    kernels = packages / "sgl_kernel"
    kernels.mkdir(exist_ok=True)
    (kernels / "__init__.py").write_text(NO_KERNELS)


if __name__ == "__main__":
    prepare(Path(sysconfig.get_paths()["purelib"]))
    sys.exit(0)
