"""The installer asks the indexes that pip is configured for, in pip's order of precedence."""

import importlib.util
from pathlib import Path

SPEC = importlib.util.spec_from_file_location(
    "install", Path(__file__).parents[2] / "deploy" / "install.py"
)
assert SPEC is not None
assert SPEC.loader is not None
install = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(install)

# What `pip config list` prints: sorted, the environment first, values as Python writes them.
LISTING = """\
:env:.find-links='/wheels'
:env:.default-timeout='180'
global.cert='/etc/ssl/ca.crt'
global.extra-index-url='\\nhttps://one/simple\\nhttps://two/simple?a=b'
global.find-links='/elsewhere'
global.index-url='https://all'
install.index-url='https://mirror/simple'
"""


def test_uv_is_told_what_pip_would_do():
    assert list(install.flags(install.settings(LISTING))) == [
        "--index-strategy=unsafe-best-match",
        "--index-url=https://mirror/simple",
        "--extra-index-url=https://one/simple",
        "--extra-index-url=https://two/simple?a=b",
        "--find-links=/wheels",
    ]


def test_without_settings_there_is_the_one_index_of_uv():
    assert list(install.flags(install.settings(""))) == ["--index-strategy=unsafe-best-match"]
