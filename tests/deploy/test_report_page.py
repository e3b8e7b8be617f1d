"""`report.html` in a real Chromium: no error, nothing loaded, charts with their points, whole
labels, no overflow on a phone, light and dark, and text as text."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from streamrl.cli.main import main
from streamrl.config import RunConfig, load_config, to_yaml
from streamrl.samples.files import text_of, write_validation
from streamrl.samples.record import ImportanceWeights, Message
from streamrl.tracking.jsonl import read_metrics
from tests.deploy.browser import Tab, opened
from tests.records import make_sample

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
NUM_STEPS = 100_000
MAX_PAGE_BYTES = 3 * 2**20
# A second on a machine that does nothing else.
OPENS_S = 30.0
OVERVIEW = [
    "Reward",
    "Response length in tokens",
    "Staleness in versions",
    "Effective sample size",
    "Entropy",
    "Time of a step in seconds",
    "Share of the time without work",
]
HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "<!-- <script> \u2028 ]]> &lt;b&gt; ${window.hacked = 3} \x1b[31m"
)
# What the page makes of the control characters.
SHOWN = HOSTILE.replace("\u2028", "\\u2028").replace("\x1b", "\\x1b")
FIGURES = "document.querySelectorAll('figure')"
CHECKS = (Path(__file__).parent / "page_checks.js").read_text()


def line(step: int, num_steps: int = NUM_STEPS) -> str:
    return json.dumps(
        {
            "step": step,
            "time_s": 1.8e9 + 0.5 * step,
            "reward/mean": step / num_steps,
            f"reward/{HOSTILE}": 0.5,
            "response_length/mean": 12_345.0 + step % 100,
            "response_length/max": 20_000,
            "buffer/staleness_mean": step % 3,
            "buffer/staleness_max": step % 5,
            **{f"buffer/staleness_{b}/num_groups": b == 1 for b in (0, 1)},
            "mismatch/rollout_is_eff_sample_size": None if step % 2 == 0 else 0.9,
            "mismatch/staleness_0/kl": 1e-6 * step,
            "actor/entropy": 0.5,
            "generator/generator-0/tokens_per_s": 1000.0 + step % 7,
            "generator/idle_frac": 0.5,
            "learner/wait_frac": 0.25,
            "learner/wait_s": 0.125,
            "learner/train_s": 0.25,
            "learner/skipped_update": step == 77_777,
            "weights/load_s": 0.125,
        }
    )


def make_run(folder: Path, num_steps: int) -> RunConfig:
    config = load_config(QUICKSTART, [f"run.folder={folder}", "run.name=run"], {}).config
    run = config.run.path
    (run / "logs").mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(config))
    lines = (line(step, num_steps) + "\n" for step in range(1, num_steps + 1))
    (run / "metrics.jsonl").write_text("".join(lines))
    return config


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of 100,000 steps with a hostile model, as the command writes it."""
    folder = tmp_path_factory.mktemp("page")
    run = make_run(folder, NUM_STEPS).run.path
    (run / "validation.jsonl").write_text('{"step": 0, "validation/mean@1": 0.25}\n')
    sentence = f"generator-0 was killed by SIGKILL {HOSTILE}".replace("\u2028", "")
    (run / "logs/generator-0.log").write_text(f"2027-01-15 12:00:00 launcher: {sentence}\n")
    sample = make_sample(
        step=3,
        environment=HOSTILE,
        prompt=HOSTILE,
        messages=(
            Message("assistant", f"ab{HOSTILE}", (1, 1, len(HOSTILE)), (0.5, 1.0, 2.0)),
            Message("environment", HOSTILE),
        ),
        reward=1.0,
        importance_weights=ImportanceWeights(1.1, 0.5, 2.0),
    )
    (run / "samples.jsonl").write_text(text_of([sample]))
    write_validation(run, 0, [sample], keep=2)
    assert main(["report", str(run), "--html"]) == 0
    return run / "report.html"


def in_browser(
    page: Path,
    tmp_path: Path,
    check: Callable[[Tab], Awaitable[None]],
    size: tuple[int, int] = (1280, 1000),
) -> Tab:
    async def run() -> Tab:
        width, height = size
        async with opened(
            page, tmp_path / "browser", width=width, height=height, script=CHECKS
        ) as tab:
            await check(tab)
            if folder := os.environ.get("STREAMRL_PICTURES"):
                await tab.picture(Path(folder) / f"{check.__name__}.png")
            return tab

    tab = asyncio.run(run())
    assert tab.errors() == []
    assert tab.requests() == [page.as_uri()], "it loads nothing"
    return tab


async def drawn(tab: Tab) -> None:
    """Waits until each chart that is not folded is drawn."""
    await tab.until("charts.every((c) => c.plot || c.host.closest('details:not([open])'))")


async def unfolded(tab: Tab) -> None:
    await tab.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    await tab.until("charts.every((c) => c.plot)")


def test_a_run_of_100_000_steps_is_a_small_page_that_opens_quickly(page, tmp_path):
    assert page.stat().st_size < MAX_PAGE_BYTES
    assert len(read_metrics(page.parent / "metrics.jsonl")) == NUM_STEPS

    async def speed(tab: Tab) -> None:
        await drawn(tab)
        assert await tab.evaluate("performance.now()") < 1000 * OPENS_S
        assert "100,000" in await tab.evaluate("[...labels]")
        assert "100,000 of 550 steps" in await tab.evaluate("document.body.innerText")

    in_browser(page, tmp_path, speed)


def test_the_overview_comes_first_and_every_metric_has_a_chart(page, tmp_path):
    async def charts(tab: Tab) -> None:
        await drawn(tab)
        titles = f"[...{FIGURES}].map((f) => f.querySelector('figcaption').firstChild.textContent)"
        shown = await tab.evaluate(titles)
        assert shown[:7] == OVERVIEW
        assert {"KL by staleness", "Groups of a step by staleness"} < set(shown)
        assert await tab.evaluate("charts.filter((c) => c.plot).length") == 7, "others are folded"
        await unfolded(tab)
        series = set(await tab.evaluate("charts.flatMap((c) => Object.keys(c.spec.series))"))
        known = {name for name in json.loads(line(1)) if "/" in name}
        assert series == known | {"validation/mean@1"}
        assert await tab.evaluate("notDrawn()") == []
        faults = "[...document.querySelectorAll('.events .fault')].map((e) => e.textContent)"
        assert len(await tab.evaluate(faults)) == 1

    in_browser(page, tmp_path, charts)


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_clipped_or_too_wide_in_light_and_dark(page, tmp_path, width):
    async def looks(tab: Tab) -> None:
        grounds = set()
        for scheme in ("light", "dark"):
            await tab.show_as(width, 900, scheme)
            await unfolded(tab)
            await tab.until(f"charts.every((c) => c.plot.width < {width})")
            assert await tab.evaluate("tooWide()") == []
            # Drawn anew some frames after the change.
            await tab.until("notDrawn().length === 0")
            assert await tab.evaluate("contrast()") >= 4.5
            grounds.add(await tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert await tab.evaluate("clipped") == []
        assert len(grounds) == 2
        assert await tab.evaluate("holes()") == []

    in_browser(page, tmp_path, looks)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_run_of_one_step_or_none_has_a_page(tmp_path, num_steps):
    run = make_run(tmp_path, num_steps).run.path
    assert main(["report", str(run), "--html"]) == 0

    async def short(tab: Tab) -> None:
        await unfolded(tab)
        assert await tab.evaluate("notDrawn()") == []
        assert await tab.evaluate("clipped") == []
        assert await tab.evaluate("charts.length > 7") is bool(num_steps)
        text = await tab.evaluate("document.body.innerText")
        assert f"{num_steps} of 550 steps" in text
        assert "exact_match" in text

    in_browser(run / "report.html", tmp_path, short)


def test_what_the_model_wrote_is_text(page, tmp_path):
    async def texts(tab: Tab) -> None:
        assert await tab.evaluate("window.hacked") is None
        assert await tab.evaluate("document.querySelectorAll('img, main script').length") == 0
        shown = await tab.evaluate("[...document.querySelectorAll('pre')].map(p => p.textContent)")
        assert shown == 2 * [SHOWN, f"ab{SHOWN}", SHOWN]
        tokens = "[...document.querySelector('pre.assistant').children]"
        colors = f"{tokens}.map(s => [s.title, s.style.background])"
        below, one, above = await tab.evaluate(colors)
        assert (below[0], one[0]) == ("importance weight 0.5", "importance weight 1")
        assert one[1] == "transparent"
        assert len({below[1], one[1], above[1]}) == 3

    in_browser(page, tmp_path, texts)


def test_values_are_shown_under_the_pointer_and_a_range_is_zoomed_in_all_charts(page, tmp_path):
    async def pointer(tab: Tab) -> None:
        await drawn(tab)
        over = f"{FIGURES}[0].querySelector('.u-over')"
        await tab.evaluate(f"{over}.scrollIntoView({{block: 'center'}})")
        box = await tab.evaluate(
            f"(b => [b.x, b.y, b.width, b.height])({over}.getBoundingClientRect())"
        )
        x, y, width, height = box
        middle = (x + width / 2, y + height / 2)
        legends = f"[...{FIGURES}].slice(0, 2).map((f) => f.querySelector('.u-legend').innerText)"
        assert all("100,000" in text for text in await tab.evaluate(legends)), "the newest values"
        await tab.mouse("Moved", *middle)
        await tab.until(f"{legends}.every((text) => !text.includes('100,000'))")
        scales = "charts.slice(0, 2).map((c) => [c.plot.scales.x.min, c.plot.scales.x.max])"
        whole = await tab.evaluate(scales)
        await tab.mouse("Pressed", *middle)
        await tab.mouse("Moved", middle[0] + 80, middle[1])
        await tab.mouse("Released", middle[0] + 80, middle[1])
        await tab.until(f"{scales}.every(([from, to]) => from > 1000 && to < 99000)")
        twice = f"{over}.dispatchEvent(new MouseEvent('dblclick', {{bubbles: true}}))"
        await tab.evaluate(twice)
        await tab.until(
            f"JSON.stringify({scales}) === '{json.dumps(whole, separators=(',', ':'))}'"
        )

    in_browser(page, tmp_path, pointer)


def test_lines_are_switched_off_and_smoothed_and_the_axis_is_time(page, tmp_path):
    async def controls(tab: Tab) -> None:
        await drawn(tab)
        figure = f"[...{FIGURES}].find((f) => f.textContent.startsWith('Staleness in versions'))"
        shown = f"charts.find((c) => {figure}.contains(c.host)).plot.series.filter((s) => s.show)"
        before = await tab.evaluate(f"{shown}.length")
        await tab.evaluate(f"{figure}.querySelectorAll('.u-series th')[1].click()")
        assert await tab.evaluate(f"{shown}.length") == before - 3, "with the edges of its band"
        choose = "(s => { s.value = '%s'; s.onchange(); })(document.querySelectorAll('select')[%d])"
        await tab.evaluate(choose % ("time", 0))
        assert "10 h" in await tab.evaluate("[...labels]")
        await tab.evaluate(choose % ("0.95", 1))
        assert await tab.evaluate("charts[2].plot.series.length") == 3, "the bands are gone"

    in_browser(page, tmp_path, controls)
