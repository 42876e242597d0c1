"""Plain torch operations on npu tensors, computed by torch's CPU kernels on the device's memory.

Views, copies and allocation stay torch-npu's own: under test is how the fused operators are called, not torch's arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from emulated_cann.device import DEVICE, INTERNAL_FORMATS
from emulated_cann.formats import NZ, c0_of, nz_shape, plain
from emulated_cann.objects import host, raw_memory
from emulated_cann.registry import need
from torch.utils._pytree import tree_map_only

# Torch-npu's own: memory, layout, copies, and what reads a number back.
OWN = frozenset((
    "empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "resize_as_", "set_", "copy_", "_copy_from",
    "_copy_from_and_resize", "_to_copy", "clone", "contiguous", "_lazy_clone", "record_stream", "is_pinned", "_pin_memory",
    "pin_memory", "_local_scalar_dense", "is_set_to", "_has_compatible_shallow_copy_type", "as_strided", "as_strided_", "view",
    "_reshape_alias", "unfold", "squeeze", "unsqueeze", "expand", "select", "slice", "transpose", "permute", "t", "split",
    "unbind", "view_as_real", "view_as_complex", "detach", "alias", "diagonal", "real", "imag",
))  # fmt: skip
# The shape of the result depends on the data: a real device has to wait for it.
SHAPED_BY_DATA = frozenset((
    "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal", "is_nonzero",
))  # fmt: skip

PRODUCTS = frozenset({"mm", "addmm", "bmm", "matmul", "linear"})

_libraries: list[torch.library.Library] = []


def install() -> int:
    """Overrides every aten operation for which torch-npu has a kernel of its own; their number."""
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    chosen = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::") and overridable(s)]
    for schema in chosen:
        library.impl(full_name(schema)[6:], on_host(overload(schema), schema), "PrivateUse1")
    return len(chosen)


def full_name(schema: Any) -> str:
    return ".".join(filter(None, (schema.name, schema.overload_name)))


def overload(schema: Any) -> Any:
    return getattr(getattr(torch.ops.aten, schema.name[6:]), schema.overload_name or "default")


def overridable(schema: Any) -> bool:
    name = full_name(schema)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    try:
        if schema.name[6:] in OWN or not has(name, "PrivateUse1") or has(name, "CompositeImplicitAutograd"):
            return False
        overload(schema)
    except (RuntimeError, AttributeError):  # a schema without an operator: TorchScript's own
        return False
    return not any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)  # views


def on_host(op: Any, schema: Any) -> Callable[..., Any]:
    """The operation as a device task on CPU views of its arguments."""
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    names = [a.name for a in schema.arguments]
    title = schema.name[6:]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        DEVICE.log.aten[title] += 1
        views, view_kwargs = host_arguments(title, args), host_arguments(title, kwargs)
        bound = dict(zip(names, args)) | kwargs
        if data_dependent(title, bound):
            wait(title)
        if written and not ("out" in bound and bound["out"].numel() == 0):
            DEVICE.emit(title, lambda: op(*views, **view_kwargs))
            outputs = [bound[name] for name in written]
            return None if not schema.returns else outputs[0] if len(outputs) == 1 else tuple(outputs)
        if written:
            return resized(op, views, view_kwargs, bound["out"])
        return fresh(title, op, views, view_kwargs)

    return kernel


def host_arguments(title: str, arguments: Any) -> Any:
    if isinstance(arguments, dict):
        return {k: torch.device("cpu") if k == "device" else host_arguments(title, v) for k, v in arguments.items()}
    return tree_map_only(torch.Tensor, lambda t: readable(title, t), arguments)


def readable(title: str, t: torch.Tensor) -> torch.Tensor:
    """A CPU view of what an operation reads or writes. Products take weights in FRACTAL_NZ; others would see them out of order."""
    if not DEVICE.fractals or t.device.type != "npu" or torch.ops.npu.get_npu_format(t) not in INTERNAL_FORMATS:
        return host(t)
    need(title in PRODUCTS, f"{title} takes no FRACTAL_NZ")
    view = host(t)
    stored = t if t.stride(-1) == 1 else t.transpose(-1, -2)
    view.acl_format, view.raw_storage = NZ, raw_memory(t).view(nz_shape(tuple(stored.shape), c0_of(t.dtype)))  # type: ignore[attr-defined]
    return plain(view)


def data_dependent(title: str, bound: dict[str, Any]) -> bool:
    indices = bound.get("indices")
    masks = isinstance(indices, Sequence) and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
    return title in SHAPED_BY_DATA or masks or (title == "repeat_interleave" and bound.get("output_size") is None)


def wait(title: str) -> None:
    if DEVICE.capturing is not None:
        raise RuntimeError(f"{title} waits for the device: not allowed during graph capture (107030)")
    DEVICE.flush()


def resized(op: Any, views: Any, view_kwargs: Any, out: torch.Tensor) -> torch.Tensor:
    wait(f"{op} into an empty out")
    result = op(*views, **view_kwargs)
    host(out.resize_(result.shape)).copy_(result)
    return out


def fresh(title: str, op: Any, views: Any, view_kwargs: Any) -> Any:
    """New tensors for the results. Their shapes come from a run on zeros where the data is not there yet."""
    pending = DEVICE.capturing is not None or not DEVICE.idle()
    blank = (lambda x: tree_map_only(torch.Tensor, zeros_like, x)) if pending else (lambda x: x)
    shaped = op(*blank(views), **blank(view_kwargs))
    outputs = tree_map_only(torch.Tensor, device_like, shaped)
    targets = tree_map_only(torch.Tensor, host, outputs)
    if not pending and not DEVICE.lazy:
        DEVICE.emit(title, lambda: store(targets, shaped))
    else:
        DEVICE.emit(title, lambda: store(targets, op(*views, **view_kwargs)))
    return outputs


def zeros_like(t: torch.Tensor) -> torch.Tensor:
    """A CPU scalar keeps its value: it is an argument, not data."""
    return t if t.dim() == 0 else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).zero_()


def device_like(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="npu")


def store(targets: Any, results: Any) -> None:
    one = isinstance(targets, torch.Tensor)
    for target, result in zip([targets] if one else targets, [results] if one else results):
        if isinstance(target, torch.Tensor):
            target.copy_(result)
