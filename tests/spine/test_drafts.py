"""A whole service guesses ahead: answers of shipped prompts stay what they were, also when their worker is killed, and
what was guessed right is told."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import httpx

from tests.service import Service, running_service
from tests.spine.conversations import metric
from tests.spine.oracle import Oracle
from tests.spine.prompts import ask, random_prompt

SHIP_ALL = {"router": {"placement": {"local_prefill_tokens": 0}}}
ALLOWED = (40, 41, 42, 43, 44)  # an answer of few tokens repeats itself
TOKENS, MANY = 200, 1500


async def test_guesses_are_told_and_answers_are_the_same_after_a_worker_is_lost(tiny_model: Path) -> None:
    oracle = Oracle(tiny_model)
    prompts = [random_prompt(length, seed=length) for length in (5, 40, 70, 100)]
    options: dict[str, Any] = {"ignore_eos": True, "allowed_token_ids": ALLOWED}
    async with running_service(tiny_model, 1, 2, SHIP_ALL, engine={"speculation": "ngram"}) as service:
        async with httpx.AsyncClient(base_url=service.http_url, timeout=60) as http:
            body = {"prompt": prompts[0], "max_tokens": TOKENS, "temperature": 0, **options}
            usage = (await http.post("/v1/completions", json=body)).json()["usage"]
        assert usage["completion_tokens"] == TOKENS
        assert 0 < usage["completion_tokens_details"]["accepted_prediction_tokens"] < TOKENS
        asked = [asyncio.create_task(ask(service.client, prompt, MANY, **options)) for prompt in prompts]
        service.kill(await guessing(service))
        answers = await asyncio.gather(*asked)
    for prompt, answer in zip(prompts, answers, strict=True):
        rows = oracle.logits(prompt + answer.token_ids, MANY + 1)[:-1, list(ALLOWED)]
        assert [ALLOWED[best] for best in rows.argmax(-1).tolist()] == answer.token_ids
    assert max(answer.served_by[0].attempts for answer in answers) > 1


async def guessing(service: Service) -> str:
    """A decode worker that has guessed right since now."""
    workers = service.workers("decode")
    before = {name: await metric(service, name, "accepted_tokens_total") for name in workers}
    async with asyncio.timeout(60):
        for name in itertools.cycle(workers):
            if await metric(service, name, "accepted_tokens_total") > before[name]:
                assert await metric(service, name, "drafted_tokens_total") > 0
                return name
    raise AssertionError
