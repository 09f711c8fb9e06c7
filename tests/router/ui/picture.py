"""Takes the picture of the live page in docs/: a real service with SmolLM2 under some load, in a real browser.

python -m tests.router.ui.picture [docs/ui.png]
"""

import asyncio
import random
import sys
import tempfile
from pathlib import Path

from PIL import Image

from baton_proto.generated import inference_pb2 as pb
from tests.browser import browsing
from tests.planner.live import planned_service
from tests.service import Service

SECONDS = 75.0  # of load
COLOURS = 160  # of the picture, to keep the file small
TOPICS = ("the history of Paris", "sailing around Cape Horn", "bread and how it rises", "the rings of Saturn")
WORDS = ("tell", "me", "more", "about", "what", "people", "say", "they", "found", "there", "when", "it", "began")


async def _ask(service: Service, dice: random.Random) -> None:
    system = f"You know all about {dice.choice(TOPICS)}. " * 16
    question = " ".join(dice.choices(WORDS, k=dice.randrange(5, 40)))
    options = pb.SamplingOptions(max_tokens=dice.randrange(8, 30), temperature=0.0, ignore_eos=True)
    await service.client.generate(pb.GenerateRequest(text=system + question, sampling=options, request_id="chat"))


async def _load(service: Service) -> None:
    dice = random.Random(1)
    async with asyncio.TaskGroup() as tasks:
        while True:
            tasks.create_task(_ask(service, dice))
            await asyncio.sleep(dice.uniform(0.1, 2.2))


async def _take(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        planner = {
            "interval_s": 2.0,
            "limits": {"min_prefill": 2, "max_prefill": 2, "min_decode": 2, "max_decode": 2, "gpu_budget": 4},
        }
        async with (
            planned_service(Path(folder), 2, 2, planner, model="smollm2", engine={"kv_memory": "256MiB"}) as planned,
            browsing() as browser,
        ):
            key = planned.service.supervisor.keys.operator[0].reveal()
            tab = await browser.open(f"{planned.service.http_url}/ui#key={key}", 1280, 1500)
            await tab.until("document.querySelector('#state').innerText === 'live'")
            loading = asyncio.create_task(_load(planned.service))
            await asyncio.sleep(SECONDS)
            assert not loading.done()
            ended = (
                "[...document.querySelectorAll('#requests tr')].find(row => /^[0-9.k]+$/.test(row.cells[7].innerText))"
            )
            await tab.until(ended)
            await tab.value(f"{ended}.querySelector('button').click()")
            await tab.until("document.querySelector('#story .decode') && document.querySelector('#tree .row')")
            await tab.value("document.querySelector('#workers').focus()")
            await tab.press("End")
            await tab.until("document.querySelector('#pairs tr')")
            await tab.picture(path, whole=True)
            Image.open(path).quantize(COLOURS).save(path, optimize=True)
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(_take(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/ui.png")))
