"""`report.html` in a real Chromium: no error, nothing loaded, charts that answer, text as text."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from streamrl.cli.main import main
from streamrl.config import load_config, to_yaml
from streamrl.samples.files import text_of, write_validation
from streamrl.samples.record import ImportanceWeights, Message, Sample
from streamrl.tracking.jsonl import read_metrics
from tests.deploy.browser import Tab, opened

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
NUM_STEPS = 100_000
MAX_PAGE_BYTES = 3 * 2**20
HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "<!-- <script> \u2028 ]]> &lt;b&gt; ${window.hacked = 3} \x1b[31m"
)
# What the page makes of the control characters.
SHOWN = HOSTILE.replace("\u2028", "\\u2028").replace("\x1b", "\\x1b")
FIGURES = "document.querySelectorAll('figure:has(.legend)')"


def line(step: int) -> str:
    return json.dumps(
        {
            "step": step,
            "time_s": 1.8e9 + 0.5 * step,
            "reward/mean": step / NUM_STEPS,
            f"reward/{HOSTILE}": 0.5,
            "buffer/staleness_mean": step % 3,
            "buffer/staleness_max": step % 5,
            **{f"buffer/staleness_{b}/num_groups": b == 1 for b in (0, 1)},
            "mismatch/rollout_is_eff_sample_size": None if step % 2 else 0.9,
            "mismatch/staleness_0/kl": 1e-6 * step,
            "generator/generator-0/tokens_per_s": 1000.0 + step % 7,
            "learner/wait_frac": 0.25,
            "learner/skipped_update": step == 77_777,
            "weights/load_s": 0.125,
        }
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of 100,000 steps with a hostile model, as the command writes it."""
    folder = tmp_path_factory.mktemp("page")
    config = load_config(QUICKSTART, [f"run.folder={folder}", "run.name=run"], {}).config
    run = config.run.path
    (run / "logs").mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(config))
    (run / "metrics.jsonl").write_text("\n".join(line(s) for s in range(1, NUM_STEPS + 1)) + "\n")
    (run / "validation.jsonl").write_text('{"step": 0, "validation/mean@4": 0.25}\n')
    sentence = f"generator-0 was killed by SIGKILL {HOSTILE}".replace("\u2028", "")
    (run / "logs/generator-0.log").write_text(f"2027-01-15 12:00:00 launcher: {sentence}\n")
    sample = Sample(
        step=3,
        prompt_index=1,
        sibling=0,
        environment=HOSTILE,
        prompt=HOSTILE,
        messages=(
            Message("assistant", f"ab{HOSTILE}", (1, 1, len(HOSTILE)), (0.5, 1.0, 2.0)),
            Message("environment", HOSTILE),
        ),
        reward=1.0,
        finish_reason="stop",
        num_response_tokens=3,
        version=0,
        newest_version=0,
        importance_weights=ImportanceWeights(1.1, 0.5, 2.0),
    )
    (run / "samples.jsonl").write_text(text_of([sample]))
    write_validation(run, 0, [sample], keep=2)
    assert main(["report", str(run), "--html"]) == 0
    return run / "report.html"


def in_browser(page: Path, tmp_path: Path, check) -> Tab:
    async def run() -> Tab:
        async with opened(page, tmp_path / "browser", width=1400, height=1000) as tab:
            await check(tab)
            if folder := os.environ.get("STREAMRL_PICTURES"):
                await tab.picture(Path(folder) / f"{check.__name__}.png")
            return tab

    tab = asyncio.run(run())
    assert tab.errors() == []
    assert tab.requests() == [page.as_uri()], "it loads nothing"
    return tab


def test_a_run_of_100_000_steps_is_a_small_page(page):
    assert page.stat().st_size < MAX_PAGE_BYTES
    assert len(read_metrics(page.parent / "metrics.jsonl")) == NUM_STEPS


def test_every_chart_has_its_lines(page, tmp_path):
    async def charts(tab: Tab) -> None:
        titles = await tab.evaluate(
            f"[...{FIGURES}].map(f => f.querySelector('figcaption').textContent)"
        )
        assert {"Training reward", "Staleness in versions", "KL by staleness"} <= set(titles)
        empty = f"[...{FIGURES}].filter(f => !f.querySelector('path[stroke]').getAttribute('d'))"
        alone = await tab.evaluate(f"{empty}.map(f => f.querySelector('figcaption').textContent)")
        assert alone == []
        assert await tab.evaluate("document.querySelectorAll('circle.fault').length") == 1
        before = await tab.evaluate(f"{FIGURES}.length")
        await tab.evaluate("document.querySelector('details').open = true")
        await tab.until(f"{FIGURES}.length > {before}")

    in_browser(page, tmp_path, charts)


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


def test_values_are_shown_under_the_pointer_and_a_range_is_zoomed(page, tmp_path):
    async def pointer(tab: Tab) -> None:
        svg = f"{FIGURES}[0].querySelector('svg')"
        await tab.evaluate(f"{svg}.scrollIntoView({{block: 'center'}})")
        box = await tab.evaluate(
            f"(b => [b.x, b.y, b.width, b.height])({svg}.getBoundingClientRect())"
        )
        x, y, width, height = box
        middle = (x + width / 2, y + height / 2)
        await tab.mouse("Moved", *middle)
        await tab.until("!document.getElementById('tip').hidden")
        tip = await tab.evaluate("document.getElementById('tip').textContent")
        assert tip.startswith("step ")
        assert "mean: 0." in tip
        labels = f"[...{svg}.querySelectorAll('text')].map(t => t.textContent).join()"
        whole = await tab.evaluate(labels)
        await tab.mouse("Pressed", *middle)
        await tab.mouse("Moved", middle[0] + 80, middle[1])
        await tab.mouse("Released", middle[0] + 80, middle[1])
        await tab.until(f"{labels} !== {json.dumps(whole)}")
        assert await tab.evaluate("view.range[0] > 1000 && view.range[1] < 99000")
        await tab.evaluate("[...document.querySelectorAll('header button')][0].click()")
        await tab.until(f"{labels} === {json.dumps(whole)}")

    in_browser(page, tmp_path, pointer)


def test_lines_are_switched_off_and_the_axis_is_time_and_the_page_is_dark(page, tmp_path):
    async def controls(tab: Tab) -> None:
        figure = f"[...{FIGURES}].find(f => f.textContent.startsWith('Staleness in versions'))"
        lines = f"{figure}.querySelectorAll('path[stroke]').length"
        assert await tab.evaluate(lines) == 2
        await tab.evaluate(f"{figure}.querySelector('.legend button').click()")
        assert await tab.evaluate(lines) == 1
        choose = "(s => { s.value = '%s'; s.onchange(); })(document.querySelectorAll('select')[%d])"
        await tab.evaluate(choose % ("time", 0))
        assert "h" in await tab.evaluate(f"{figure}.querySelector('svg').textContent")
        await tab.evaluate(choose % ("0.95", 1))
        color = "getComputedStyle(document.body).backgroundColor"
        light = await tab.evaluate(color)
        dark = [{"name": "prefers-color-scheme", "value": "dark"}]
        await tab.call("Emulation.setEmulatedMedia", features=dark)
        assert await tab.evaluate(color) != light

    in_browser(page, tmp_path, controls)
