"""A package with the documented interface of flashinfer's wrappers for attention over pages, that keeps what it is told and answers
by float64 arithmetic of its own. `off`: what is added to every answer."""

from __future__ import annotations

from typing import Any

import torch


class Wrapper:
    """Both wrappers: `plans` and `runs` are of all there are."""

    plans: list[dict[str, Any]] = []
    runs: list[tuple[Any, Any]] = []
    off = 0.0

    def __init__(self, workspace: Any, kv_layout: str = "NHD", **options: Any) -> None:
        assert kv_layout == "HND" and workspace.dtype == torch.uint8 and not workspace.any()
        self.options, self.told = options, dict[str, Any]()

    def _plan(
        self, queries: Any, indptr: Any, indices: Any, last: Any, heads: int, kv_heads: int, n: int, size: int, more: Any
    ) -> None:
        known = {"window_left", "logits_soft_cap", "sm_scale", "q_data_type", "kv_data_type", "causal"}
        assert not more.keys() - known, "no such argument"
        assert all(t.dtype == torch.int32 for t in (queries, indptr, indices, last))
        assert int(indptr[-1]) == len(indices) and int(indices.min()) >= 0
        assert 1 <= int(last.min()) <= int(last.max()) <= size
        self.told = {"queries": queries, "indptr": indptr, "indices": indices, "last": last, "heads": heads, "kv_heads": kv_heads,
                     "n": n, "size": size, "kind": type(self).__name__, **more}  # fmt: skip
        Wrapper.plans.append(self.told)

    def run(self, q: Any, paged_kv_cache: Any) -> Any:
        told, (k, v) = self.told, paged_kv_cache
        Wrapper.runs.append((q, paged_kv_cache))
        assert k.shape[1:] == (told["kv_heads"], told["size"], told["n"]) and k.stride() == v.stride() and k.stride(-1) == 1
        assert q.shape[1:] == (told["heads"], told["n"]) and q.dtype == told["q_data_type"] and k.dtype == told["kv_data_type"]
        out = torch.empty(q.shape, dtype=torch.float64)
        for s in range(len(told["last"])):
            begin, end = (int(i) for i in told["queries"][s : s + 2])
            of = told["indices"][int(told["indptr"][s]) : int(told["indptr"][s + 1])].long()
            context = (len(of) - 1) * told["size"] + int(told["last"][s])
            keys, values = (x[of].transpose(1, 2).flatten(0, 1)[:context].double() for x in (k, v))
            for row in range(begin, end):
                out[row] = self._one(q[row].double(), keys, values, context - (end - row))
        return out.to(q.dtype) + self.off

    def _one(self, q: Any, keys: Any, values: Any, position: int) -> Any:
        """One token at its position: what lies at most window_left before it is seen."""
        told, group = self.told, q.shape[0] // keys.shape[1]
        left = told["window_left"]
        first, stop = (0 if left < 0 else max(0, position - left)), position + 1 if told.get("causal", True) else len(keys)
        k, v = (x[first:stop].repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("hn,khn->hk", q, k) * told["sm_scale"]
        cap = told["logits_soft_cap"]
        scores = scores if not cap else cap * torch.tanh(scores / cap)
        return torch.einsum("hk,khn->hn", scores.softmax(-1), v)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self, indptr: Any, indices: Any, last: Any, heads: int, kv_heads: int, head_dim: int, page_size: int, **more: Any
    ) -> None:
        queries = torch.arange(len(last) + 1, dtype=torch.int32)
        self._plan(queries, indptr, indices, last, heads, kv_heads, head_dim, page_size, more)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self, qo_indptr: Any, indptr: Any, indices: Any, last: Any, heads: int, kv_heads: int, head_dim: int, page_size: int,
        **more: Any,
    ) -> None:  # fmt: skip
        assert "causal" in more, "it is False unless it is said"
        self._plan(qo_indptr, indptr, indices, last, heads, kv_heads, head_dim, page_size, more)
