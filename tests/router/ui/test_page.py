"""The live page in a real browser."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from baton_proto.discovery import WorkerLoad
from baton_proto.generated import inference_pb2 as pb
from router.api.http.server import serve_http
from router.api.serving.app import create_app
from runtime.security.secret import Secret
from tests.browser import Browser, Tab, browsing, needs_browser
from tests.planner.live import planned_service
from tests.router.scripted_generator import ScriptedGenerator, make_frontend, tiny_tokenizer
from tests.router.ui.crowd import BLOCKS, Crowd

pytestmark = [needs_browser, pytest.mark.asyncio(loop_scope="module")]

KEY = "k" * 32
LIVE = "document.querySelector('#state').innerText === 'live'"
# How many of the picture's points have the colour of a variable of the page's style.
COLOURED = """(name => {
  const canvas = document.querySelector('#workers'), pen = canvas.getContext('2d')
  const data = pen.getImageData(0, 0, canvas.width, canvas.height).data
  const text = getComputedStyle(document.documentElement).getPropertyValue(name)
  const [r, g, b] = [1, 3, 5].map(i => parseInt(text.slice(i, i + 2), 16))
  let count = 0
  for (let i = 0; i < data.length; i += 4) count += data[i] === r && data[i + 1] === g && data[i + 2] === b
  return count
})('%s')"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def chromium() -> AsyncIterator[Browser]:
    async with browsing() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module")
async def browser(chromium: Browser) -> AsyncIterator[Browser]:
    """Has no tabs yet. A test whose pages had errors fails at its end."""
    yield chromium
    problems = [problem for problem in chromium.problems if "401" not in problem]
    await chromium.leave()
    assert not problems


@asynccontextmanager
async def crowded(tiny_model: Path, crowd: Crowd, *others: Crowd) -> AsyncIterator[str]:
    """The page's address, without a key."""
    frontend = make_frontend(ScriptedGenerator(tiny_tokenizer(tiny_model), ["Yes."]))
    app = create_app(frontend, lambda: b"", operators_routes=crowd.endpoints([Secret(KEY)], *others).routes())
    async with await serve_http(app, "127.0.0.1", 0) as server:
        for one in (crowd, *others):
            await one.feed.start()
        try:
            yield f"http://127.0.0.1:{server.port}/ui"
        finally:
            for one in (crowd, *others):
                await one.feed.close()


async def every_worker(tab: Tab, count: int) -> list[str]:
    """What is said of each, from one to the next with the arrow keys."""
    said = []
    await tab.value("document.querySelector('#workers').focus()")
    for number in range(count):
        await tab.press("ArrowRight" if number else "Home")
        said.append(await tab.text("#picked"))
    return said


async def test_it_shows_the_workers_of_a_service_and_follows_a_request(tmp_path: Path, browser: Browser) -> None:
    async with planned_service(tmp_path, 1, 2, {}) as planned:
        service = planned.service
        key = service.supervisor.keys.operator[0].reveal()
        tab = await browser.open(f"{service.http_url}/ui#key={key}")
        await tab.until(LIVE)
        assert await tab.value("location.href") == f"{service.http_url}/ui", "the key is not left where others see it"
        await tab.until("document.querySelector('#counts').innerText === '2 decode ready · 1 prefill ready'")
        said = await every_worker(tab, 3)
        assert [text.partition(":")[0] for text in said] == ["prefill-1", "decode-1", "decode-2"]

        options = pb.SamplingOptions(max_tokens=8)
        asked = pb.GenerateRequest(text="a prompt of some blocks " * 20, sampling=options, request_id="mine")
        await service.client.generate(asked)
        await tab.until("[...document.querySelectorAll('#requests tr')].some(row => row.innerText.startsWith('mine-'))")
        await tab.value("document.querySelector('#requests button').click()")
        await tab.until("document.querySelector('#story .decode')")
        story = await tab.text("#story")
        assert "prompt on prefill-1, its KV to decode-" in story
        assert "8 tokens in all" in story
        rows = await tab.value("[...document.querySelectorAll('#story .timed')].map(row => row.innerText)")
        passed = ("queue", "placement", "reservation", "prefill", "prefill queue", "prefill chunk", "KV push")
        passed += ("first step", "decode")
        assert [name for name in passed if any(row.strip().startswith(name) for row in rows)] == list(passed)
        assert any("GB/s by shm" in row for row in rows)
        assert "candidates, costs in ms" in story
        assert "completed after" in story
        await tab.value("document.querySelector('#tree-section').scrollIntoView()")  # else it is not asked for
        await tab.until("document.querySelectorAll('#tree .row').length > 0")
        assert "tokens 0 to" in await tab.text("#tree")
        await tab.until("document.querySelector('#plan').innerText.startsWith('slo: 1 prefill and 2 decode')")
        await tab.until(f"{COLOURED % '--amber'} > 0")  # the cached blocks, with the page's next news of the workers
        assert {url.partition("/ui")[0] for url in browser.requests} == {service.http_url}, (
            "nothing comes from elsewhere"
        )


async def test_it_says_live_once_a_whole_event_has_come(
    tiny_model: Path, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd, rest_may_come = Crowd(1, 1), asyncio.Event()
    messages = crowd.feed.messages

    async def first_in_two_parts(drop: object) -> AsyncIterator[bytes]:
        async with aclosing(messages()) as whole:
            first = await anext(whole)
            yield first[:100]
            await rest_may_come.wait()
            yield first[100:]
            async for message in whole:
                yield message

    monkeypatch.setattr(crowd.feed, "messages", first_in_two_parts)
    async with crowded(tiny_model, crowd) as address:
        tab = await browser.open(f"{address}#key={KEY}")
        await tab.until("heard_ms > 0")
        assert await tab.text("#state") != "live"
        rest_may_come.set()
        await tab.until(LIVE)


async def test_a_wrong_key_is_said_to_be_one_and_the_right_one_is_not_asked_for_again(
    tiny_model: Path, browser: Browser
) -> None:
    async with crowded(tiny_model, Crowd(1, 2)) as address:
        tab = await browser.open(f"{address}#key=wrong")
        await tab.until("document.querySelector('#refusal').innerText.startsWith('this is not the operator key')")
        await tab.value(f"document.querySelector('#key').value = '{KEY}'")
        await tab.value("document.querySelector('#login button').click()")
        await tab.until(LIVE)
        assert await tab.value("document.querySelector('#login').hidden")
        await tab.go(address)
        await tab.until(LIVE)


async def test_a_chooser_shows_one_of_several_models_at_a_time(tiny_model: Path, browser: Browser) -> None:
    one, two = Crowd(1, 1, models=("one", "two")), Crowd(0, 3, models=("two", "one"))
    async with crowded(tiny_model, one, two) as address:
        tab = await browser.open(f"{address}#key={KEY}")
        await tab.until("document.querySelector('#counts').innerText === '1 decode ready · 1 prefill ready'")
        assert await tab.value("[...document.querySelector('#model').options].map(option => option.text)") == [
            "one",
            "two",
        ]
        await tab.value("(model => { model.value = 'two'; model.dispatchEvent(new Event('change')) })($('model'))")
        await tab.until("document.querySelector('#counts')?.innerText === '3 decode ready'")
        assert await tab.value("[location.search, $('model').value]") == ["?model=two", "two"]
        await tab.go(f"{address}?model=three")
        await tab.until("document.querySelector('#state').innerText.includes('this model is not served')")
        browser.problems.clear()  # of the answer 404
    async with crowded(tiny_model, Crowd(1, 1)) as address:
        tab = await browser.open(f"{address}#key={KEY}")
        await tab.until(LIVE)
        assert await tab.value("$('model').hidden"), "there is nothing to choose"


async def test_it_is_light_and_dark_and_tells_kinds_and_states_apart(tiny_model: Path, browser: Browser) -> None:
    crowd = Crowd(2, 4)
    crowd.stir()
    for worker_id, state in (("decode-1", "sleeping"), ("decode-2", "draining")):
        crowd.add(worker_id, "decode", state)
    async with crowded(tiny_model, crowd) as address:
        tab = await browser.open(f"{address}#key={KEY}")
        await tab.until(LIVE)
        backs = []
        for scheme in ("light", "dark"):
            await tab.prefers(color_scheme=scheme)
            await tab.until(f"matchMedia('(prefers-color-scheme: {scheme})').matches")
            backs.append(await tab.value("getComputedStyle(document.body).backgroundColor"))
            for colour in ("--blue", "--amber", "--faint"):
                await tab.until(f"{COLOURED % colour} > 0")
        assert backs[0] != backs[1]
        assert await tab.text("#counts") == "1 decode draining · 2 decode ready · 1 decode sleeping · 2 prefill ready"


async def test_a_worker_has_a_bar_for_each_of_its_lower_tiers(tiny_model: Path, browser: Browser) -> None:
    crowd = Crowd(0, 1)
    key = crowd.pool.workers["decode-1"].key
    blocks = {"blocks_total": BLOCKS}
    async with crowded(tiny_model, crowd) as address:
        tab = await browser.open(f"{address}#key={KEY}")
        await tab.until(LIVE)
        for tier, colour in (("host", "--green"), ("disk", "--pink")):
            assert await tab.value(COLOURED % colour) == 0
            blocks |= {f"{tier}_blocks_used": 500, f"{tier}_blocks_total": 1000}
            crowd.ledger.report(key, WorkerLoad(**blocks))
            await tab.until(f"{COLOURED % colour} > 0")


async def test_who_wishes_for_less_motion_gets_less_and_a_pause_ends_the_stream(
    tiny_model: Path, browser: Browser
) -> None:
    crowd = Crowd(2, 2)
    async with crowded(tiny_model, crowd) as address:
        tab = await browser.open(f"{address}#key={KEY}")
        await tab.until(LIVE)
        crowd.stir()
        await tab.until("animated && transfers.length > 0")
        await tab.prefers(reduced_motion="reduce")
        crowd.stir()
        await tab.until("!animated && transfers.length > 0")
        await tab.value("document.querySelector('#pause').click()")
        await tab.until("document.querySelector('#state').innerText === 'paused'")
        async with asyncio.timeout(60):
            while crowd.feed._viewers:
                await tab.value("new Promise(requestAnimationFrame)")
        await tab.value("document.querySelector('#pause').click()")
        await tab.until(LIVE)


async def test_text_from_elsewhere_stays_text(tiny_model: Path, browser: Browser) -> None:
    crowd = Crowd(1, 0)
    crowd.add("<img src=x onerror=alert(1)>", "decode").misfit = "<script>alert(1)</script>"
    async with crowded(tiny_model, crowd) as address:
        tab = await browser.open(f"{address}#key={KEY}")
        await tab.until(LIVE)
        said = await every_worker(tab, 2)
        assert said[1].startswith("<img src=x")
        assert said[1].endswith("<script>alert(1)</script>")
        assert await tab.value("document.querySelectorAll('img').length") == 0


REQUEST = {
    "request_id": "chatcmpl-" + "0123456789abcdef" * 3,
    "prompt_tokens": 131072,
    "cached_tokens": 131056,
    "output_tokens": 16384,
    "outcome": "cancelled",
    "prefill_worker": "prefill-12",
    "decode_worker": "decode-12",
    "ttft_ms": 12345.6,
    "duration_ms": 98765.4,
}
# Neighbours in a row above a curve that overlap, or lie over the curve's largest value.
OVERLAPPING = """(() => {
  const canvas = document.querySelector('#curves'), pen = canvas.getContext('2d'), found = []
  for (const curve of CURVES) {
    const words = wordsOf(curve, 123456, canvas.clientWidth, pen)
    words.forEach((word, i) => {
      const next = words[i + 1], end = word.x + (word.color ? 22 : 0) + pen.measureText(word.text).width
      const room = canvas.clientWidth - pen.measureText('123.5k').width
      if (end > (next?.row === word.row ? next.x : room)) found.push(word.text)
    })
  }
  return found
})()"""


@pytest.mark.parametrize("width", [1280, 390])
async def test_nothing_is_cut_off_or_written_over_in_wide_and_narrow_pages(
    tiny_model: Path, browser: Browser, width: int
) -> None:
    crowd = Crowd(2, 3)
    async with crowded(tiny_model, crowd) as address:
        tab = await browser.open(f"{address}#key={KEY}")
        await tab.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        await tab.until(f"{LIVE} && document.querySelector('#plan').innerText")
        crowd.stir()
        await tab.until("document.querySelector('#pairs tr')")
        await tab.value(f"lines = [{json.dumps(REQUEST)}], showRequests()")
        cut = (
            "[...document.querySelectorAll('html, section, .scroll')].filter(one => one.scrollWidth > one.clientWidth)"
        )
        assert await tab.value(f"{cut}.map(one => one.innerText)") == []
        last = await tab.value("document.querySelector('#requests td:last-child').getBoundingClientRect().right")
        assert last <= await tab.value(
            "document.querySelector('#requests').closest('.scroll').getBoundingClientRect().right"
        )
        assert await tab.value(OVERLAPPING) == []
        assert await tab.value("document.querySelector('#h-planner').parentNode.clientHeight") < 130


async def test_it_goes_on_by_itself_after_the_router_was_away(tiny_model: Path, browser: Browser) -> None:
    crowd = Crowd(1, 1)
    async with crowded(tiny_model, crowd) as address:
        tab = await browser.open(f"{address}#key={KEY}")
        await tab.until(LIVE)
        await crowd.feed.close()
        await tab.until("document.querySelector('#state').innerText.startsWith('not connected')")
        crowd.feed._closed = False
        crowd.feed._told = asyncio.Event()
        await crowd.feed.start()
        await tab.until(LIVE)


async def test_a_thousand_workers_that_all_change_leave_the_page_time_to_spare(
    tiny_model: Path, browser: Browser
) -> None:
    crowd = Crowd(300, 700)
    crowd.stir()
    async with crowded(tiny_model, crowd) as address:
        tab = await browser.open(f"{address}#key={KEY}")
        await tab.until(LIVE)
        assert await tab.text("#counts") == "700 decode ready · 300 prefill ready"
        spent_s = []
        for _ in range(3):
            before_s, seen = await tab.busy_s(), await tab.text("#moved")
            crowd.stir()
            await tab.until(f"document.querySelector('#moved').innerText !== {seen!r}")
            spent_s.append(await tab.busy_s() - before_s)
        assert min(spent_s) < 0.9, "it works for longer than until the next message comes"
