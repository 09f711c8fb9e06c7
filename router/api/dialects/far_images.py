"""Puts the images themselves where a request has their addresses."""

import asyncio
from collections.abc import Sequence
from typing import Final

from router.api.dialects.image_parts import MAX_IMAGES, FarImage, image_of_bytes
from router.api.wishes.validation import Chat, Prompt
from router.requests.body_budget import Hold
from router.requests.frontend import FetchImage
from runtime.errors import InvalidRequestError

FETCH_S: Final = 20.0  # for all of a request, so that a slow server holds no request for long


async def fetch_images(fetch: FetchImage, prompts: Sequence[Prompt], held: Hold) -> None:
    """One after the other. Raises InvalidRequestError, UnavailableError."""
    chats = [prompt for prompt in prompts if isinstance(prompt, Chat)]
    lists = [message["images"] for chat in chats for message in chat.messages if "images" in message]
    far = [(images, i, image) for images in lists for i, image in enumerate(images) if isinstance(image, FarImage)]
    where = ""
    try:
        async with asyncio.timeout(FETCH_S):
            for number, (images, i, image) in enumerate(far):
                where = image.where
                if number == MAX_IMAGES:
                    raise InvalidRequestError(where, f"is one address too many: a request has {MAX_IMAGES} at most")
                kind, data = await fetch(where, image.url, held)
                images[i] = await asyncio.to_thread(image_of_bytes, where, kind, data)
    except TimeoutError as error:
        problem = f"does not come in time: all images of a request have {FETCH_S:g} s; send it as a data URL"
        raise InvalidRequestError(where, problem) from error
