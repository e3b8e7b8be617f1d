"""What the README and `docs/` contain: fenced blocks, their files and their commands."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "configs").rglob("README.md")),
)
_FENCED = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block; `title` is the name of the file that it shows, or ""."""

    page: str
    language: str
    title: str
    text: str


def blocks(*pages: str) -> list[Block]:
    """All fenced blocks of these pages, named from the root, or of every page."""
    return [
        Block(str(path.relative_to(ROOT)), language, title, text)
        for path in PAGES
        if not pages or str(path.relative_to(ROOT)) in pages
        for language, title, text in _FENCED.findall(path.read_text(encoding="utf-8"))
    ]


def commands(*pages: str) -> list[str]:
    """Every command of the `sh` blocks, once, in the order of the pages."""
    lines = [line for block in blocks(*pages) if block.language == "sh" for line in _lines(block)]
    return list(dict.fromkeys(lines))


def write_files(folder: Path, *pages: str) -> list[Path]:
    """The files that these pages show, written into the folder as they stand there."""
    named = [block for block in blocks(*pages) if block.title]
    for block in named:
        (folder / block.title).write_text(block.text, encoding="utf-8")
    return [folder / block.title for block in named]


def _lines(block: Block) -> list[str]:
    return block.text.replace("\\\n", " ").strip().splitlines()
