"""What a user of Triton's own client does, in a process of its own, because its messages have the names of ours.

`python triton_session.py HOST:PORT` prints what it saw as JSON.
"""

import asyncio
import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

MODEL = "tiny"


def text(prompt: str, name: str = "text_input") -> triton.InferInput:
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([prompt.encode()], dtype=np.object_))
    return tensor


def numbers(name: str, values: list[Any], datatype: str, kind: type) -> triton.InferInput:
    tensor = triton.InferInput(name, [len(values)], datatype)
    tensor.set_data_from_numpy(np.array(values, dtype=kind))
    return tensor


def told(result: Any) -> dict[str, Any]:
    """A result in JSON's types."""
    response = result.get_response()
    known = {output.name: result.as_numpy(output.name).tolist() for output in response.outputs}
    known = {name: [v.decode() if isinstance(v, bytes) else v for v in values] for name, values in known.items()}
    final = response.parameters["triton_final_response"].bool_param if response.parameters else None
    return {"id": response.id, "final": final, **known}


def refused(call: Any) -> list[str]:
    try:
        call()
    except InferenceServerException as error:
        return [error.status() or "", error.message()]
    return ["not refused"]


def streamed(client: triton.InferenceServerClient, requests: list[dict[str, Any]], num_final: int) -> list[Any]:
    """Until that many requests have ended, or failed."""
    news: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: news.put(error if error is not None else told(result)))
    for request in requests:
        client.async_stream_infer(MODEL, **request)
    seen: list[Any] = []
    while num_final:
        item = news.get(timeout=60)
        seen.append(item.message() if isinstance(item, InferenceServerException) else item)
        num_final -= isinstance(item, InferenceServerException) or item["final"]
    client.stop_stream()
    return seen


async def asynchronous(address: str) -> dict[str, Any]:
    async with triton_aio.InferenceServerClient(address) as client:
        assert await client.is_model_ready(MODEL)
        return told(await client.infer(MODEL, [text("What is")], request_id="aio"))


def main(address: str) -> dict[str, Any]:
    stream = numbers("stream", [True], "BOOL", np.bool_)
    with triton.InferenceServerClient(address) as client:
        metadata = client.get_model_metadata(MODEL, as_json=True)
        sampling = text(
            json.dumps({"temperature": 0.5, "top_k": 7, "stop": ["zz"], "logit_bias": {"5": 1.5}}),
            "sampling_parameters",
        )
        typed = [numbers("temperature", [0.7], "FP32", np.float32), numbers("max_tokens", [90], "INT32", np.int32)]
        ids = numbers("input_ids", [5, 6, 7], "INT64", np.int64)
        outputs = [triton.InferRequestedOutput("text_output")]
        return {
            "ready": [client.is_server_live(), client.is_server_ready(), client.is_model_ready(MODEL)],
            "strange_ready": [client.is_model_ready("other"), client.is_model_ready(MODEL, "2")],
            "server": client.get_server_metadata(as_json=True)["name"],
            "inputs": {tensor["name"]: tensor["datatype"] for tensor in metadata["inputs"]},
            "outputs": [tensor["name"] for tensor in metadata["outputs"]],
            "whole": told(client.infer(MODEL, [text("What is"), sampling], request_id="r1")),
            "ids": told(
                client.infer(MODEL, [ids, *typed], outputs=outputs, parameters={"seed": 3, "ignore_eos": False})
            ),
            "two": told(client.infer(MODEL, [text("What is")], parameters={"n": 2})),
            "asynchronous": asyncio.run(asynchronous(address)),
            "streamed": streamed(
                client,
                [
                    {"inputs": [text("What is"), stream], "request_id": "a", "enable_empty_final_response": True},
                    {"inputs": [text("What is"), stream], "request_id": "b"},
                    {"inputs": [text("What is")], "request_id": "c"},
                    {"inputs": [text("")], "request_id": "d"},
                ],
                4,
            ),
            "refused": {
                "model": refused(lambda: client.infer("other", [text("a")])),
                "name": refused(lambda: client.infer(MODEL, [text("a")], parameters={"temperatur": 1.0})),
                "value": refused(lambda: client.infer(MODEL, [text("a")], parameters={"temperature": 9.0})),
                "type": refused(lambda: client.infer(MODEL, [text("a")], parameters={"max_tokens": "many"})),
                "no prompt": refused(lambda: client.infer(MODEL, typed)),
                "stream": refused(lambda: client.infer(MODEL, [text("a"), stream])),
                "output": refused(lambda: client.infer(MODEL, [text("a")], outputs=[triton.InferRequestedOutput("x")])),
            },
        }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
