"""A plugin as it was written for version 1 of the contract."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trivium.plugin import Backend, Capabilities, Device, Executable, Probe, Session, hookimpl
from trivium_reference.plugin import ReferenceBackend

INPUTS = {"token_ids", "positions", "query_starts", "context_lens", "sample_rows"}


class Version1(ReferenceBackend):
    """It captures graphs, and refuses options, inputs and outputs that it has never heard of."""

    name = "oldchip"
    api_version = 1

    def probe(self) -> Probe:
        return Probe((Device(0, "oldchip"),))

    def capabilities(self, device: Device) -> Capabilities:
        return replace(super().capabilities(device), graph_capture=True, max_graphs=8)

    def open(self, device: Device, options: Any) -> Session:
        session: Any = super().open(device, options)
        compile_it = session.compile

        def compile_old(program: Any, weights: Any) -> Executable:
            assert set(program.outputs) == {"logits"} and {value.name for value in program.inputs} <= INPUTS
            compiled: Executable = compile_it(program, weights)
            return compiled

        session.compile = compile_old
        return session  # type: ignore[no-any-return]


@hookimpl
def trivium_backend() -> Backend:
    return Version1()
