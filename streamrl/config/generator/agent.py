"""`generator.agent`: who plays the episodes of environment `agent`, and where its API is served."""

import ipaddress
import os
import shlex
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from streamrl.config.addresses import LARGEST_PORT
from streamrl.config.numbers import Positive, Seconds
from streamrl.config.section import Section
from streamrl.errors import ConfigError
from streamrl.user_code import check_user_code


def _split(command: Any) -> Any:
    return shlex.split(command) if isinstance(command, str) else command


class AgentSettings(Section):
    """Agents that call the policy through the API of OpenAI or Anthropic."""

    function: str | None = None
    """PATH.py:FUNCTION(task, base_url, api_key), called once for each episode in the generator's
    process; it returns the reward, or nothing."""
    command: Annotated[tuple[str, ...] | None, BeforeValidator(_split)] = None
    """A command line, started once for each episode. {prompt}, or any column of the prompt's row
    in braces, stands for its text. Without `function` and `command`, agents ask for their tasks."""
    max_agents: Positive = 64
    """Functions or commands that run at a time; the episodes of others wait."""
    host: str = "127.0.0.1"
    """Address at which the API listens; one that other machines reach needs a token."""
    port: Annotated[int, Field(ge=0, le=LARGEST_PORT)] = 0
    """Port of the first generator of a machine; the others take the next ones. 0: any free one."""
    token_variable: str | None = None
    """Environment variable that holds the token with which an agent asks for a task."""
    silence_s: Seconds = 600.0
    """An agent that asks for nothing for so long has disappeared: its group fails."""
    request_sampling: Literal["override", "refuse"] = "override"
    """What becomes of a request with another temperature, top_p or top_k than the run's: it is
    sampled with the run's, or refused."""
    max_request_bytes: Positive = 16 * 2**20
    """Largest body of a request."""

    @field_validator("function")
    @classmethod
    def _is_user_code(cls, function: str | None) -> str | None:
        if function is not None:
            check_user_code(function)
        return function

    @field_validator("host")
    @classmethod
    def _is_address(cls, host: str) -> str:
        try:
            ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        except ValueError:
            raise ValueError(f"was {host!r}; it must be an IP address or localhost") from None
        return host

    @model_validator(mode="after")
    def _is_one_agent(self) -> "AgentSettings":
        if self.function is not None and self.command is not None:
            raise ValueError("function and command are two agents; leave one of them out")
        if self.command is not None and not self.command:
            raise ValueError("command: is empty; it must name a program")
        is_local = self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        if not is_local and self.token_variable is None:
            raise ValueError(
                f"host: was {self.host!r}, which other machines can reach; that needs a token: "
                "put one into an environment variable and name it in token_variable"
            )
        return self

    @property
    def token(self) -> str | None:
        """
        Raises:
            ConfigError: the variable is not set, or is empty.
        """
        if self.token_variable is None:
            return None
        if not os.environ.get(self.token_variable):
            raise ConfigError(
                f"generator.agent.token_variable: there is no {self.token_variable} in the "
                "environment"
            )
        return os.environ[self.token_variable]
