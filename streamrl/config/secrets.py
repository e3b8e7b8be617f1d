"""The password in a URL: taken out when it is read, put back for the connection alone.

    STREAMRL_REDIS_PASSWORD        the environment, which daemons inherit from a launch
    buffer.password_file           a file, such as a mounted secret
    redis://user:password@host/0   a URL that a person gives

Invariant: what is printed, logged, written, or given to another process as an argument holds
HIDDEN in the password's place. `hand_down` is what every command does with the one it was given.
"""

import argparse
import os
import re
import sys
from pathlib import Path
from urllib.parse import quote, unquote

from streamrl.errors import ConfigError, read_text

REDIS_PASSWORD = "STREAMRL_REDIS_PASSWORD"
HIDDEN = "***"


def hide_password(text: str) -> tuple[str, str]:
    """The URL, or a text that ends with one, without its password; and the password, or "".

    >>> hide_password("redis://user:p%40ss@host/0")
    ('redis://user:***@host/0', 'p@ss')
    """
    before, found, url = text.partition("://")
    rest, question, options = url.partition("?")
    user_info, _, place = rest.rpartition("@")
    user, _, password = user_info.partition(":")
    if not found or password in ("", HIDDEN):
        return text, ""
    return f"{before}://{user}:{HIDDEN}@{place}{question}{options}", unquote(password)


def with_password(url: str, password: str) -> str:
    """The URL with this password and its own user."""
    scheme, _, rest = url.partition("://")
    user_info, _, place = rest.rpartition("@")
    user = user_info.partition(":")[0]
    return f"{scheme}://{user}:{quote(password, safe='')}@{place}"


def without_secrets(sentence: str) -> str:
    """A message about a text that may hold a password in a form that no URL has.

    >>> without_secrets("was 'redis:/:pa:ss@host'")
    "was 'redis:***@host'"
    """
    masked = re.sub(r":[^'\"\n]*@", f":{HIDDEN}@", sentence)
    return re.sub(r"(password=)[^&\s'\"]+", rf"\1{HIDDEN}", masked)


def read_password(file: Path | None) -> str:
    """The password in the environment, otherwise in the file; "" if there is neither. Raises
    ConfigError if the file cannot be read or is empty."""
    if password := os.environ.get(REDIS_PASSWORD):
        return password
    if file is None:
        return ""
    password = read_text(file, "buffer.password_file").rstrip("\r\n")
    if not password:
        raise ConfigError(f"buffer.password_file: {file} is empty")
    return password


def key_of(setting: str, variable: str | None) -> str | None:
    """The value of the environment variable that the setting names; None if it names none. Raises
    ConfigError if the variable is not set or is empty."""
    if variable is None:
        return None
    if key := os.environ.get(variable):
        return key
    raise ConfigError(f"{setting}: there is no {variable} in the environment, or it is empty")


def hand_down(arguments: argparse.Namespace, password: str) -> None:
    """Pass the password to the processes that this one starts through the environment only: their
    arguments are made from these, and trackers record `sys.argv`."""
    if not password:
        return
    os.environ[REDIS_PASSWORD] = password
    arguments.overrides = [hide_password(text)[0] for text in arguments.overrides]
    sys.argv[:] = [hide_password(text)[0] for text in sys.argv]
