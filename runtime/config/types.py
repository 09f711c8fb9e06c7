"""Numbers of serving.yaml with their bounds."""

from typing import Annotated

from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Milliseconds = Annotated[float, Meta(gt=0)]
Weight = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, lt=1)]
