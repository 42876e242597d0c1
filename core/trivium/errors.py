"""Every error trivium raises on purpose.

Each says what was asked, what is possible and what to do. `code` is stable: servers and tools may match on it.
"""

from __future__ import annotations


class TriviumError(Exception):
    """Base of all errors; `code` is a stable identifier, `param` names the offending field where there is one."""

    code = "error"

    def __init_subclass__(cls, *, code: str | None = None) -> None:
        cls.code = code or cls.code

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequestError(TriviumError, ValueError, code="invalid_request"):
    """A request (prompt, sampling parameter, flag) that can't be served as asked; refused before it takes memory."""


class ContextLengthError(InvalidRequestError, code="context_length_exceeded"):
    """Prompt and output together are longer than the model's or the server's context."""


class CapacityError(TriviumError, code="capacity_exceeded"):
    """The request or model can never fit into the memory or limits that were configured."""


class OverloadedError(TriviumError, code="overloaded"):
    """Too much is waiting already; worth another try after `retry_after` seconds (an estimate from the throughput so far)."""

    def __init__(self, message: str, *, retry_after: float, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after


class DeadlineError(TriviumError, code="deadline_exceeded"):
    """A request has taken longer, waiting included, than the timeout that came with it; what it has made so far is kept."""


class ClosedError(InvalidRequestError, code="closed"):
    """The model was closed."""


class ModelNotFoundError(TriviumError, code="model_not_found"):
    """No model is known under the given name or path."""


class DownloadError(TriviumError, code="download_failed"):
    """A model source could not be reached or delivered something else than it promised."""


class CheckpointError(TriviumError, code="bad_checkpoint"):
    """A checkpoint is incomplete, damaged, or says something that can't be true."""


class PageFormatError(TriviumError, code="bad_pages"):
    """A record of KV pages, or of a request under way, is damaged, or belongs to another model or layout."""


class UnsupportedError(TriviumError, code="unsupported"):
    """What was asked is well-formed but not supported by this model, format, backend or version."""


class NoCacheError(UnsupportedError, code="no_cache"):
    """An option about the KV cache (`param`) for a model that has none: it reads whole texts, in one step."""


class TemplateError(InvalidRequestError, code="bad_template"):
    """A chat template is missing, unsafe, or refuses the messages."""


class ProgramError(TriviumError, code="bad_program"):
    """A Program is malformed: unknown operator, mismatching dimensions, missing argument."""


class BackendNotFoundError(InvalidRequestError, code="backend_not_found"):
    """No backend has the given name; the message lists the known ones and the nearest match."""


class BackendUnavailableError(TriviumError, code="backend_unavailable"):
    """A backend is installed but can't be used; the message carries its own reason."""


class PluginError(TriviumError, code="bad_plugin"):
    """A plugin breaks the contract: wrong API version, missing entry, a name that is taken twice."""


class BackendError(TriviumError, code="backend_failed"):
    """A backend failed while it ran a step."""
