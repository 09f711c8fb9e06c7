"""Prompts with images in front of an engine that has no eyes."""

import asyncio
from pathlib import Path
from typing import Any

import httpx

from tests.service import running_service
from tests.tiny_model import VOCAB_SIZE, write_tiny_model
from tests.vllm.tiny_idefics import ADDED, know_images, picture

IMAGE = {"type": "image_url", "image_url": {"url": picture("red")}}


async def test_an_engine_that_takes_no_images_says_so(tmp_path: Path) -> None:
    """Also those that cannot go with images are named, and a text beside them is served."""
    fetched = asyncio.Event()

    async def picture_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: image/gif\r\ncontent-length: 4\r\n\r\nGIF8")
        fetched.set()
        writer.close()

    pictures = await asyncio.start_server(picture_server, "127.0.0.1", 0)
    host = f"127.0.0.1:{pictures.sockets[0].getsockname()[1]}"
    far = {"type": "image_url", "image_url": {"url": f"http://{host}/a.gif"}}
    know_images(write_tiny_model(tmp_path, vocab_size=VOCAB_SIZE + len(ADDED)))
    settings: dict[str, Any] = {"router": {"image_hosts": [host]}}
    async with (
        pictures,
        running_service(tmp_path, 0, 1, **settings) as service,
        httpx.AsyncClient(base_url=service.http_url) as client,
    ):
        for more, status, said in (
            ({"messages": [{"role": "user", "content": [far]}]}, 400, "it takes no images: vLLM does"),
            ({}, 400, "it takes no images: vLLM does"),
            ({"prompt_logprobs": 1}, 400, "prompt_logprobs: cannot be had with images"),
            ({"truncate_prompt_tokens": 9}, 400, "truncate_prompt_tokens: cannot be had with images"),
            ({"messages": [{"role": "user", "content": "a"}]}, 200, ""),
        ):
            body = {"messages": [{"role": "user", "content": [IMAGE]}], "max_tokens": 1, **more}
            answer = await client.post("/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == status, answer.text
            assert said in answer.text
        assert fetched.is_set()
        counted = await client.post("/tokenize", json={"messages": [{"role": "user", "content": [IMAGE]}]})
        assert counted.status_code == 400
        assert "have images, which have no tokens before a server has made them" in counted.text
