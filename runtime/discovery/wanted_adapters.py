"""The adapters that operators have loaded and unloaded while a service runs, in a NATS key-value bucket: a worker that
starts again has them, too."""

from collections.abc import Mapping

import msgspec

from runtime.errors import UnavailableError
from runtime.nats.bucket import bucket_config
from runtime.nats.client import NATS_ERRORS, NatsClient
from runtime.nats.subjects import adapters_key, adapters_stream

KEY = "wanted"
UNLOADED = ""  # in the place of a folder

_read = msgspec.json.Decoder(dict[str, str]).decode


async def changed_adapters(nats: NatsClient) -> Mapping[str, str]:
    """Folders by name; UNLOADED of those that are to be had no more. Raises UnavailableError."""
    try:
        kept = await nats.stored_messages(adapters_stream(nats.namespace), adapters_key(nats.namespace, KEY), 1, 1)
        return _read(kept[-1].payload) if kept else {}
    except NATS_ERRORS as error:
        raise UnavailableError(f"NATS does not tell which adapters are wanted: {error!r}") from error


async def keep_adapter(nats: NatsClient, name: str, folder: str) -> None:
    """`folder`: see changed_adapters. Raises UnavailableError."""
    wanted = {**await changed_adapters(nats), name: folder}
    try:
        await nats.ensure_stream(bucket_config(adapters_stream(nats.namespace), adapters_key(nats.namespace, ">")))
        await nats.publish_stored(adapters_key(nats.namespace, KEY), msgspec.json.encode(wanted))
    except NATS_ERRORS as error:
        raise UnavailableError(f"NATS does not keep it for workers that start again: {error!r}") from error
