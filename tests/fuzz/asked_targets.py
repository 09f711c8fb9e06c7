"""What a caller may ask of grammars, schemas and tools, by the ways that a request takes: what is refused is refused by
the name of its field, within bounds of processor time and memory."""

import asyncio
import atexit
import functools
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import psutil

from baton_proto.grammar import Grammar
from router.parsing.families import REASONING_FAMILIES, TOOL_FAMILIES
from router.parsing.parser import Parser
from runtime.errors import InvalidRequestError, UnavailableError
from runtime.grammar.checker import GrammarChecker
from runtime.grammar.compiler import GrammarCompiler
from tests.fuzz import hostile_asks
from tests.router.api.conversations import app_of, talking_frontend, write_talking_model
from tests.router.scripted_generator import ScriptedGenerator, tiny_tokenizer
from tests.tiny_model import EOS_TOKEN_IDS, VOCAB_SIZE

MOST_CPU_S = 5.0  # of this process, for one input
MOST_BYTES = 256 << 20  # that this process may have more than at its first input
TIMES = 3  # that something is asked: a busy machine may have no verdict in time
UNAVAILABLE = 503
ANSWERED = (200, 400, 413)

Feed = Callable[[bytes], object]


def bounded(feed: Feed) -> Feed:
    """Fails when an input takes too much, or when a refusal names no field."""
    process, at_first = psutil.Process(), list[int]()

    def within(data: bytes) -> object:
        if not at_first:
            at_first.append(process.memory_info().rss)
        began_s = time.process_time()
        refused: InvalidRequestError | None = None
        try:
            feed(data)
        except InvalidRequestError as error:
            refused = error
        took_s, more = time.process_time() - began_s, process.memory_info().rss - at_first[0]
        assert took_s <= MOST_CPU_S, f"took {took_s:.1f} s of a processor"
        assert more <= MOST_BYTES, f"{more >> 20} MiB more than at first"
        assert refused is None or refused.field, f"no field is named: {refused}"
        return refused

    return within


@functools.cache
def model() -> Path:
    return write_talking_model(Path(tempfile.mkdtemp(prefix="baton-fuzz-")))


@functools.cache
def compiler() -> GrammarCompiler:
    """Of what a checker has allowed, as in a worker."""
    return GrammarCompiler(model(), VOCAB_SIZE, EOS_TOKEN_IDS)


@functools.cache
def checker() -> GrammarChecker:
    made = GrammarChecker(model(), VOCAB_SIZE, EOS_TOKEN_IDS)
    atexit.register(made.close)
    return made


def mask(asked: Grammar) -> object:
    for times in range(TIMES):
        try:
            allowed = loop().run_until_complete(checker().check_soon(asked, "guided"))
            return compiler().matcher(allowed, "guided").mask([])
        except UnavailableError:
            if times == TIMES - 1:
                raise
    return None


def grammar(data: bytes) -> object:
    """KIND, a zero, and the text."""
    kind, _, text = data.decode("utf-8", "replace").partition("\0")
    if kind not in (*hostile_asks.GRAMMARS, "json_schema"):
        kind = "regex"
    if kind == "choice":
        return mask(Grammar("choice", choices=tuple(text.split("\n"))))
    return mask(Grammar(kind, text))  # type: ignore[arg-type]


def schema(data: bytes) -> object:
    return grammar(b"json_schema\0" + data)


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@functools.cache
def client() -> httpx.AsyncClient:
    frontend = talking_frontend(ScriptedGenerator(tiny_tokenizer(model())), model())
    transport = httpx.ASGITransport(app_of(replace(frontend, grammars=checker())), raise_app_exceptions=True)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60)


def body(data: bytes) -> object:
    """PATH, a zero, and the body."""
    return posted(client(), data)


def posted(asked: httpx.AsyncClient, data: bytes) -> object:
    """`data`: PATH, a zero, and the body."""
    path, _, told = data.partition(b"\0")
    known = [one for one in hostile_asks.BODIES if one.encode() == path] or ["/v1/chat/completions"]
    headers = {"content-type": "application/json"}
    for _ in range(TIMES):
        response = loop().run_until_complete(asked.post(known[0], content=told, headers=headers))
        if response.status_code != UNAVAILABLE:
            break
    assert response.status_code in ANSWERED, f"{response.status_code}: {response.text[:500]}"
    if response.status_code != 200:
        error = response.json()["error"]
        assert error.get("param") or ": " in error["message"], f"no field is named: {error}"
    return response


def answer(data: bytes) -> object:
    """What a model has written, by each family, in pieces; a schema of a tool stands before it, behind a zero."""
    told, _, text = data.decode("utf-8", "replace").partition("\0")
    try:
        given = msgspec.json.decode(told.encode("utf-8", "replace"), type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        given = {}
    for family in TOOL_FAMILIES.values():
        for thinking in (None, *REASONING_FAMILIES.values()):
            parser = Parser(family, thinking, lambda: "id", {"f": given})
            opened = (family.opens[0] if family.opens else "") + text
            for begin in range(0, len(opened), 7):
                parser.push(opened[begin : begin + 7])
            parser.end(cut=False)
    return None


def drawn(paths: dict[str, hostile_asks.Draw]) -> Callable[[random.Random], bytes]:
    """The name of one, a zero, and what it draws."""

    def draw(chance: random.Random) -> bytes:
        name = chance.choice(list(paths))
        return f"{name}\0{hostile_asks.written(paths[name](chance))}".encode("utf-8", "surrogatepass")

    return draw


def drawn_schema(chance: random.Random) -> bytes:
    return hostile_asks.written(hostile_asks.schema(chance)).encode()


def drawn_answer(chance: random.Random) -> bytes:
    written = chance.choice(('{"name": "f", "arguments": {"a": ', "<function=f>\n<parameter=a>\n", "f(a=", "[f(a=("))
    return (
        hostile_asks.written(hostile_asks.schema(chance)).encode()
        + b"\0"
        + (written + hostile_asks.text(chance)[:3000]).encode()
    )
