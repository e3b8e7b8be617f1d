"""Tools: what the policy calls, and what answers it.

    tool.py            what a tool is: `ToolSource` for a generator, `ToolSession` for an episode
    functions.py       a function or a class of the user's own, at PATH.py:NAME
    builtin.py         arithmetic, and code in the sandbox
    mcp.py             the tools of an MCP server
    toolset.py         all tools of a generator, and the calls of an episode
    environment.py     the environment `tools`

Invariant: whatever a call comes to (an error, no answer, an unknown name) is a message that the
policy reads, and a number in the episode's metrics; it never costs an episode.
"""
