"""Makes SGLang importable on a machine without a GPU: `PYTHON deploy/sglang_cpu.py`.

PYTHON is the one of the environment in which SGLang is installed. Nothing outside that environment
changes, and the script may run repeatedly.

Two packages that SGLang imports have no CPU build for this torch:

    torchvision   PyPI's build is for CUDA, and its operators do not load. SGLang needs torchvision
                  only for images, but importing it registers two of the missing operators with
                  torch, which fails: the script comments out those two lines.
    sgl_kernel    SGLang's CUDA kernels. On a CPU SGLang imports some of their names and calls none:
                  the script replaces them with a module that has every name, and whose functions
                  raise NotImplementedError.
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
    """Comment out the lines of torchvision's `_meta_registrations` that need its operators.

    >>> without_operators("@torch.library.register_fake('torchvision::nms')")
    "# @torch.library.register_fake('torchvision::nms')"
    """
    lines = source.split("\n")
    return "\n".join(f"# {line}" if line.startswith(PATCHED) else line for line in lines)


def prepare(packages: Path) -> None:
    """Patch the environment whose packages are in this folder."""
    registrations = packages / "torchvision" / "_meta_registrations.py"
    source = registrations.read_text()
    if (patched := without_operators(source)) != source:
        # The file may be a hard link into the installer's cache: replace it, do not write into it.
        registrations.unlink()
        registrations.write_text(patched)
    kernels = packages / "sgl_kernel"
    kernels.mkdir(exist_ok=True)
    (kernels / "__init__.py").write_text(NO_KERNELS)


if __name__ == "__main__":
    prepare(Path(sysconfig.get_paths()["purelib"]))
    sys.exit(0)
