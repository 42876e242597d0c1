"""trivium: one LLM inference runtime for any accelerator.

    from trivium import LLM, SamplingParams
    llm = LLM("smollm2-135m")
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text)

Names are imported on first use, so `import trivium` itself costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers know the name; importing it from typing would be most of this module's cost
if TYPE_CHECKING:
    from typing import Any

    from trivium import errors
    from trivium.api import LLM
    from trivium.async_api import AsyncLLM
    from trivium.engine import CompletionOutput, Metrics, PoolingParams, RequestOutput
    from trivium.sampling import SamplingParams, StructuredOutputs
    from trivium.text import ToolCall

__version__ = "0.1.0"

_HOMES = {
    "LLM": "trivium.api", "AsyncLLM": "trivium.async_api", "SamplingParams": "trivium.sampling", "ToolCall": "trivium.text",
    "StructuredOutputs": "trivium.sampling", "RequestOutput": "trivium.engine", "CompletionOutput": "trivium.engine",
    "Metrics": "trivium.engine", "PoolingParams": "trivium.engine", "errors": "trivium.errors",
}  # fmt: skip
__all__ = [
    "LLM", "AsyncLLM", "CompletionOutput", "Metrics", "PoolingParams", "RequestOutput", "SamplingParams", "StructuredOutputs",
    "ToolCall", "__version__", "errors",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'trivium' has no attribute {name!r}")
    from importlib import import_module

    from trivium.collector import paused

    with paused():
        module = import_module(home)
    return module if home == f"trivium.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
