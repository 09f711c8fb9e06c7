"""Prompts with images: the question and the answers of `/inference/v1/generate`, where vLLM takes images with token
ids. A server has it with `--enable-scale-out`.
"""

from collections.abc import Sequence as List
from typing import Any

from msgspec import Struct

from baton_proto.images import Image, Seen, unplaced
from baton_proto.sampling import TokenLogprobs
from engine.vllm.image_prompts import seen

PATH = "/inference/v1/generate"
OUTER = ("model", "stream", "cache_salt", "priority", "return_token_ids")
"""Fields of a completion's body that are no sampling parameters."""
NOT_THERE = (403, 404)  # statuses of a server without the endpoint
BLIND = "it takes no images: this version of vLLM does not put them into prompts of token ids"


class _Top(Struct):
    token_id: int
    logprob: float


class _Token(_Top):
    top_logprobs: list[_Top] = []


class _Logprobs(Struct):
    content: list[_Token] | None = None


class _Choice(Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Place(Struct):
    offset: int
    length: int


class Chunk(Struct):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None  # in the first chunk, as are the next ones
    mm_placeholders: dict[str, list[_Place]] | None = None

    def seen(self, num_replayed: int) -> Seen:
        places = (self.mm_placeholders or {}).get("image", [])
        return seen(self.prompt_token_ids or [], ((place.offset, place.length) for place in places), num_replayed)


def question(completion: dict[str, Any], prompt: List[int], images: List[Image]) -> dict[str, Any]:
    """`completion`: the body that asks for the same at `/v1/completions`; it is taken apart."""
    outer = {name: completion.pop(name) for name in OUTER if name in completion}
    del completion["prompt"], completion["return_tokens_as_token_ids"]
    completion["extra_args"] = completion.pop("vllm_xargs")
    parts = [{"type": "image_url", "url": image.url, "uuid": image.name} for image in images]
    return outer | {"token_ids": unplaced(prompt, images), "content_parts": parts, "sampling_params": completion}


def scores(of: _Logprobs) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(token.logprob, [(top.token_id, top.logprob) for top in token.top_logprobs])
        for token in of.content or ()
    ]
