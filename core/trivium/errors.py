"""Every error trivium raises on purpose.

Each says what was asked, what is possible and what to do. `code` is stable: servers and tools may match on it.
"""

from __future__ import annotations


class TriviumError(Exception):
    """Base of all errors; `code` is a stable identifier, `param` names the offending field where there is one."""

    code = "error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequestError(TriviumError, ValueError):
    """A request (prompt, sampling parameter, flag) that can't be served as asked; refused before it takes memory."""

    code = "invalid_request"


class ContextLengthError(InvalidRequestError):
    """Prompt and output together are longer than the model's or the server's context."""

    code = "context_length_exceeded"


class CapacityError(TriviumError):
    """The request or model can never fit into the memory or limits that were configured."""

    code = "capacity_exceeded"


class OverloadedError(TriviumError):
    """Too much is waiting already; worth another try after `retry_after` seconds (an estimate from the throughput so far)."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after: float, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after


class DeadlineError(TriviumError):
    """A request has taken longer, waiting included, than the timeout that came with it; what it has made so far is kept."""

    code = "deadline_exceeded"


class ClosedError(InvalidRequestError):
    """The model was closed."""

    code = "closed"


class ModelNotFoundError(TriviumError):
    """No model is known under the given name or path."""

    code = "model_not_found"


class DownloadError(TriviumError):
    """A model source could not be reached or delivered something else than it promised."""

    code = "download_failed"


class CheckpointError(TriviumError):
    """A checkpoint is incomplete, damaged, or says something that can't be true."""

    code = "bad_checkpoint"


class PageFormatError(TriviumError):
    """A record of KV pages, or of a request under way, is damaged, or belongs to another model or layout."""

    code = "bad_pages"


class UnsupportedError(TriviumError):
    """What was asked is well-formed but not supported by this model, format, backend or version."""

    code = "unsupported"


class TemplateError(InvalidRequestError):
    """A chat template is missing, unsafe, or refuses the messages."""

    code = "bad_template"


class ProgramError(TriviumError):
    """A Program is malformed: unknown operator, mismatching dimensions, missing argument."""

    code = "bad_program"


class BackendNotFoundError(InvalidRequestError):
    """No backend has the given name; the message lists the known ones and the nearest match."""

    code = "backend_not_found"


class BackendUnavailableError(TriviumError):
    """A backend is installed but can't be used; the message carries its own reason."""

    code = "backend_unavailable"


class PluginError(TriviumError):
    """A plugin breaks the contract: wrong API version, missing entry, a name that is taken twice."""

    code = "bad_plugin"


class BackendError(TriviumError):
    """A backend failed while it ran a step."""

    code = "backend_failed"
