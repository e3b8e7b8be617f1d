"""What a request may say about sampling: less tokens, and nothing else.

What is recorded with a token is its log-probability under the distribution that it was sampled
from, and the learner computes its own at `generator.temperature`: a completion of another
temperature would be off-policy from the first step on.
"""

import logging
from typing import Literal

from msgspec import structs

from actors.gateway.apis.requests import Request, RequestError
from streamrl.types import SamplingParams

log = logging.getLogger(__name__)


class RequestSampling:
    """Of one generator; every kind of request that is overridden is named once in its log."""

    def __init__(self, on_other: Literal["override", "refuse"]) -> None:
        self._on_other = on_other
        self._named: frozenset[str] = frozenset()

    def of(self, request: Request, run: SamplingParams) -> SamplingParams:
        """How the request is sampled.

        Raises:
            RequestError: it asks for another distribution, and that is refused.
        """
        for name, asked in request.sampling.items():
            if asked is not None and asked != getattr(run, name):
                self._on_another(name, asked, getattr(run, name))
        asked_tokens = (
            run.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
        )
        if asked_tokens < 1:
            raise RequestError(f"max_tokens: was {asked_tokens}; it must be 1 or more")
        return structs.replace(run, max_new_tokens=min(asked_tokens, run.max_new_tokens))

    def _on_another(self, name: str, asked: float, own: float) -> None:
        if self._on_other == "refuse":
            raise RequestError(
                f"{name}: was {asked:g}, and generator.{name} is {own:g}; leave it out, or set "
                "generator.agent.request_sampling to override"
            )
        if name not in self._named:
            self._named |= {name}
            log.warning(
                "an agent asks for %s %g; all are sampled with generator.%s, which is %g",
                *(name, asked, name, own),
            )
