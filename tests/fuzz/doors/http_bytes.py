"""HTTP/1.1 as clients should not speak it: a grammar of requests whose parts may each be wrong."""

import json
import random

from tests.fuzz.changed_bytes import changed
from tests.router.http_client import CHAT, COMPLETION

METHODS = (b"POST", b"POST", b"POST", b"GET", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"PRI", b"BREW", b"post", b"")
PATHS = (
    *(
        b"/v1/completions",
        b"/v1/chat/completions",
        b"/v1/responses",
        b"/v1/messages",
        b"/v1/models",
        b"/v1/models/tiny",
        b"/health",
        b"/metrics",
    ),
    *(
        b"/",
        b"*",
        b"//",
        b"/%",
        b"/%ff%00",
        b"/\xff\xfe",
        b"http://[::1",
        b"host:443",
        b"/" + b"a" * 5000,
        b"/?" + b"&" * 999,
    ),
)
VERSIONS = (b"HTTP/1.1",) * 6 + (b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"HTTP/1.1 ", b"ICY", b"")
FIELDS = (
    *(b"connection: close", b"connection: keep-alive, upgrade", b"upgrade: websocket", b"upgrade: h2c"),
    *(b"expect: 100-continue", b"content-type: application/json", b"x: " + b"y" * 3000, b"\xff\xff: \xff", b": empty"),
    *(
        b"x-request-timeout-s: nan",
        b"x-request-timeout-s: -1",
        b"x-request-id: a b",
        b"x-baton-tenant: \xff",
        b" folded",
    ),
    *(b"transfer-encoding: gzip", b"content-length: 0", b"content-length: 5", b"x:\x00", b"authorization: Bearer \xff"),
)
LENGTHS = (
    b"content-length: 18446744073709551616",
    b"content-length: -1",
    b"content-length: 1, 1",
    b"content-length: 5e3",
)
ENDS = (b"\r\n",) * 8 + (b"\n", b"\r", b"\r\r\n", b"")


def conversation(chance: random.Random) -> bytes:
    """All that one client says."""
    said = b"".join(request(chance) for _ in range(chance.choice((1, 1, 1, 2, 5, 40))))
    return changed(chance, said) if chance.random() < 0.3 else said


def request(chance: random.Random) -> bytes:
    end = chance.choice(ENDS) if chance.random() < 0.2 else b"\r\n"
    fields = [b"host: localhost", *chance.choices(FIELDS, k=chance.choice((0, 0, 1, 3, 30)))]
    body = payload(chance)
    match chance.randrange(6):
        case 0:
            sent = chunks(chance, body)
            fields.append(b"transfer-encoding: chunked")
        case 1:
            sent = body
            fields.append(chance.choice(LENGTHS))
        case 2:
            sent = body[: len(body) // 2]
            fields.append(b"content-length: %d" % len(body))
        case _:
            sent = body
            fields.append(b"content-length: %d" % len(body))
    chance.shuffle(fields)
    first = b" ".join((chance.choice(METHODS), chance.choice(PATHS), chance.choice(VERSIONS)))
    if chance.random() < 0.6:  # a sound request line, so that the rest is seen
        first = b"POST %b HTTP/1.1" % chance.choice(PATHS[:2])
    return end.join((first, *fields, b"", b"")) + sent


def payload(chance: random.Random) -> bytes:
    sound = json.dumps(chance.choice((CHAT, COMPLETION)) | {"stream": chance.random() < 0.7}).encode()
    return chance.choice((sound, sound, sound, b"", b"{}", b"[" * 5000, b"\xff" * 100, changed(chance, sound)))


def chunks(chance: random.Random, body: bytes) -> bytes:
    said = b""
    while body:
        length = chance.randint(1, len(body))
        size = chance.choice((b"%x", b"%x", b"%x", b"%X;a=b", b"00%x", b"-%x", b"%xz", b"%x;" + b"e" * 2000)) % length
        said += size + b"\r\n" + body[:length] + chance.choice((b"\r\n",) * 9 + (b"", b"\n"))
        body = body[length:]
    trailers = b"".join(chance.choice(FIELDS) + b"\r\n" for _ in range(chance.choice((0, 0, 1, 100))))
    return said + chance.choice((b"0", b"0", b"0", b"", b"f" * 17)) + b"\r\n" + trailers + b"\r\n"
