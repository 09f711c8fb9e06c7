"""A real browser for tests: Debian's Chromium without a screen, driven over the DevTools protocol through pipes.

    async with browsing() as browser:
        tab = await browser.open("http://127.0.0.1:8000/ui")
        await tab.until("document.title === 'Baton'")

Where there is no Chromium, `needs_browser` skips.
"""

import asyncio
import base64
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-sandbox", "--disable-gpu", "--mute-audio"),
    *("--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
)
LEFT = "Inspected target navigated or closed"  # a promise of a page that another one takes the place of
TIMEOUT_S = 60.0
MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # a picture is one message
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")


class Browser:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.WriteTransport) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.requests: list[str] = []  # URLs that pages have asked for
        self.problems: list[str] = []  # errors of pages: exceptions, and what their policy forbids
        self._targets: list[str] = []  # open tabs
        self.task = asyncio.create_task(self._read())

    async def open(self, url: str, width: int = 1300, height: int = 900) -> "Tab":
        target = await self.call(
            "Target.createTarget", {"url": "about:blank", "newWindow": True, "width": width, "height": height}
        )
        self._targets.append(target["targetId"])
        attached = await self.call("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True})
        tab = Tab(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Network", "Log", "Performance"):
            await tab.call(f"{domain}.enable")
        await tab.go(url)
        return tab

    async def leave(self) -> None:
        """Closes all tabs, and forgets what they did."""
        while self._targets:
            await self.call("Target.closeTarget", {"targetId": self._targets.pop()})
        self.requests, self.problems = [], []

    async def call(self, method: str, params: dict[str, Any] | None = None, session: str | None = None) -> Any:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params or {}}
        if session is not None:
            message["sessionId"] = session
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(TIMEOUT_S):
            return await answer

    async def _read(self) -> None:
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            answer = self._answers.pop(message.get("id", 0), None)
            if answer is not None and not answer.done():
                if "error" in message:
                    answer.set_exception(AssertionError(message["error"]["message"]))
                else:
                    answer.set_result(message["result"])
            match message.get("method"):
                case "Network.requestWillBeSent":
                    self.requests.append(message["params"]["request"]["url"])
                case "Runtime.exceptionThrown":
                    self.problems.append(str(message["params"]["exceptionDetails"]))
                case "Log.entryAdded" if message["params"]["entry"]["source"] in ("security", "javascript"):
                    self.problems.append(message["params"]["entry"]["text"])


class Tab:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    async def call(self, method: str, **params: Any) -> Any:
        return await self._browser.call(method, params, self._session)

    async def go(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def value(self, expression: str) -> Any:
        """Of a JavaScript expression; a promise is awaited."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Waits for a JavaScript expression to hold; it is looked at before each picture that the page draws."""
        look = f"() => {{ const held = ({condition}); held ? met(held) : requestAnimationFrame(look) }}"
        try:
            while True:
                try:
                    return await self.value(f"new Promise(met => {{ const look = {look}; look() }})")
                except AssertionError as error:
                    if LEFT not in str(error):
                        raise
        except TimeoutError:
            text = await self.value("document.body.innerText")
            raise AssertionError(f"never held: {condition}\nThe page shows:\n{text}") from None

    async def text(self, selector: str) -> str:
        return str(await self.value(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def prefers(self, **features: str) -> None:
        """`color_scheme="dark"`, `reduced_motion="reduce"`."""
        media = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        await self.call("Emulation.setEmulatedMedia", features=media)

    async def picture(self, path: Path, whole: bool = False) -> None:
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def busy_s(self) -> float:
        """Seconds that the page's scripts and drawing have taken so far."""
        metrics = await self.call("Performance.getMetrics")
        return float(next(one["value"] for one in metrics["metrics"] if one["name"] == "TaskDuration"))


@asynccontextmanager
async def browsing(*flags: str) -> AsyncIterator[Browser]:
    """Fails at its end when a page had an error."""
    assert CHROMIUM is not None
    loop = asyncio.get_running_loop()
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    with tempfile.TemporaryDirectory(prefix="baton-browser-", ignore_cleanup_errors=True) as profile:
        # Chromium reads from its descriptor 3 and writes to 4.
        command = f'exec "$0" "$@" 3<&{their_in} 4>&{their_out}'
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", command, CHROMIUM, *FLAGS, *flags, f"--user-data-dir={profile}"),
            pass_fds=(their_in, their_out),
            stderr=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        reader = asyncio.StreamReader(limit=MAX_MESSAGE_BYTES)
        reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(our_in, "rb"))
        writing, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(our_out, "wb"))
        browser = Browser(reader, writing)
        try:
            yield browser
            assert not browser.problems
        finally:
            browser.task.cancel()
            await asyncio.gather(browser.task, return_exceptions=True)
            writing.close()  # without its pipe the browser ends
            await process.wait()
            reading.close()
