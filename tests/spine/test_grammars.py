"""Answers with a grammar, through the whole service: both workers, and a decode worker that is killed."""

import asyncio
import json
from pathlib import Path

import httpx

from baton_proto.generated import inference_pb2 as pb
from runtime.calls.answer import Answer
from tests.service import running_service
from tests.spine.busy import killed_while_busy
from tests.spine.prompts import random_prompt

SHIP_ALL = {"router": {"placement": {"local_prefill_tokens": 0}, "no_worker_timeout_s": 5.0}}
SHORTEST, LONGEST = 1800, 1900  # letters: a second and more, so that the worker is killed before their end
LATE = "[abc]{20}" + r"[\w-]{1,200}" * 60  # its second part is more than a step may take
LETTERS = pb.Grammar(regex=f"[a-e]{{{SHORTEST},{LONGEST}}}")


def request(prompt: list[int]) -> pb.GenerateRequest:
    sampling = pb.SamplingOptions(temperature=0, max_tokens=LONGEST, grammar=LETTERS)
    return pb.GenerateRequest(tokens=pb.TokenIds(ids=prompt), sampling=sampling)


async def test_a_killed_decode_worker_changes_no_answer_with_a_grammar(tiny_model: Path) -> None:
    prompts = [random_prompt(60 + number, seed=number) for number in range(4)]
    async with running_service(tiny_model, 1, 2, SHIP_ALL) as service:
        calm = await asyncio.gather(*(service.client.generate(request(prompt), 60) for prompt in prompts))
        begun = asyncio.Event()

        async def stream(number: int) -> Answer:
            return await service.client.generate(request(prompts[number % 4]), 60, lambda piece: begun.set())

        _, stormy = await killed_while_busy(service, ["decode-1", "decode-2"], stream, 4, begun=begun)
        for number, answer in stormy.items():
            assert answer.token_ids == calm[number % 4].token_ids
        assert all(answer.served_by[0].prefill_worker for answer in calm)
        assert any(answer.served_by[0].attempts > 1 for answer in stormy.values())
        for answer in calm:
            assert SHORTEST <= len(answer.text) <= LONGEST
            assert set(answer.text) <= set("abcde")

        async with httpx.AsyncClient(base_url=service.http_url, timeout=60) as http:
            asked = {
                "messages": [{"role": "user", "content": "Who?"}],
                "max_tokens": 60,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "who", "strict": True, "schema": {"enum": ["one", "two"]}},
                },
            }
            answer = (await http.post("/v1/chat/completions", json=asked)).json()["choices"][0]
            assert json.loads(answer["message"]["content"]) in ("one", "two")
            asked["response_format"]["json_schema"]["schema"] = {"properties": {"a": {"not": {}}}}  # type: ignore[index]
            refused = await http.post("/v1/chat/completions", json=asked)
            assert refused.status_code == 400
            assert "'not' at $.properties.a.not" in refused.json()["error"]["message"]

            late = {"prompt": "Who?", "max_tokens": 60, "guided_regex": LATE}
            refused = await http.post("/v1/completions", json=late)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guided_regex")
            events = (await http.post("/v1/completions", json=late | {"stream": True})).text
            assert '"param":"guided_regex"' in events, "the stream had begun when the grammar went wrong"
