import pytest

from runtime.errors import ConfigError
from runtime.security.callers import Caller, parse_callers

LIMITED = "k2 tenant=acme max_priority=-1 requests_per_minute=60 tokens_per_minute=1000"


def test_a_line_names_the_key_and_what_it_allows() -> None:
    (plain, own), (limited, acme) = parse_callers(f"k1\n\n  {LIMITED}\n", "file")
    assert (plain.reveal(), limited.reveal()) == ("k1", "k2")
    assert acme == Caller("acme", -1, 60, 1000, key=acme.key)
    assert acme.key.startswith("key-")
    assert acme.key != own.key
    assert (own.max_priority, own.requests_per_minute, own.tokens_per_minute) == (None, None, None)


def test_keys_that_name_no_tenant_are_tenants_of_their_own_that_do_not_show_them() -> None:
    (_, one), (_, other), (_, again) = parse_callers("first\nsecond max_priority=2\nfirst", "file")
    assert one.tenant != other.tenant
    assert one == again
    assert one.tenant
    assert "first" not in one.tenant


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("key hush", "line 2 holds more than one word"),
        ("key tenat=hush", "line 2 .* NAME=VALUE, each once, of tenant, max_priority"),
        ("key tenant=a tenant=hush", "line 2 holds"),
        ("key max_priority=hush", "line 2: Expected `int"),
        ("key max_priority=2147483648", "<= 2147483647"),
        ("key requests_per_minute=0", "requests_per_minute"),
        ("key tokens_per_minute=-5", "tokens_per_minute"),
        ("key tenant=", "tenant"),
        ("key tenant=hüsh", "tenant"),
        ("hüsh tenant=a", "line 2 holds"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_and_not_shown(line: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_callers(f"good\n{line}", "file")
    assert "hush" not in str(caught.value)
    assert "key " not in str(caught.value).replace("the key ", "")
