"""The same request, the same answer: what a vLLM server says when it is asked itself, and what a service says in front
of it, with vLLM in its workers, and with our own engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service import Service, running_service
from tests.vllm.asked_of_both import bodies
from tests.vllm.environment import LIMIT_S, PATIENCE_S, START_S
from tests.vllm.server import BLOCK, VllmServer
from tests.vllm.test_external_workers import FLAGS, MAX_TOKENS, sections

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(LIMIT_S)]

TOLD = ("text", "finish_reason", "stop_reason", "token_ids", "prompt_token_ids", "logprobs", "prompt_logprobs")
COMPLETIONS = "/v1/completions"
XARGS = {"model": "smollm2", "prompt": "a", "vllm_xargs": {"a": [1, "b"]}, "max_tokens": 1}
LOOPS = {"model": "smollm2", "prompt": "ha ha ha ha ha ha ha ha ha ha", "max_tokens": 100, "temperature": 0}
LOOPS |= {"repetition_detection": {"max_pattern_size": 4, "min_count": 5}, "return_token_ids": True}
CLOSE = 2e-3  # between log-probabilities of two engines, in nats


async def test_answers_are_those_of_the_server(vllm_python: Path, tmp_path: Path) -> None:
    """One test, because the server and the workers take a minute each to start."""
    server = VllmServer(vllm_python, tmp_path / "vllm.log", MAX_TOKENS, 256, FLAGS)
    try:
        await server.start()
        answers = {name: await asked(server.address, path, body) for name, path, body in bodies()}
        looped = await asked(server.address, COMPLETIONS, LOOPS)
        assert looped["choices"][0]["finish_reason"] == "repetition"
        async with running_service("smollm2", 0, 0, **sections(gpu_one=server)) as service:
            await answers_are(service, answers)
            await what_vllm_alone_has_is(service, looped)
    finally:
        await server.close()
    ours: dict[str, Any] = {"engine": {"block_size": BLOCK, "max_model_len": MAX_TOKENS}}
    async with running_service("smollm2", 0, 1, **ours) as service:
        await answers_are(service, answers)
        for name, body in (("vllm_xargs", XARGS), ("repetition_detection", LOOPS)):
            refused = await asked(service.http_url, COMPLETIONS, body)
            assert f"{name}: workers with vLLM alone have a use for it" in refused["error"]["message"]
    workers = {"engine": "vllm", "python": str(vllm_python), "ready_timeout_s": START_S}
    engine = ours["engine"] | {"kv_memory": "256MiB"}
    async with running_service("smollm2", 0, 1, workers=workers, engine=engine) as service:
        await answers_are(service, answers)
        await what_vllm_alone_has_is(service, looped)


async def what_vllm_alone_has_is(service: Service, looped: dict[str, Any]) -> None:
    assert "choices" in await asked(service.http_url, COMPLETIONS, XARGS)
    assert not [*differences(looped, await asked(service.http_url, COMPLETIONS, LOOPS))]


async def answers_are(service: Service, answers: dict[str, Any]) -> None:
    different = []
    for name, path, body in bodies():
        answer = await asked(service.http_url, path, body)
        different += [f"{name}: {where}" for where in differences(answers[name], answer)]
    assert not different, "\n".join(different)


async def asked(address: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        answer: dict[str, Any] = (await client.post(address + path, json=body)).json()
        return answer


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[str]:
    if "choices" not in theirs or "choices" not in ours:
        yield f"{theirs} != {ours}"
        return
    if len(theirs["choices"]) != len(ours["choices"]):
        yield "other choices"
    for i, (one, other) in enumerate(zip(theirs["choices"], ours["choices"], strict=False)):
        yield from unlike(f"choices[{i}].message", _message(one), _message(other))
        for name in TOLD:
            yield from unlike(f"choices[{i}].{name}", one.get(name), other.get(name))
    for name in ("prompt_logprobs", "prompt_token_ids"):
        yield from unlike(name, theirs.get(name), ours.get(name))
    for name in ("prompt_tokens", "completion_tokens"):
        yield from unlike(name, theirs["usage"][name], ours["usage"][name])


def _message(choice: dict[str, Any]) -> Any:
    return choice.get("message", {}).get("content")


def unlike(where: str, theirs: Any, ours: Any) -> Iterator[str]:
    match theirs, ours:
        case dict(), dict():
            for name in {**theirs, **ours}:
                yield from unlike(f"{where}.{name}", theirs.get(name), ours.get(name))
        case list(), list() if len(theirs) == len(ours):
            for i, (one, other) in enumerate(zip(theirs, ours, strict=True)):
                yield from unlike(f"{where}[{i}]", one, other)
        case float(), float() if abs(theirs - ours) <= CLOSE:
            return
        case _ if theirs != ours:
            yield f"{where}: {theirs!r} != {ours!r}"
