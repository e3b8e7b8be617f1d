"""Whether the tools of `generator` can be made, are used, and are kept apart where they must be."""

from collections.abc import Iterator

from actors.sandbox.isolation import find_isolation
from actors.sandbox.sandbox import NO_ISOLATION
from actors.tools.environment import TOOLS
from actors.tools.toolset import make_sources
from streamrl.cli.preflight.findings import Finding, fact, problem, refusal, warning
from streamrl.config import RunConfig


def check_tools(config: RunConfig) -> Iterator[Finding]:
    """Runs one or two programs in the sandbox if a tool needs it, and starts no server."""
    generator = config.generator
    given = [name for name in ("tools", "mcp_servers") if getattr(generator, name)]
    is_used = any(entry.environment == TOOLS for entry in config.entries)
    if is_used and not given:
        yield problem("generator.tools: environment tools has none, and no generator.mcp_servers")
    if given and not is_used:
        yield problem(
            f"generator.{given[0]}: nothing reads them; generator.environment: tools does"
        )
    yield from refusal(lambda: make_sources(generator))
    if any(tool.tool == "python" for tool in generator.tools):
        yield from _check_sandbox()


def _check_sandbox() -> Iterator[Finding]:
    match find_isolation():
        case "namespaces":
            yield fact("generator.tools: the sandbox of python has namespaces of its own")
        case "seccomp":
            yield warning(
                "generator.tools: python runs with seccomp alone, since this user may make no "
                "namespaces: programs have no network, but the generator's rights to its files"
            )
        case None:
            yield problem(f"generator.tools: python: {NO_ISOLATION}")
