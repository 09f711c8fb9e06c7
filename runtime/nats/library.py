"""What Baton uses of nats-py, loaded without aiohttp.

nats-py imports aiohttp for WebSocket addresses, which Baton does not use. That import costs each process 0.3 s of CPU.
"""

import sys

_without = {} if "aiohttp" in sys.modules else {"aiohttp": None}
sys.modules |= _without  # type: ignore[arg-type]  # None: the import fails, as where aiohttp is not installed
try:
    from nats import errors as nats_errors
    from nats.aio.client import Client, Srv
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription
    from nats.js import JetStreamContext, errors as js_errors
    from nats.js.api import DiscardPolicy, PubAck, RawStreamMsg, StorageType, StreamConfig
finally:
    for _name in _without:
        del sys.modules[_name]

__all__ = [
    "Client",
    "DiscardPolicy",
    "JetStreamContext",
    "Msg",
    "PubAck",
    "RawStreamMsg",
    "Srv",
    "StorageType",
    "StreamConfig",
    "Subscription",
    "js_errors",
    "nats_errors",
]
