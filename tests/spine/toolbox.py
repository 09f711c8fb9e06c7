"""What agents work with in these tests: tools, a template that shows calls, and a service with both."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.service import Service, running_service
from tests.tiny_model import write_tiny_model

TEMPLATE = (
    "{{ (tools or []) | length }}{% for message in messages %}<|im_start|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>{% endfor %}"
)
PATHS: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"enum": ["a.py", "b.py"]}, "line": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["path", "line"],
    "additionalProperties": False,
}
NAMES = [f"tool_{index}" for index in range(40)]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "Reads.", "parameters": PATHS}} for name in NAMES
]


@asynccontextmanager
async def agent_service(folder: Path) -> AsyncIterator[Service]:
    model = write_tiny_model(folder / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    async with running_service(model, 1, 1, {"router": {"tool_parser": "hermes"}}) as service:
        yield service
