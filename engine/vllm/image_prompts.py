"""Prompts with images, which vLLM inside a worker makes as its own server does: pictures and their names go in beside
the chat template's tokens."""

import asyncio
from array import array
from collections.abc import Iterable, Sequence as List
from typing import Any

from baton_proto.images import Seen, unplaced
from engine.sequences.sequence import Sequence
from engine.vllm.private_names import IMAGES, NAMES, missing


class ImagePrompts:
    """Event loop only."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._turn = asyncio.Lock()

    async def make(self, sequence: Sequence, prompt: List[int]) -> Any:
        """`prompt`: what vLLM takes for the prompt when it begins. Returns it as vLLM has it, whose tokens the sequence
        then has, too. One prompt at a time, so that the pictures of one are in memory. Raises what vLLM's checks
        raise."""
        from vllm.inputs import TokensPrompt
        from vllm.multimodal.media import MediaConnector

        images, told = sequence.images, self._llm.vllm_config.model_config.multimodal_config.media_io_kwargs
        connector = MediaConnector(media_io_kwargs=told)
        async with self._turn:
            try:
                pictures = await asyncio.gather(*(connector.fetch_image_async(image.url) for image in images))
            except Exception as error:  # decoders of pictures raise what they like
                raise ValueError(f"an image cannot be read: {error}") from error
            written = TokensPrompt(
                prompt_token_ids=unplaced(prompt, images),
                multi_modal_data={"image": pictures},
                multi_modal_uuids={"image": [image.name for image in images]},
            )
            # Each request takes all of its pictures along: vLLM's core may lack those of one that it never got.
            (made,) = await self._llm.input_processor.renderer.render_cmpl_async([written], skip_mm_cache=True)
        places = [(place.offset, place.length) for place in made["mm_placeholders"]["image"]]
        sequence.seen = seen(made["prompt_token_ids"], places, len(prompt) - sequence.num_prompt_tokens)
        sequence.token_ids[: len(prompt)] = made["prompt_token_ids"]
        sequence.num_prompt_tokens += len(made["prompt_token_ids"]) - len(prompt)
        return made


def seen(token_ids: List[int], places: Iterable[tuple[int, int]], num_replayed: int) -> Seen:
    """The prompt without its last tokens, which are output that the client has."""
    return Seen(array("I", token_ids[: len(token_ids) - num_replayed]).tobytes(), list(places))


def sees(model_config: Any) -> bool:
    """Whether vLLM takes images for this model; which ones it refuses itself."""
    return bool(model_config.is_multimodal_model) and not any(missing(name for name in NAMES if name.feature == IMAGES))
