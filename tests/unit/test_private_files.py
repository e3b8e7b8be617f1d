"""Files of secrets: their owner alone can read them, whatever was there before."""

from pathlib import Path

import pytest

from streamrl.cli.launchers.ray.supervisor import Supervisor
from streamrl.curve import make_keys
from streamrl.durable_files import open_private, write_file
from streamrl.errors import ConfigError


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """A file that others can read, where a secret is to be written."""
    path = tmp_path / "secret"
    path.write_text("of others")
    path.chmod(0o644)
    return path


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_secret_in_the_place_of_a_file_that_others_can_read_is_not_theirs(others: Path):
    with others.open() as known:
        write_file(others, b"mine", is_private=True)
        assert known.read() == "of others"
    assert (others.read_bytes(), mode_of(others)) == (b"mine", 0o600)


def test_what_a_node_of_ray_is_sent_is_private_too(others: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("streamrl.cli.launchers.ray.supervisor._start_watcher", lambda mark: -1)
    supervisor = Supervisor()
    supervisor._directory = others.parent / "files"
    assert supervisor._write(b"", {str(others): b"mine"}, ()) == ""
    assert (others.read_bytes(), mode_of(others)) == (b"mine", 0o600)


def test_a_link_that_somebody_has_put_there_is_replaced_and_not_followed(others: Path):
    link = others.with_name("link")
    link.symlink_to(others)
    with open(link, "wb", opener=open_private) as file:
        file.write(b"mine")
    assert (others.read_text(), link.is_symlink(), mode_of(link)) == ("of others", False, 0o600)


def test_keys_are_private_and_never_written_over(tmp_path: Path):
    make_keys(tmp_path / "keys")
    assert {mode_of(path) for path in (tmp_path / "keys").iterdir()} == {0o600}
    before = (tmp_path / "keys" / "server.secret").read_bytes()
    with pytest.raises(ConfigError, match=r"server\.public exists; it is not written over"):
        make_keys(tmp_path / "keys")
    assert (tmp_path / "keys" / "server.secret").read_bytes() == before
