"""What can go wrong with a call: one kind of refusal, the HTTP status of every error, and the error object of each dialect."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from trivium import errors

_log = logging.getLogger("trivium.server")


class Refusal(Exception):
    """A call that is not answered. status: of HTTP. code: a stable identifier. headers: what goes with it."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.headers = dict(headers or {})


def bad(message: str, param: str | None = None, code: str = "invalid_request") -> Refusal:
    """The client's own mistake."""
    return Refusal(400, code, message, param)


def unavailable(message: str, seconds: float = 1.0, code: str = "unavailable") -> Refusal:
    """Not now; `seconds`: when to try again."""
    return Refusal(503, code, message, headers={"retry-after": str(max(1, round(seconds)))})


_STATUS: tuple[tuple[type[errors.TriviumError], int], ...] = (
    (errors.ClosedError, 503), (errors.ModelNotFoundError, 404), (errors.DeadlineError, 504), (errors.InvalidRequestError, 400),
    (errors.UnsupportedError, 400), (errors.CapacityError, 400),
)  # fmt: skip
"""The first that fits; whatever else is trivium's own fault."""


def refusal(error: BaseException) -> Refusal:
    """Any error as a refusal. What nobody foresaw is logged, and its words stay here."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, errors.OverloadedError):
        seconds = error.retry_after
        headers = {"retry-after": str(max(1, round(seconds))), "retry-after-ms": str(max(1, round(seconds * 1e3)))}
        return Refusal(429, error.code, str(error), error.param, headers)
    if isinstance(error, errors.TriviumError):
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
        if status == 500:
            _log.error("a request failed: %s", error, exc_info=error)
        return Refusal(status, error.code, str(error), error.param, {"retry-after": "1"} if status == 503 else None)
    _log.error("a call failed in the server itself", exc_info=error)
    return Refusal(500, "internal_error", "the server failed at this request; its log says why")


ErrorShape = Callable[[Refusal, str], Mapping[str, Any]]
"""Of (what went wrong, request id): a dialect's error object."""

_OPENAI = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error", 503: "server_error",
    504: "server_error",
}  # fmt: skip
_ANTHROPIC = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip


def openai_error(r: Refusal, request_id: str) -> dict[str, Any]:
    """{"error": {"message", "type", "param", "code"}}."""
    kind = _OPENAI.get(r.status, "invalid_request_error" if r.status < 500 else "server_error")
    return {"error": {"message": r.message, "type": kind, "param": r.param, "code": r.code}}


def anthropic_status(r: Refusal) -> Refusal:
    """With Anthropic's own status of a server that has too much to do; 429 is for what one client asks too often."""
    return Refusal(529, r.code, r.message, r.param, r.headers) if r.code == errors.OverloadedError.code else r


def anthropic_error(r: Refusal, request_id: str) -> dict[str, Any]:
    """{"type": "error", "error": {"type", "message"}, "request_id"}."""
    kind = _ANTHROPIC.get(anthropic_status(r).status, "invalid_request_error" if r.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": r.message}, "request_id": request_id}


def ollama_error(r: Refusal, request_id: str) -> dict[str, Any]:
    """{"error": message}."""
    return {"error": r.message}
