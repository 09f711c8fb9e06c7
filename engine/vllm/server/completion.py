"""One request to `/v1/completions` of vLLM, or to where it takes images, and the events of its answer: token ids in,
token ids out."""

from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import Struct

from baton_proto.images import Seen
from baton_proto.pooling import Pooling
from baton_proto.sampling import PromptLogprobs, TokenLogprobs
from engine.sequences.sequence import Sequence
from engine.vllm.cache import salt_of
from engine.vllm.prompt_scores import Rows, scores_of_answer
from engine.vllm.sampling import vllm_grammar, vllm_sampling
from engine.vllm.server import image_prompt
from engine.vllm.server.pooled import PATHS, pooled, question
from engine.vllm.server.server import RefusedError, refusal
from runtime.errors import ProtocolError

PATH = "/v1/completions"
END = b"[DONE]"
FOR_ANOTHER: dict[str, Any] = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
FOR_ANOTHER |= {"max_tokens": 1, "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [], "logprobs": None}
FOR_ANOTHER |= {"prompt_logprobs": None}
"""What differs for a prompt whose answer another server gives. Nothing but its length ends it, because connectors may
offer nothing of a prompt that ends otherwise."""
TOKEN = "token_id:"  # how a token's id is spelled where its text would stand


@dataclass(frozen=True, slots=True)
class Completion:
    """`streams`: else the answer comes at once, as one with log-probabilities of the prompt has to."""

    request_id: str
    body: bytes
    streams: bool = True
    prompt: List[int] = ()
    prompt_logprobs: int | None = None
    num_images: int = 0  # of the prompt; it goes another way than one without
    num_replayed: int = 0  # tokens of the answer that end the prompt
    pooling: Pooling | None = None
    adapter: str = ""

    @property
    def path(self) -> str:
        if self.pooling is not None:
            return PATHS[self.pooling.task]
        return image_prompt.PATH if self.num_images else PATH


@dataclass(frozen=True, slots=True)
class Item:
    """News of a request, with the names that vLLM's core gives them."""

    request_id: str
    new_token_ids: List[int] = ()
    new_logprobs: List[TokenLogprobs] = ()
    finish_reason: str | None = None  # a reason that vLLM has not is an error's text
    events: tuple[Any, ...] = ()
    refused: bool = False  # the server says that the request is wrong
    transfer: bytes = b""  # of a prompt for another server: what its connector says of where the KV is, as JSON
    prompt_logprobs: PromptLogprobs | None = None
    seen: Seen | None = None  # with the first token, where the prompt has images
    pooled: bytes = b""  # see Delta


class _Logprobs(Struct):
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]


class _Choice(Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: Rows | None = None


class _Chunk(Struct):
    choices: list[_Choice]


class _Whole(_Chunk):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_chunk = msgspec.json.Decoder(_Chunk)
_image_chunk = msgspec.json.Decoder(image_prompt.Chunk)
_whole = msgspec.json.Decoder(_Whole)


def completion(sequence: Sequence, prompt: List[int], model: str, eos_token_ids: frozenset[int]) -> Completion:
    """prompt: with as much of the answer as the server shall take for a part of it. model: the server's name for it. A
    seed leaves only when the caller gave one, because vLLM on CPUs ends at a seeded prompt of several steps."""
    model = sequence.adapter or model
    if sequence.pooling is not None:
        return _pooling(sequence, sequence.pooling, prompt, model)
    sampling, images = sequence.sampling, sequence.images
    num_replayed = len(prompt) - sequence.num_prompt_tokens
    body = vllm_sampling(sampling, num_replayed, eos_token_ids)
    del body["detokenize"]  # its server always does
    body["vllm_xargs"] = body.pop("extra_args")
    if not sampling.is_seeded:
        del body["seed"]
    if sampling.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    if sampling.grammar is not None and not sequence.prefill_only:
        body["structured_outputs"] = vllm_grammar(sampling.grammar)
    body |= _scheduling(sequence)
    if "logprob_token_ids" in body:
        body["logprobs"] = 1  # any number: its server wants one
    if sequence.prefill_only:
        body |= FOR_ANOTHER
        body.pop("logprob_token_ids", None)
    elif sequence.transfer:
        body["kv_transfer_params"] = msgspec.Raw(sequence.transfer)
    streams = not sequence.prefill_only and sampling.prompt_logprobs is None
    body |= {"model": model, "prompt": prompt, "stream": streams}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    scored = body["prompt_logprobs"]
    if images:
        body = image_prompt.question(body, prompt, images)
    encoded = msgspec.json.encode(body)
    asked = Completion(sequence.request_id, encoded, streams, prompt, scored)
    return replace(asked, num_images=len(images), num_replayed=num_replayed, adapter=sequence.adapter)


def _pooling(sequence: Sequence, pooling: Pooling, prompt: List[int], model: str) -> Completion:
    body = question(pooling, prompt, {"model": model, **_scheduling(sequence)})
    return Completion(sequence.request_id, body, streams=False, pooling=pooling, adapter=sequence.adapter)


def _scheduling(sequence: Sequence) -> dict[str, Any]:
    salt = salt_of(sequence.hash_seed)
    fields: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
    return fields | ({"priority": -sequence.priority} if sequence.priority else {})


def item_of(asked: Completion, data: bytes) -> Item:
    """What an event says. Raises ProtocolError, or RefusedError for an error in the place of a chunk."""
    try:
        if asked.num_images:
            return _image_item(asked, _image_chunk.decode(data))
        choices = _chunk.decode(data).choices
    except msgspec.DecodeError:
        raise refusal(data) from None
    if not choices:
        return Item(asked.request_id)
    return _item(asked.request_id, choices[0])


def whole_item_of(asked: Completion, data: bytes) -> Item:
    """What an answer says that does not stream. Any thread. Raises ProtocolError."""
    if asked.pooling is not None:
        return Item(asked.request_id, finish_reason="stop", pooled=pooled(asked.pooling.task, data))
    try:
        answer = _whole.decode(data)
        choice, transfer = answer.choices[0], bytes(answer.kv_transfer_params)
    except (msgspec.DecodeError, IndexError) as error:
        raise ProtocolError("vLLM", f"the answer to a prompt cannot be read: {error}") from error
    item = replace(_item(asked.request_id, choice), transfer=b"" if transfer == b"null" else transfer)
    if asked.prompt_logprobs is None:
        return item
    return replace(
        item, prompt_logprobs=scores_of_answer(asked.prompt, choice.prompt_logprobs or (), asked.prompt_logprobs)
    )


def _item(request_id: str, choice: _Choice) -> Item:
    if choice.token_ids is None:
        raise ProtocolError("vLLM", "sends no token ids: this version does not know `return_token_ids`")
    logprobs = [] if choice.logprobs is None else _scores(choice.logprobs)
    return Item(request_id, choice.token_ids, logprobs, choice.finish_reason)


def _image_item(asked: Completion, chunk: image_prompt.Chunk) -> Item:
    """Raises RefusedError when the server has not taken the images."""
    if not chunk.choices:
        return Item(asked.request_id)
    choice, seen = chunk.choices[0], None
    if chunk.prompt_token_ids is not None:
        seen = chunk.seen(asked.num_replayed)
        if len(seen.places) != asked.num_images:
            raise RefusedError(400, image_prompt.BLIND)
    logprobs = [] if choice.logprobs is None else image_prompt.scores(choice.logprobs)
    return Item(asked.request_id, choice.token_ids or (), logprobs, choice.finish_reason, seen=seen)


def _scores(of: _Logprobs) -> list[TokenLogprobs]:
    """All alternatives that are told, the sampled token among them. Raises ProtocolError."""
    try:
        return [
            TokenLogprobs(
                logprob, sorted(((_id(token), value) for token, value in top.items()), key=lambda one: -one[1])
            )
            for logprob, top in zip(of.token_logprobs, of.top_logprobs, strict=True)
        ]
    except ValueError as error:
        raise ProtocolError("vLLM", f"log-probabilities that are none: {error}") from error


def _id(token: str) -> int:
    return int(token.removeprefix(TOKEN))
