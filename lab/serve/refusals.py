"""What a client is told that gets no answer: a status, and an error in three parts in the form that OpenAI's has."""

from __future__ import annotations

from typing import Any

from eagle3core.errors import ConfigError, DecodeError, Eagle3Error
from lab.errors import LabError

OVERLOADED, CLOSING = 429, 503
# By status: what OpenAI's clients know the error as (type, code).
KINDS: dict[int, tuple[str, str | None]] = {
    400: ("invalid_request_error", None),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    OVERLOADED: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "internal_error"),
    CLOSING: ("server_error", "closing"),
}


class Refused(LabError):
    """A request that gets no answer.

    Args:
        status: of HTTP. param: the field of the request that is to blame, if one is. code: more exact than the status.
    """

    def __init__(
        self, status: int, what: str, allowed: str, remedy: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(what, allowed, remedy)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """As JSON: OpenAI's four keys, and the three parts one by one."""
        kind, code = KINDS.get(self.status, KINDS[400 if self.status < 500 else 500])
        parts = {"what": self.what, "allowed": self.allowed, "do": self.remedy}
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code or code, **parts}}


def refusal_of(error: Eagle3Error, *, is_closing: bool) -> Refused:
    """The refusal that an error of the engine's becomes; `is_closing`: the server ends, and takes requests with it."""
    if is_closing and isinstance(error, ConfigError):
        return closing()
    if isinstance(error, ConfigError):
        return Refused(400, error.what, error.allowed, error.remedy)
    code = "decode_error" if isinstance(error, DecodeError) else None
    return Refused(500, error.what, error.allowed, error.remedy, code=code)


def closing() -> Refused:
    """What is told when the server ends."""
    return Refused(CLOSING, "the server is closing", "requests while it runs", "ask again once it has been started")
