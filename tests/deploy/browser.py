"""A page in a real Chromium, driven by its DevTools protocol: what it logs, loads and shows."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.deploy.promtool import require

DEADLINE_S = 120.0
_LISTENED = ("Runtime", "Log", "Network", "Page")


class Tab:
    """One tab; `events` are all that the browser has told of it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []

    async def read(self) -> None:
        """Until the socket is closed: note replies and events."""
        async for message in self._socket:
            content = message.json()
            if "id" in content:
                self._replies.pop(content["id"]).set_result(content)
            else:
                self.events.append(content)

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Waits for the reply, DEADLINE_S at most."""
        self._number += 1
        reply = asyncio.get_running_loop().create_future()
        self._replies[self._number] = reply
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        content = await asyncio.wait_for(reply, DEADLINE_S)
        assert "error" not in content, content
        result: dict[str, Any] = content["result"]
        return result

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        done = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def until(self, expression: str) -> None:
        """Waits until it is true; unblocked by that or the deadline."""
        async with asyncio.timeout(DEADLINE_S):
            while not await self.evaluate(expression):
                await asyncio.sleep(0.05)

    async def mouse(self, kind: str, x: float, y: float) -> None:
        """`kind` is Moved, Pressed or Released."""
        button = "none" if kind == "Moved" else "left"
        await self.call(
            "Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, button=button, clickCount=1
        )

    async def show_as(self, width: int, height: int, scheme: str) -> None:
        """In this size, in a light or a dark scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        wanted = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=wanted)

    async def picture(self, path: Path) -> None:
        done = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(done["data"]))

    def errors(self) -> list[dict[str, Any]]:
        """What its console shows as an error or a warning, and exceptions."""
        return [
            event
            for event in self.events
            if event["method"] == "Runtime.exceptionThrown"
            or (event["method"] == "Log.entryAdded" and _is_bad(event["params"]["entry"]["level"]))
            or (event["method"] == "Runtime.consoleAPICalled" and _is_bad(event["params"]["type"]))
        ]

    def requests(self) -> list[str]:
        """The addresses that it asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]


@asynccontextmanager
async def opened(
    page: Path, folder: Path, *, width: int, height: int, script: str = ""
) -> AsyncIterator[Tab]:
    """The file in a tab of this size, whose first script is this; `folder` is for the browser's own
    files."""
    command = [
        require("chromium", program="chromium"),
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"),
        *("--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank"),
    ]
    none = asyncio.subprocess.DEVNULL
    browser = await asyncio.create_subprocess_exec(
        *command, stdout=none, stderr=none, start_new_session=True
    )
    try:
        port = await _port(folder / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                tabs = [tab for tab in await reply.json() if tab["type"] == "page"]
            address = tabs[0]["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as socket:
                tab = Tab(socket)
                reading = asyncio.create_task(tab.read())
                for name in _LISTENED:
                    await tab.call(f"{name}.enable")
                await tab.call("Page.addScriptToEvaluateOnNewDocument", source=script)
                await tab.call("Page.navigate", url=page.as_uri())
                await tab.until("document.readyState === 'complete'")
                yield tab
                reading.cancel()
    finally:
        browser.terminate()
        await browser.wait()


async def _port(file: Path) -> int:
    """Waits until the browser has written it; unblocked by that or the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not (lines := await asyncio.to_thread(_lines, file)):
            await asyncio.sleep(0.05)
    return int(lines[0])


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _is_bad(level: str) -> bool:
    return level in ("error", "warning", "assert")
