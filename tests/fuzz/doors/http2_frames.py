"""HTTP/2 and gRPC as clients should not speak them: calls whose frames may each be wrong, doubled, left out."""

import random
import struct

from baton_proto.generated import inference_pb2 as pb
from tests.fuzz.changed_bytes import changed

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 1, 4
OPERATOR = "o" * 32  # the key of Admin's callers
METHODS = (
    *("baton.v1.Inference/Generate", "baton.v1.Inference/Generate", "baton.v1.Inference/ListModels"),
    *("baton.v1.Admin/Status", "baton.v1.Admin/Tree", "baton.v1.Admin/Diff", "baton.v1.Admin/Explain"),
    *("baton.v1.Admin/Sleep", "baton.v1.Admin/Wake", "grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch"),
    *("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "nothing/Here", "", "\xff"),
)
MESSAGES = (
    pb.GenerateRequest(text="What is", sampling=pb.SamplingOptions(max_tokens=20)),
    pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Hi")]), request_id="r"),
    pb.GenerateRequest(tokens=pb.TokenIds(ids=[5] * 50), sampling=pb.SamplingOptions(n=2, logprobs=2, seed=2**63)),
    pb.ExplainRequest(request_id="r"),
)
"""Fields of one type are read as another's, too."""


def message(chance: random.Random) -> bytes:
    """A request, sound or not, as protobuf."""
    sound = chance.choice(MESSAGES).SerializeToString()
    return chance.choice((sound, sound, changed(chance, sound), chance.randbytes(chance.randint(0, 60))))


def conversation(chance: random.Random) -> bytes:
    said = [frame(SETTINGS, 0, 0, b"")]
    for number in range(chance.choice((1, 2, 10, 100))):
        stream = 2 * number + 1 if chance.random() < 0.95 else chance.choice((0, 2, 1, 2**31 - 1))
        said += call(chance, stream)
        if chance.random() < 0.4:
            said.append(stray(chance, stream))
    if chance.random() < 0.2:
        chance.shuffle(said)
    whole = PREFACE + b"".join(said)
    return changed(chance, whole) if chance.random() < 0.3 else whole


def call(chance: random.Random, stream: int) -> list[bytes]:
    fields = [
        (":method", chance.choice(("POST",) * 9 + ("GET",))),
        (":scheme", "http"),
        (":path", "/" + chance.choice(METHODS)),
        (":authority", "baton"),
        ("content-type", chance.choice(("application/grpc",) * 9 + ("text/html",))),
        ("te", "trailers"),
        ("authorization", f"Bearer {OPERATOR}"),
        ("grpc-timeout", chance.choice(("1S", "10m", "0n", "99999999H", "x", ""))),
        ("grpc-encoding", chance.choice(("identity",) * 5 + ("gzip", "nothing"))),
        ("x-request-id", "\xff" * chance.choice((1, 20_000))),
    ]
    head = b"".join(literal(*field) for field in fields if chance.random() < 0.97)
    body = message(chance)
    length = len(body) if chance.random() < 0.9 else chance.choice((0, 1, 2**24, 2**32 - 1))
    framed = struct.pack(">BI", chance.choice((0,) * 9 + (1, 2)), length) + body
    frames = [frame(HEADERS, END_HEADERS, stream, head), frame(DATA, END_STREAM, stream, framed)]
    match chance.randrange(8):
        case 0:
            frames.append(frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))
        case 1:
            frames.pop()  # the message never comes
        case 2:
            frames[1] = frame(DATA, 0, stream, framed) * chance.choice((1, 2))
        case 3:
            frames[0] = frame(HEADERS, 0, stream, head[:20]) + frame(CONTINUATION, END_HEADERS, stream, head[20:])
    return frames


def stray(chance: random.Random, stream: int) -> bytes:
    kind = chance.choice((PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION, 99))
    payload = chance.choice((chance.randbytes(8), chance.randbytes(4), b"\xff" * 6, b"", bytes(chance.randint(0, 20))))
    return frame(kind, chance.choice((0, 1, 4, 255)), chance.choice((0, stream)), payload)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header that is not indexed, without Huffman coding (RFC 7541, 6.2.2)."""
    return b"\x00" + _text(name.encode()) + _text(value.encode("latin-1"))


def _text(text: bytes) -> bytes:
    rest, length = len(text) - 127, b"\x7f"
    if rest < 0:
        return bytes([len(text)]) + text
    while rest >= 128:
        length += bytes([rest % 128 + 128])
        rest //= 128
    return length + bytes([rest]) + text
