"""Refuses what foreign web pages ask. A browser sends the requests of any page to a service on its machine, under any
name that the page's owner points at it, and sends a text with POST without asking first."""

from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.http.errors import ErrorBody, ErrorForm
from router.api.http.json_response import json_response
from runtime.address import is_loopback

JSON = b"application/json"
FORM = b"multipart/form-data"
FORMS_AT = ("/v1/files",)  # a page cannot hide its origin, which is checked as well
WITH_BODY = ("POST", "PUT", "PATCH", "DELETE")
ALL_ORIGINS = "*"
KEY = "or give the service a key: security.api_key_file"

Refusal = tuple[int, ErrorBody]


class WebPages:
    """`asks_for_key`: no page has a key of its own accord, so its origin and the name that it asks for do not matter.
    `insecure`: other machines may ask without a key, under names that nobody here knows. `origins`: of pages that may
    ask; ALL_ORIGINS: any."""

    def __init__(self, host: str, origins: Sequence[str], asks_for_key: bool, insecure: bool) -> None:
        self._host = host.lower()
        self.origins = origins
        self._checks_origin = not asks_for_key and ALL_ORIGINS not in origins
        self._checks_host = not asks_for_key and not insecure

    def around(self, app: ASGIApp, form_at: Callable[[str], ErrorForm]) -> ASGIApp:
        async def checked(scope: Scope, receive: Receive, send: Send) -> None:
            refused = self.refusal(scope)
            if refused is None:
                await app(scope, receive, send)
                return
            status, error = refused
            await json_response(form_at(scope["path"])(status, error, ""), status)(scope, receive, send)

        return checked

    def refusal(self, scope: Scope) -> Refusal | None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
        if self._checks_host and (strange := [host for host in hosts if not self._is_ours(host)]):
            problem = f"{strange[0][:80]!r} is none of this service's names, which are localhost and router.host; {KEY}"
            return 403, ErrorBody(f"host: {problem}", "permission_error", "host", "foreign_host")
        if self._checks_origin and (foreign := [one for one in origins if not self._may_ask(one, hosts)]):
            problem = f"{foreign[0][:80]!r} is a foreign page: name it in router.cors_origins, {KEY}"
            return 403, ErrorBody(f"origin: {problem}", "permission_error", "origin", "foreign_origin")
        return _no_json(scope) if scope["method"] in WITH_BODY else None

    def _is_ours(self, host: str) -> bool:
        name = _name(host.lower())
        return is_loopback(name) or name.endswith(".localhost") or name == self._host

    def _may_ask(self, origin: str, hosts: list[str]) -> bool:
        """A page of this service itself has its name and port for an origin."""
        try:
            own = urlsplit(origin).netloc.lower()
        except ValueError:
            return False
        return origin in self.origins or (own != "" and hosts == [own])


def _name(host: str) -> str:
    """The name in HOST:PORT, without a port too."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _no_json(scope: Scope) -> Refusal | None:
    """Refuses a body that is said to be something else, or nothing: a page sends such without asking first."""
    told = [value for name, value in scope["headers"] if name == b"content-type"]
    wanted = (JSON, FORM) if scope["path"] in FORMS_AT else (JSON,)
    if told and all(kind.partition(b";")[0].strip().lower() in wanted for kind in told):
        return None
    if not any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 "))
        for name, value in scope["headers"]
    ):
        return None
    kind = repr(told[0].decode("latin-1")[:80]) if told else "missing"
    problem = f"content-type: is {kind}; send the body as JSON with `content-type: application/json`"
    return 415, ErrorBody(problem, "invalid_request_error", "content-type", "unsupported_media_type")
