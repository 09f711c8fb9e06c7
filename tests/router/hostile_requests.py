"""`python -m tests.router.hostile_requests HTTP_PORT GRPC_PORT`: sends a request for each line of its input.

The hostile ones have almost 8 MB and once held the router's event loop for up to seconds.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator

import grpc.aio
import httpx

from baton_proto.generated import inference_pb2 as pb, open_inference_pb2 as kserve

BODY_BYTES = 8_000_000
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
GENERATE = "/baton.v1.Inference/Generate"
MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
MODEL = "tiny"
JSON = {"content-type": "application/json"}


def repeated(head: str, unit: str, tail: str, num_bytes: int = BODY_BYTES) -> bytes:
    """As many units as fit, separated by commas."""
    count = (num_bytes - len(head) - len(tail)) // (len(unit) + 1)
    return f"{head}{','.join([unit] * count)}{tail}".encode()


def numbered(head: str, tail: str, count: int = 700_000) -> bytes:
    rows = ",".join(f'"{i}":1' for i in range(count))
    return f"{head}{rows}{tail}".encode()


def ordinary() -> bytes:
    """A long conversation."""
    message = '{"role":"user","content":"%s"}' % ("What is the capital of France? " * 3)
    return repeated('{"messages":[', message, "]}", 60_000)


def http_bodies() -> Iterator[tuple[str, str, bytes]]:
    """(name, path, body)."""
    user = '{"role":"user","content":'
    yield "empty messages", CHAT, repeated('{"messages":[', user + '""}', "]}")
    yield "empty parts", CHAT, repeated('{"messages":[' + user + "[", '{"type":"text","text":""}', "]}]}")
    yield "a variable of letters", CHAT, repeated('{"messages":[],"chat_template_kwargs":{"tools":"', "x", '"}}')
    yield "many variables", CHAT, numbered('{"messages":[' + user + '"a"}],"chat_template_kwargs":{', "}}")
    yield "lists as tools", CHAT, repeated('{"messages":[],"tools":[', "[]", "]}")
    yield "stop strings", COMPLETION, repeated('{"prompt":"a","stop":[', '"a"', "]}")
    yield "biases", COMPLETION, numbered('{"prompt":"a","logit_bias":{', "}}")
    yield "fewer biases", COMPLETION, numbered('{"prompt":"a","logit_bias":{', "}}", 45_000)
    yield "token ids", COMPLETION, repeated('{"prompt":[', "5", "]}")
    yield "lists of token ids", COMPLETION, repeated('{"prompt":[', "[]", "]}")
    yield "unknown fields", COMPLETION, numbered('{"prompt":"a",', "}")
    yield "half a character", COMPLETION, b'{"prompt":"' + b"\\\\" * (BODY_BYTES // 2) + b'\\ud800"}'
    yield "a first grammar", COMPLETION, b'{"prompt":"a","guided_regex":"[ab]{9}"}'
    yield "a large grammar", COMPLETION, b'{"prompt":"a","guided_json":{"type":"integer","multipleOf":999983}}'
    yield "text", COMPLETION, b'{"prompt":"' + b"a b " * (BODY_BYTES // 4) + b'"}'
    yield "64 texts", COMPLETION, repeated('{"prompt":[', '"' + "relay " * 680 + '"', "]}", 64 * 4083)
    call = '{"type":"function_call","call_id":"a","name":"b","arguments":"{\\"c\\":[%s]}"}'
    yield "empty items", RESPONSES, repeated('{"input":[', '{"role":"user","content":""}', "]}")
    yield "items", RESPONSES, repeated('{"input":[', '{"role":"user","content":"a"}', "]}", 100_000)
    yield "lists as arguments", RESPONSES, ('{"input":[' + call % ("[]," * 2_600_000 + "[]") + "]}").encode()
    yield "fewer as arguments", RESPONSES, ('{"input":[' + call % ("[]," * 32_000 + "[]") + "]}").encode()
    yield "instructions", RESPONSES, b'{"input":"a","instructions":"' + b"a b " * 400_000 + b'"}'
    yield "metadata", RESPONSES, numbered('{"input":"a","metadata":{', "}}")
    user = '{"max_tokens":1,"messages":[{"role":"user","content":['
    yield "empty blocks", MESSAGES, repeated(user, '{"type":"text","text":""}', "]}]}")
    yield "blocks", MESSAGES, repeated(user, '{"type":"text","text":"a"}', "]}]}", 200_000)
    result = '{"type":"tool_result","tool_use_id":"a","content":"b"}'
    yield "results", MESSAGES, repeated(user, result, "]}]}", 200_000)
    head = '{"max_tokens":1,"messages":[{"role":"assistant","content":['
    head += '{"type":"tool_use","id":"a","name":"b","input":{"c":['
    yield "lists as input", MESSAGES, repeated(head, "[]", ']}}]},{"role":"user","content":"d"}]}', 700_000)

    yield "tokens to decode", DETOKENIZE, repeated('{"tokens":[', "0", "]}", 2 * 131_000)
    yield "tokens to spell", TOKENIZE, b'{"return_token_strs":true,"prompt":"%b"}' % (b"<|im_end|>" * 131_000)


def tensors(name: str, datatype: str, shape: list[int], raw: bytes = b"", **contents: list[int]) -> bytes:
    """A ModelInferRequest with one input."""
    given = kserve.InferTensorContents(**contents)  # type: ignore[arg-type]
    tensor = kserve.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape, contents=given)
    request = kserve.ModelInferRequest(model_name=MODEL, inputs=[tensor], raw_input_contents=[raw] if raw else [])
    return request.SerializeToString()


def kserve_messages() -> Iterator[tuple[str, bytes]]:
    """(name, encoded ModelInferRequest)."""
    yield "tensors: parameters", b"\x22\x02\x0a\x00" * (BODY_BYTES // 4)
    yield "tensors: a long name", tensors("x" * BODY_BYTES, "BYTES", [1], b"\0" * 4)
    yield "tensors: no texts", tensors("text_input", "BYTES", [4096], b"\0" * BODY_BYTES)
    yield "tensors: token ids", tensors("input_ids", "INT64", [BODY_BYTES // 8], b"\5" * BODY_BYTES)
    yield "tensors: listed token ids", tensors("input_ids", "INT64", [131_000], int64_contents=[5000] * 131_000)
    yield "tensors: sizes", tensors("input_ids", "INT64", [2**62] * 100_000)
    yield "tensors: sampling parameters", tensors("sampling_parameters", "BYTES", [1], text_element(BODY_BYTES))


def text_element(length: int) -> bytes:
    return length.to_bytes(4, "little") + b"{" * length


def grpc_messages() -> Iterator[tuple[str, bytes]]:
    """(name, encoded GenerateRequest)."""
    yield "empty messages", b"\x1a\x80\x89\x7a" + b"\x0a\x00" * 1_000_000
    yield "stop strings", b"\x12\x01a" + b"\x2a\x02\x5a\x00" * (BODY_BYTES // 4)
    yield "unknown fields", b"\x12\x01a" + b"\xf8\x07\x00" * (BODY_BYTES // 3)
    yield "token ids", pb.GenerateRequest(tokens=pb.TokenIds(ids=[5] * BODY_BYTES)).SerializeToString()


async def answers(http: httpx.AsyncClient, channel: grpc.aio.Channel) -> AsyncIterator[str]:
    """What was sent and what came of it; each request is sent when the next item is asked for."""
    for _ in range(3):
        yield f"ordinary {(await http.post(CHAT, content=ordinary(), headers=JSON)).status_code}"
    for name, path, body in http_bodies():
        yield f"HTTP {name} {(await http.post(path, content=body, headers=JSON)).status_code}"
    for name, message in grpc_messages():
        call = channel.unary_stream(GENERATE)(message, timeout=60)
        yield f"gRPC {name} {(await call.code()).name}"
    for name, message in kserve_messages():
        infer = channel.unary_stream(MODEL_INFER)(message, timeout=60)
        yield f"gRPC {name} {(await infer.code()).name}"


async def main(http_port: str, grpc_port: str) -> None:
    options = [("grpc.max_send_message_length", -1)]
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=60) as http,
        grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}", options=options) as channel,
    ):
        async for line in answers(http, channel):
            print(line, flush=True)
            await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
