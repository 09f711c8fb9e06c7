"""Values of serving.yaml with their bounds. A `description` says them where numbers alone would not."""

from typing import Annotated, Final, Literal

from msgspec import Meta

MAX_INT: Final = 2**31 - 1
MAX_SECONDS: Final = 10**6  # eleven days; sockets and condition variables take not much more
MAX_WORKERS: Final = 1024

Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1, le=MAX_INT)]
Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Workers = Annotated[int, Meta(ge=0, le=MAX_WORKERS)]
SomeWorkers = Annotated[int, Meta(ge=1, le=MAX_WORKERS)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
Milliseconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS * 1000)]
Weight = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(gt=0, lt=1)]
Threads = Annotated[int, Meta(ge=0, le=1024)]
ToolParser = Literal[
    "auto", "none", "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "deepseek_v3", "harmony"
]
ReasoningParser = Literal["auto", "none", "think", "mistral", "harmony"]
BlockSize = Annotated[Literal[16, 32, 64, 128], Meta(description="auto, 16, 32, 64 or 128")]
AutoPositive = Annotated[int, Meta(ge=1, le=MAX_INT, description="auto, or a whole number of at least 1")]
Text = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]{1,4096}\Z", description="one line of text")]
HostPattern = Annotated[
    str,
    Meta(
        pattern=r"^(\*|(\*\.)?[a-z0-9-]+(\.[a-z0-9-]+)*|\[[0-9a-f:.]+\])(:\d{1,5})?\Z",
        description="HOST or HOST:PORT in lower case, *.DOMAIN or *",
    ),
]
NATS_SCHEMES: Final = ("nats", "tls")
NatsUrl = Annotated[
    str,
    Meta(
        pattern=rf"^(({'|'.join(NATS_SCHEMES)})://|(?!.*://))[^\x00-\x1f\x7f]{{1,4096}}\Z",
        description="nats://HOST:PORT or tls://HOST:PORT",
    ),
]
Namespace = Annotated[
    str, Meta(pattern=r"^[a-z0-9_-]{1,64}\Z", description="a name of up to 64 lower-case letters, digits, - and _")
]
Size = Annotated[
    str,
    Meta(
        pattern=r"^ *(auto|\d{1,12}(\.\d{1,6})? *([KMG]i?B|B)?) *\Z",
        description="auto, or a size in B, KB, MB, GB, KiB, MiB or GiB such as 512MiB",
    ),
]


def in_order(low: str, least: float, high: str, most: float) -> None:
    """Raises ValueError when `least`, the value of the key `low`, is above `most`."""
    if least > most:
        raise ValueError(f"{low} is {least:g}, above {high}, which is {most:g}: lower the one or raise the other")
