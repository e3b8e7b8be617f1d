"""What a chat template puts between a completion and the next one.

The template renders a short conversation, whose assistant turn is a mark, with the new messages
behind it. What follows the mark is the reply: the end of the assistant's turn, the messages, and
the opening of the next turn. The completion is not part of it, so it is never tokenized again.

Invariant: the reply does not depend on what was said before. A template that renders a message
differently once others follow it (Qwen3 leaves out earlier thinking) renders a conversation
otherwise than it was sampled; a reply follows the tokens as they were sampled.
"""

from collections.abc import Callable, Sequence

from streamrl.errors import ConfigError
from streamrl.interfaces import Message

_MARK = "streamrlcompletion"
_PROBE = "streamrlanswer"
_ASKED: Message = {"role": "user", "content": "question"}
_ANSWERED: Message = {"role": "assistant", "content": _MARK}

Render = Callable[[Sequence[Message], bool], str]
"""Messages, and whether the opening of the next turn follows, to text."""


def reply_text(render: Render, messages: Sequence[Message]) -> str:
    """What follows a completion that has not ended its turn.

    Raises:
        ConfigError: the template does not render the content of an assistant.
    """
    _, mark, reply = render([_ASKED, _ANSWERED, *messages], True).partition(_MARK)
    if not mark:
        raise ConfigError(
            "data.chat_template: it does not render an assistant's content, so an environment "
            "cannot answer with messages; name a template that does"
        )
    return reply


def end_of_turn_text(render: Render) -> str:
    """What the template puts behind an assistant's content."""
    return render([_ASKED, _ANSWERED], False).partition(_MARK)[2]


def require_replies(render: Render) -> None:
    """
    Raises:
        ConfigError: a user's message behind a completion is not rendered.
    """
    if _PROBE not in reply_text(render, [{"role": "user", "content": _PROBE}]):
        raise ConfigError(
            "data.chat_template: it does not render a user's message behind an assistant's, so an "
            "environment cannot answer with messages; name a template that does"
        )
