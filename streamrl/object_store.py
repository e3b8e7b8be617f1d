"""A folder in an object store, through fsspec: s3://, gs://, hf:// and file://.

Invariant: the library of a store is imported when the first folder in such a store is opened. The
different errors of the libraries become one kind, which names the setting of the folder.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from streamrl.errors import ConfigError, TransportError
from streamrl.extras import not_installed

MODULES = {"s3": "s3fs", "gs": "gcsfs"}
"""The package that each scheme needs in addition to those always installed."""


class StoreFolder:
    """The folder `url`, which the setting names. Each call waits for the store.

    Raises:
        ConfigError: the package for this store is not installed.
        TransportError: from each call, if the store is unreachable or refuses; see `failure`.
    """

    failure: ClassVar[type[TransportError]] = TransportError

    def __init__(self, setting: str, url: str) -> None:
        # Imported here: its libraries take a while to load, and few runs have a store.
        from fsspec.core import url_to_fs

        self.url, self._setting = url, setting
        scheme = url.partition("://")[0]
        self._is_folder, self._is_on_hub = scheme == "file", scheme == "hf"
        options = {"auto_mkdir": True} if self._is_folder else {}
        try:
            self._fs, self._path = url_to_fs(url, use_listings_cache=False, **options)
        except ImportError as error:
            module = MODULES.get(scheme, "fsspec")
            raise not_installed(f"{setting}: {scheme}://", module, str(error)) from error

    def put(self, file: Path, name: str, *, is_read: bool = False) -> None:
        """Upload the file under a name that no reader knows yet; with `is_read`, readers know the
        name, and the object is replaced as a whole. Raises FileNotFoundError if the local file does
        not exist."""
        file.stat()
        self._write(name, file, is_read=is_read)

    def replace(self, name: str, content: bytes) -> None:
        """Replace the object; readers get the old or the new content as a whole."""
        self._write(name, content, is_read=True)

    def get(self, name: str, file: Path) -> None:
        self._fs.invalidate_cache()
        try:
            self._do(lambda: self._fs.get_file(self._place(name), str(file)))
        except FileNotFoundError as error:
            raise self.failure(f"{self._setting} {self.url}: {name} is gone") from error

    def read(self, name: str) -> bytes | None:
        """The newest content; None if there is none."""
        self._fs.invalidate_cache()
        try:
            content: bytes = self._do(lambda: self._fs.cat_file(self._place(name)))
        except FileNotFoundError:
            return None
        return content

    def names(self) -> set[str]:
        """The names of all objects in it, at any depth."""
        self._fs.invalidate_cache()
        try:
            found = self._do(lambda: self._fs.find(self._path))
        except FileNotFoundError:
            return set()
        return {str(place).removeprefix(self._path).lstrip("/") for place in found}

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._do(lambda: self._fs.rm_file(self._place(name)))
        if self._is_folder:
            # In an object store, folders exist only as parts of names.
            with contextlib.suppress(OSError):
                for folder in Path(name).parents[:-1]:
                    Path(self._path, folder).rmdir()

    def move_to(self, url: str) -> None:
        """Move everything to another folder of the same store, which must not exist yet."""
        target = self._fs._strip_protocol(url)
        if self._is_folder:
            self._do(lambda: self._fs.mv(self._path, target, recursive=True))
            return
        # s3fs would also try to move the folder itself as an object, which does not exist in S3.
        for name in sorted(self.names()):
            self._do(partial(self._fs.mv, self._place(name), f"{target}/{name}"))

    def require_writable(self) -> None:
        """Write and remove a small object; ConfigError if that fails."""
        try:
            self.replace(".writable", b"")
            self.remove(".writable")
        except TransportError as error:
            raise ConfigError(f"{error}: it has to be writable from here") from error

    def _write(self, name: str, content: Path | bytes, *, is_read: bool) -> None:
        """Write as a whole: an object store does so by itself, in a folder the file is renamed."""
        place = self._place(name)
        first = f"{place}.unfinished" if is_read and self._is_folder else place
        try:
            self._do(lambda: self._upload(content, first))
            if first != place:
                self._do(lambda: self._fs.mv(first, place))
        except FileNotFoundError as error:
            # For example the bucket does not exist.
            raise self.failure(f"{self._setting} {self.url}: {error}") from error

    def _upload(self, content: Path | bytes, place: str) -> None:
        if self._is_on_hub:
            # The hub's file system would first write a copy to disk, and leave it after a failure.
            from huggingface_hub import batch_bucket_files

            _, user, bucket, path = place.split("/", 3)
            batch_bucket_files(f"{user}/{bucket}", add=[(content, path)])
        elif isinstance(content, bytes):
            self._fs.pipe_file(place, content)
        else:
            self._fs.put_file(str(content), place)

    def _place(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _do(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except FileNotFoundError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise self.failure(f"{self._setting} {self.url}: {reason}") from error
