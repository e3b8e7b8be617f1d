"""Which rows fit into `data.max_prompt_length`, found before the first prompt is sampled.

Invariant: the result depends only on the rows, the settings and the tokenizer, so every generator
of a run has the same stream. For files it is cached in the run's folder under a name that changes
with them.
"""

import hashlib
import io
import json
import logging
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from actors.prompts.rows import PromptRows
from actors.rendering.renderer import ChatRenderer
from streamrl.config import RunConfig
from streamrl.data_files import files_of, has_rows
from streamrl.durable_files import write_file
from streamrl.errors import ConfigError
from streamrl.interfaces import Prompt

Value = TypeVar("Value")
log = logging.getLogger(__name__)

_CHUNK = 256
_CHUNKS_A_WORKER = 8


def fitting_rows(
    config: RunConfig, renderer: ChatRenderer, prompts: PromptRows, number: int
) -> NDArray[np.int64]:
    """The numbers of the prompts that fit, ascending; `number` is the set's among the sources.

    Raises:
        ConfigError: none fits.
    """
    cached = _cache_path(config, number)
    if cached is not None and cached.exists():
        kept: NDArray[np.int64] = np.load(cached)
        return kept
    if config.data.filter_workers == 1:
        fits = np.fromiter(map(renderer.fits, prompts), np.bool_)
    else:
        fits = np.concatenate(list(_by_workers(config, prompts)))
    kept = np.flatnonzero(fits)
    if not len(kept):
        raise ConfigError(
            f"data.max_prompt_length: was {config.data.max_prompt_length}; none of the "
            f"{len(fits)} rows of data.source fits"
        )
    log.info("%d of %d rows fit into data.max_prompt_length", len(kept), len(fits))
    if cached is not None:
        _write(cached, kept)
    return kept


def _by_workers(config: RunConfig, prompts: PromptRows) -> Iterator[NDArray[np.bool_]]:
    """Yield results chunk by chunk; each process gets a few chunks at a time. Waits for the
    processes."""
    num_workers = config.data.filter_workers
    chunks = _batches((replace(prompt, row={}) for prompt in prompts), _CHUNK)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, spawn, _start_worker, (config,)) as pool:
        for some in _batches(chunks, num_workers * _CHUNKS_A_WORKER):
            yield from pool.map(_fit, some)


def _batches(values: Iterable[Value], size: int) -> Iterator[tuple[Value, ...]]:
    remaining = iter(values)
    while batch := tuple(islice(remaining, size)):
        yield batch


def _start_worker(config: RunConfig) -> None:
    global _renderer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _renderer = ChatRenderer.from_config(config)


_renderer: ChatRenderer
"""The renderer of a worker process."""


def _fit(prompts: tuple[Prompt, ...]) -> NDArray[np.bool_]:
    return np.array([_renderer.fits(prompt) for prompt in prompts], np.bool_)


def _cache_path(config: RunConfig, number: int) -> Path | None:
    """The path of the cache; None if a source is no file, since its changes could not be
    noticed."""
    sources = config.data.sources
    if not all(has_rows(source.path) and files_of(source.path)[0].is_file() for source in sources):
        return None
    tokenizer, template = Path(config.model.tokenizer_path), config.data.chat_template
    files = [
        *(file for source in sources for file in files_of(source.path)),
        *sorted([*tokenizer.glob("*token*"), *tokenizer.glob("*template*")]),
        *([template] if isinstance(template, Path) else []),
    ]
    states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    others = {"filter_workers", "shuffle", "changed", "first_prompt_index"}
    settings = config.data.model_dump(mode="json", exclude=others)
    facts = json.dumps([settings, str(tokenizer), number, states], sort_keys=True)
    name = hashlib.sha256(facts.encode()).hexdigest()[:16]
    return config.run.path / "cache" / f"fitting-{name}.npy"


def _write(path: Path, kept: NDArray[np.int64]) -> None:
    """Write the cache; if that fails, the rows are examined again next time."""
    content = io.BytesIO()
    np.save(content, kept)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content.getvalue())
    except OSError as error:
        log.warning("cannot keep the rows that fit in %s: %s", path, error)
