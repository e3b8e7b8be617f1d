"""How far the programs of a model's, of the reward `code` and the tool `python`, are kept apart."""

from collections.abc import Iterator, Mapping

from actors.sandbox.isolation import KINDS, Isolation, why_not
from streamrl.cli.doctor.findings import Finding, ok, warn

_REMEDY = (
    "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1), or use a kernel with "
    "Landlock (5.13, boot option lsm=landlock,...) and a container engine that lets it through"
)


def ask_sandbox() -> Mapping[Isolation, str]:
    """What the machine lacks for each isolation. Waits for two programs."""
    return {kind: why_not(kind) for kind in KINDS}


def check_sandbox(lacks: Mapping[Isolation, str]) -> Iterator[Finding]:
    """`lacks`: of `ask_sandbox`."""
    reasons = "; ".join(f"{kind}: {reason}" for kind, reason in lacks.items() if reason)
    if not lacks["namespaces"]:
        yield ok("sandbox", "programs that a model wrote get namespaces of their own")
    elif not lacks["landlock"]:
        yield ok("sandbox", f"programs that a model wrote are held by Landlock ({reasons})")
    else:
        sentence = f"nothing here keeps programs that a model wrote apart ({reasons})"
        yield warn("sandbox", sentence, _REMEDY)
