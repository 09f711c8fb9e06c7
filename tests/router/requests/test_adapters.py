"""Requests for adapters, over scripted workers: none reaches a worker without its adapter, whatever happens."""

import asyncio
import dataclasses
from pathlib import Path

import pytest
from msgspec.structs import replace

from baton_proto.discovery import LoadReport, WorkerLoad
from baton_proto.worker import Failure
from router.requests.frontend import Models
from router.requests.request import GenerateRequest
from router.text.tokenizer import Tokenizer
from runtime.discovery.directory import Change
from runtime.discovery.worker_key import WorkerKey
from runtime.errors import UnavailableError, UnknownModelError
from tests.router.scripted_generator import MODEL, ScriptedGenerator, make_frontend, tiny_tokenizer
from tests.router.scripted_worker import ScriptedWorker, greedy, steps_of
from tests.router.small_router import (
    PROMPT,
    collect,
    fails_with,
    request,
    routing,
    silent,
    stream,
    then_fail,
)


def worker(name: str, *adapters: str) -> ScriptedWorker:
    made = ScriptedWorker(name)
    made.adapters = adapters
    return made


def of_adapter(name: str = "sql") -> GenerateRequest:
    return replace(request(8), adapter=name)


async def test_every_request_goes_to_a_worker_with_its_adapter(tokenizer: Tokenizer) -> None:
    plain, one, both = worker("d0"), worker("d1", "sql"), worker("d2", "poem", "sql")
    async with routing(tokenizer, plain, one, both) as router:
        assert router.generator.adapters() == {"sql", "poem"}
        results = await asyncio.gather(*(collect(stream(router, of_adapter())) for _ in range(20)))
        assert all(result.tokens == {0: greedy(PROMPT, 8)} for result in results)
        await collect(stream(router, of_adapter("poem")))
        assert len(one.submits) + len(both.submits) == 21
        assert {submit.adapter for submit in one.submits} == {"sql"}
        assert not plain.submits
        with fails_with(UnavailableError, "no decode worker that has the adapter essay was ready"):
            await collect(stream(router, of_adapter("essay")))
        router.check_idle()


async def test_a_worker_whose_places_are_taken_by_other_adapters_is_the_last_to_be_asked(tokenizer: Tokenizer) -> None:
    full, free = worker("d0", "poem", "sql"), worker("d1", "poem", "sql")
    full.adapter_places, free.adapter_places = 1, 2
    async with routing(tokenizer, full, free) as router:

        def asked(name: str, excluded: frozenset[WorkerKey] = frozenset()) -> set[str]:
            return {key[0] for key in router.pool.decode_keys(0, name, excluded)}

        def tell(one: ScriptedWorker, *adapters: str) -> None:
            load = WorkerLoad(running=len(adapters), adapters=adapters)
            router.pool.load_report(LoadReport(version=1, worker_id=one.worker_id, incarnation=1, load=load))

        tell(full, "poem")
        tell(free, "poem")
        assert asked("poem") == {"d0", "d1"}, "it takes part already"
        assert asked("sql") == {"d1"}
        results = await asyncio.gather(*(collect(stream(router, of_adapter())) for _ in range(10)))
        assert all(result.tokens == {0: greedy(PROMPT, 8)} for result in results)
        assert not full.submits
        tell(full, "poem")
        assert asked("sql", frozenset({("d1", 1)})) == {"d0", "d1"}, "rather one that is full than nobody"
        tell(free, "poem", "essay")
        assert asked("sql") == {"d0", "d1"}
        tell(full)
        assert asked("sql") == {"d0"}
        tell(free)
        router.check_idle()


async def test_an_answer_goes_on_at_another_worker_with_the_adapter(tokenizer: Tokenizer) -> None:
    died = Failure("internal", "it broke", retryable=True)
    plain, one, other = worker("d0"), worker("d1", "sql"), worker("d2", "sql")
    one.script = other.script = steps_of(then_fail(3, died))
    async with routing(tokenizer, plain, one, other) as router:
        result = await collect(stream(router, of_adapter()))
        assert result.tokens == {0: greedy(PROMPT, 8)}
        assert one.submits
        assert other.submits
        assert not plain.submits
        router.check_idle()


async def test_a_request_that_waits_is_not_given_to_a_newcomer_without_its_adapter(tokenizer: Tokenizer) -> None:
    one, plain = worker("d0", "sql"), worker("d1")
    async with plain, routing(tokenizer, one) as router:
        one.script = silent
        router.pool.apply(Change("changed", replace(one.record(), adapters=())))  # it has been unloaded
        waiting = asyncio.create_task(collect(stream(router, of_adapter())))
        await router.add(plain)
        with pytest.raises(UnavailableError):
            await waiting
        assert not plain.submits
        assert not one.submits
        assert router.generator.adapters() == frozenset()


def test_adapters_are_listed_behind_the_models_and_a_models_name_goes_first(tiny_model: Path) -> None:
    frontend = make_frontend(ScriptedGenerator(tiny_tokenizer(tiny_model)))
    adapted = dataclasses.replace(frontend, adapters=lambda: ["sql", "poem", "other"])
    other = dataclasses.replace(frontend, model="other", aliases=("o",), adapters=lambda: ["sql"])
    models = Models([adapted, other])
    assert models.names == [MODEL, "other", "o", "poem", "sql"]
    assert [(one.base, one.adapter) for one in models.listed] == [
        (MODEL, ""),
        ("other", ""),
        (MODEL, "poem"),
        (MODEL, "sql"),
    ]
    assert models.of("sql").adapter == "sql"
    assert models.of("other").adapter == ""
    with pytest.raises(UnknownModelError, match=f"'essay' is not served here; served: {MODEL}, other, o, poem, sql"):
        models.of("essay")
