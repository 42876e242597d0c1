"""A CUDA provider emulated where there is none: what the plugin asks of onnxruntime is held against the operators' contracts and
computed by onnxruntime's own CPU kernels; PagedAttention, which has none, in numpy from the operator's documentation."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def rotated(x, cos, sin, interleaved):
    """x float32[tokens, heads, head_dim]; cos, sin [tokens, half]. The numbers past 2 * half are left as they are."""
    half = cos.shape[1]
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    a, b, y = x[..., first], x[..., second], x.copy()
    c, s = cos[:, None], sin[:, None]
    y[..., first], y[..., second] = a * c - b * s, b * c + a * s
    return y


def checked(inputs, attrs):
    """What PagedAttention's documentation and its checks ask of the arguments."""
    q, k, v, keys, values, starts, past, table, _, _, slots, sink, *_ = inputs
    heads, own = attrs["num_heads"], attrs["kv_num_heads"]
    pages, size, stored, width = keys.shape
    assert keys.shape == values.shape and stored == own and heads % own == 0 and width % 8 == 0
    assert size >= 16 and size & (size - 1) == 0
    assert q.ndim == 2 and (k is None) == (v is None)
    assert q.shape[1] == (heads if k is not None else heads + 2 * own) * width
    assert k is None or k.shape == v.shape == (len(q), own * width)
    assert {x.dtype for x in (q, k, v, keys, values, sink) if x is not None} == {q.dtype}
    assert {x.dtype for x in (starts, past, table, slots)} == {np.dtype(np.int32)}
    assert starts[0] == 0 and starts[-1] == len(q) == len(slots) and len(past) == len(table) == len(starts) - 1
    lengths = np.diff(starts)
    assert (lengths >= 0).all() and (past >= 0).all() and (past + lengths <= table.shape[1] * size).all()
    assert (table < pages).all() and (slots < pages * size).all()
    assert sink is None or sink.shape == (heads,)


def paged_attention(inputs, attrs):
    """The output [tokens, heads * head_dim]; the caches are written in place."""
    inputs = [*inputs, *[None] * (17 - len(inputs))]
    checked(inputs, attrs)
    q, k, v, keys, values, starts, past, table, cos, sin, slots, sink, *_, bounds = inputs
    own, width, lengths = attrs["kv_num_heads"], keys.shape[3], np.diff(starts)
    assert bounds[0] >= lengths.max() and bounds[1] >= (past + lengths).max()
    if k is None:
        q, k, v = np.split(q, [attrs["num_heads"] * width, (attrs["num_heads"] + own) * width], axis=1)
    dtype = q.dtype
    q, k, v = (x.astype(np.float32).reshape(len(x), -1, width) for x in (q, k, v))
    position = np.concatenate([p + np.arange(n) for p, n in zip(past, lengths)])
    if attrs.get("do_rotary"):
        assert cos.dtype == sin.dtype == dtype
        angles = cos[position].astype(np.float32), sin[position].astype(np.float32)
        q, k = (rotated(x, *angles, attrs.get("rotary_interleaved", 0)).astype(dtype).astype(np.float32) for x in (q, k))
    for cache, new in ((keys, k), (values, v)):
        cache.reshape(-1, own, width)[slots[slots >= 0]] = new[slots >= 0].astype(dtype)
    out = np.zeros_like(q)
    for seq, (start, stop) in enumerate(itertools.pairwise(starts)):
        for token in range(start, stop):
            out[token] = attended(q[token], keys, values, table[seq], position[token], sink, attrs)
    return out.reshape(len(out), -1).astype(dtype)


def attended(q, keys, values, table, position, sink, attrs):
    """One token's heads [heads, head_dim] over the positions up to its own."""
    size, window, cap = keys.shape[1], attrs.get("local_window_size", -1), attrs.get("softcap", 0.0)
    at = np.arange(max(0, position + 1 - window) if window > 0 else 0, position + 1)
    at = at[table[at // size] >= 0]
    repeat = attrs["num_heads"] // attrs["kv_num_heads"]
    k, v = (np.repeat(x[table[at // size], at % size].astype(np.float32), repeat, axis=1) for x in (keys, values))
    scores = np.einsum("hd,thd->ht", q, k) * (attrs.get("scale") or q.shape[1] ** -0.5)
    scores = np.tanh(scores / cap) * cap if cap else scores
    sinks = np.full(len(q), -np.inf, np.float32) if sink is None else sink.astype(np.float32)
    top = np.maximum(scores.max(axis=1), sinks)
    weights = np.exp(scores - top[:, None])
    return np.einsum("ht,thd->hd", weights, v) / (weights.sum(axis=1) + np.exp(sinks - top))[:, None]


class Value:
    """An OrtValue: on the host the array itself, on a device a copy."""

    def __init__(self, array, device="cpu", index=0):
        assert array.flags.c_contiguous
        self.array, self.device, self.index = (array if device == "cpu" else array.copy()), device, index


class Options:
    """SessionOptions."""

    def __init__(self):
        self.entries, self.weights = {}, {}

    def add_session_config_entry(self, key, value):
        self.entries[key] = value

    def add_external_initializers(self, names, values):
        self.weights.update(zip(names, values, strict=True))


class Binding:
    """An IOBinding."""

    def __init__(self):
        self.inputs, self.outputs = {}, {}

    def bind_cpu_input(self, name, array):
        self.inputs[name] = Value(array)

    def bind_ortvalue_input(self, name, value):
        self.inputs[name] = value

    def bind_ortvalue_output(self, name, value):
        self.outputs[name] = value


class Emulated:
    """An InferenceSession on the CUDA provider."""

    def __init__(self, machine, model, settings, providers):
        import onnx

        self.machine, self.settings, self.providers = machine, settings, providers
        self.proto, self._segments = onnx.load_from_string(model), {}
        self.graph, self.weights = self.proto.graph, {}
        for tensor in self.graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                held = settings.weights[tensor.name].array
                assert tuple(tensor.dims) == held.shape and onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type) == held.dtype
                tensor.CopyFrom(onnx.numpy_helper.from_array(held, tensor.name))
            self.weights[tensor.name] = onnx.numpy_helper.to_array(tensor)
        self._resolve()
        machine.sessions.append(self)

    def _resolve(self):
        """onnxruntime's own check of all types and shapes finds nothing amiss but that the CPU has no PagedAttention."""
        import onnxruntime

        kinds = {d.type.tensor_type.elem_type for d in self.graph.input if d.name.startswith("keys.")}
        if 1 in kinds:  # float32, in which the operator isn't declared: it is there to compare numbers
            return
        try:
            self.machine.real(self.proto)
            assert not kinds
        except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented as e:
            assert "PagedAttention(1)" in str(e)

    def get_providers(self):
        return [name for name, _ in self.providers] + [CPU]

    def io_binding(self):
        return Binding()

    def run_with_iobinding(self, binding):
        self.machine.runs.append((self, binding))
        self._check(binding)
        env = {**self.weights, **{name: value.array for name, value in binding.inputs.items()}}
        for index, nodes in enumerate(self._parts()):
            if nodes[0].op_type == "PagedAttention":
                self._attend(nodes[0], env, binding)
            else:
                env.update(self._compute(index, nodes, env))
        for name, value in binding.outputs.items():
            if env[name] is not value.array:
                assert (env[name].shape, env[name].dtype) == (value.array.shape, value.array.dtype), name
                value.array[...] = env[name]

    def _check(self, binding):
        """Everything is bound, in the shapes and dtypes that the model declares."""
        import onnx

        sizes: dict[str, int] = {}
        for declared, bound in ((self.graph.input, binding.inputs), (self.graph.output, binding.outputs)):
            assert {d.name for d in declared} == set(bound)
            for d in declared:
                kind, array = d.type.tensor_type, bound[d.name].array
                assert onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type) == array.dtype, d.name
                assert len(kind.shape.dim) == array.ndim, d.name
                for dim, size in zip(kind.shape.dim, array.shape):
                    known = dim.dim_value if dim.HasField("dim_value") else sizes.setdefault(dim.dim_param or d.name, size)
                    assert known == size, (d.name, dim.dim_param, known, size)

    def _parts(self):
        """The nodes, PagedAttention apart."""
        parts: list[list[Any]] = []
        for node in self.graph.node:
            if not parts or "PagedAttention" in (node.op_type, parts[-1][0].op_type):
                parts.append([])
            parts[-1].append(node)
        return parts

    def _attend(self, node, env, binding):
        import onnx

        attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        inputs = [env[name] if name else None for name in node.input]
        env[node.output[0]] = paged_attention(inputs, attrs)
        for i, cache in ((1, inputs[3]), (2, inputs[4])):  # the operator refuses results that are not its inputs' memory
            assert binding.outputs[node.output[i]].array is cache and binding.outputs[node.output[i]].device == "cuda"
            env[node.output[i]] = cache

    def _compute(self, index, nodes, env):
        made = {name for node in nodes for name in node.output if name}
        taken = {name for node in nodes for name in node.input if name} - made
        if index not in self._segments:
            read = {n for node in self.graph.node if node not in nodes for n in node.input} | {d.name for d in self.graph.output}
            self._segments[index] = self._segment(nodes, {n: env[n] for n in taken}, sorted(made & read))
        session, results = self._segments[index]
        return dict(zip(results, session.run(results, {d.name: env[d.name] for d in session.get_inputs()}), strict=True))

    def _segment(self, nodes, given, results):
        """A session of onnxruntime's own for some nodes."""
        from onnx import helper, numpy_helper

        inputs = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), [None] * a.ndim)
            for n, a in given.items() if n not in self.weights
        ]  # fmt: skip
        fixed = [numpy_helper.from_array(a, n) for n, a in given.items() if n in self.weights]
        graph = helper.make_graph(nodes, "part", inputs, [helper.make_empty_tensor_value_info(n) for n in results], fixed)
        model = helper.make_model(graph, opset_imports=self.proto.opset_import, ir_version=10)
        return self.machine.real(model), results


class Machine:
    """Everything that was opened and run. `real`: an onnxruntime session on the CPU."""

    def __init__(self, onnxruntime, devices):
        opened, options = onnxruntime.InferenceSession, onnxruntime.SessionOptions
        self.sessions: list[Emulated] = []
        self.runs: list[tuple[Emulated, Binding]] = []
        self.devices = devices
        self.open_real = lambda model, settings=None: opened(model, settings or options(), providers=[CPU])
        self.real_options, self.real_value = options, onnxruntime.OrtValue

    def real(self, model):
        settings = self.real_options()
        settings.log_severity_level, settings.intra_op_num_threads = 3, 1
        return self.open_real(model.SerializeToString(), settings)

    def place(self, array, device="cpu", index=0):
        assert device == "cpu" or index < self.devices
        return Value(array, device, index)


@pytest.fixture
def machine(monkeypatch):
    """An onnxruntime whose CUDA provider has two devices of 1 GiB."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    from trivium_onnxruntime import driver

    made = Machine(onnxruntime, 2)
    listed = [SimpleNamespace(ep_name=name) for name in (CPU, CUDA, CUDA)]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: listed)
    monkeypatch.setattr(onnxruntime, "OrtValue", SimpleNamespace(ortvalue_from_numpy=made.place))
    monkeypatch.setattr(onnxruntime, "SessionOptions", Options)
    monkeypatch.setattr(
        onnxruntime, "InferenceSession", lambda model, settings, providers: Emulated(made, model, settings, providers)
    )
    monkeypatch.setattr(driver, "total_bytes", lambda index: 1 << 30)
    monkeypatch.setattr(driver, "free_bytes", lambda index: 1 << 29)
    return made
