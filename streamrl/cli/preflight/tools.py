"""Whether the tools of `generator` can be made, and are used."""

from collections.abc import Iterator

from actors.tools.environment import TOOLS
from actors.tools.toolset import make_sources
from streamrl.cli.preflight.findings import Finding, problem, refusal
from streamrl.config import RunConfig


def check_tools(config: RunConfig) -> Iterator[Finding]:
    """Starts no server."""
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
