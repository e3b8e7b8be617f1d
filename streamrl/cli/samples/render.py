"""A sample on a terminal."""

from collections.abc import Iterator

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from streamrl.samples.record import POLICY, Sample, printable


def rendered(sample: Sample, longest: int | None = None) -> Panel:
    """Its facts, its prompt and its messages; texts longer than `longest` are cut."""
    title = Text(f"step {sample.step}, prompt {sample.prompt_index}, reward {sample.reward:.4g}")
    parts = [
        Text(", ".join(facts(sample)), style="italic"),
        Text(_shown(sample.prompt, longest), style="dim"),
    ]
    for message in sample.messages:
        style = "" if message.role == POLICY else "cyan"
        parts.append(Text(_shown(message.content, longest), style=style))
    return Panel(Group(*parts), title=title, title_align="left")


def facts(sample: Sample) -> Iterator[str]:
    """What is known of it, a few words each."""
    versions = {sample.version, sample.newest_version}
    yield f"version {'-'.join(map(str, sorted(versions)))}"
    if sample.staleness is not None:
        yield f"staleness {sample.staleness}"
    if (weights := sample.importance_weights) is not None:
        yield f"importance weight {weights.mean:.3g} ({weights.min:.3g} to {weights.max:.3g})"
    yield f"{sample.num_response_tokens} tokens, {sample.finish_reason}"
    yield printable(sample.environment)
    if sample.data_source:
        yield printable(sample.data_source)
    if sample.answer:
        yield f"answer {_shown(sample.answer, 60)}"


def _shown(text: str, longest: int | None) -> str:
    """Without control characters; the first and the last part of one that is too long."""
    if longest is not None and len(text) > longest:
        half = longest // 2
        text = f"{text[:half]} [...] {text[-half:]}"
    return printable(text)
