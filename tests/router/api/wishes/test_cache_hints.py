import json
from typing import Any

import pytest

from baton_proto.worker import NO_HINT, CacheHint
from router.api.dialects.json_body import decode_body
from router.api.openai.types import ChatBody
from runtime.errors import InvalidRequestError

USER = {"role": "user", "content": "Hi"}


def marked(**mark: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"} | mark}]}


def hint(fields: dict[str, Any]) -> CacheHint:
    return decode_body(json.dumps({"messages": [USER]} | fields).encode(), ChatBody).hint()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, NO_HINT),
        ({"keep_cache_s": 7.5}, CacheHint(8)),
        ({"keep_cache_s": 1e300}, CacheHint(3600)),
        ({"drop_cache": True}, CacheHint(drop=True)),
        ({"prompt_cache_retention": "in_memory"}, NO_HINT),
        ({"prompt_cache_retention": "24h", "keep_cache_s": 9}, CacheHint(3600)),
        ({"prompt_cache_key": "session-7"}, CacheHint(300)),
        ({"prompt_cache_key": "", "keep_cache_s": 9}, CacheHint(9)),
        ({"prompt_cache_options": {"ttl": "30m"}}, CacheHint(1800)),
        ({"messages": [marked(), USER]}, CacheHint(300)),
        ({"messages": [marked(ttl="5m"), marked(ttl="1h", scope="global"), USER]}, CacheHint(3600)),
    ],
)
def test_the_longest_time_for_which_a_body_asks_to_stay_cached_counts(
    fields: dict[str, Any], expected: CacheHint
) -> None:
    assert hint(fields) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keep_cache_s": -1, "prompt_cache_retention": "24h"}, "keep_cache_s: is -1.0, must be 0 or more seconds"),
        ({"keep_cache_s": 1, "drop_cache": True}, "drop_cache: contradicts keep_cache_s"),
        ({"prompt_cache_key": "a", "drop_cache": True}, "drop_cache: contradicts keep_cache_s, and what else asks"),
        (
            {"prompt_cache_retention": "x" * 300},
            f"prompt_cache_retention: is '{'x' * 100}'..., must be one of in_memory, in-memory, 24h",
        ),
        (
            {"messages": [USER, marked(ttl="9h")]},
            r"messages\[1\].content\[0\].cache_control.ttl: is '9h', must be one of 5m, 1h",
        ),
    ],
)
def test_hints_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        hint(fields)
