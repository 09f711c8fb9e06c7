"""Messages on NATS that are left out, because they are malformed or of another version."""

import structlog

from runtime.sparing import Sparing

log = structlog.get_logger()
_spare = Sparing(1)


def skipped(what: str, subject: str, error: Exception) -> None:
    """Logs it, once a minute for each subject: whoever sends one sends many."""
    _spare(log.warning, f"malformed {what} skipped", subject, subject=subject, error=str(error))
