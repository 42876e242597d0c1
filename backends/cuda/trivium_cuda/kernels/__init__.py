"""Triton kernels and their launchers: torch tensors in, torch tensors out. Importable without a GPU; nothing is launched by import.

No launcher waits for the device, reads a tensor on the host or allocates by what a tensor holds: all of them can be captured in a
CUDA graph. What a grid depends on beyond shapes (`max_queries`, `max_context`) is a host integer that the caller gives; an upper
bound will do, and the results don't depend on how loose it is. Activations x are [rows, n] or [tokens, heads, n], last dimension
contiguous, in float32, float16 or bfloat16; all sums are of float32. Weights of norms may be of any float type.

No kernel adds floats atomically: the same call gives the same bits. A row's bits don't depend on the rows beside it, with one
exception: products with quantised weights and those of experts use larger tiles for many rows, unless `invariant` is set.

norms          rms_norm(x, weight | None, eps, offset=0.0) -> y
               add_rms_norm(x, y, weight | None, eps, offset=0.0) -> (total, normed); total has x's dtype and is rounded to it
                   before its norm is taken
               add_rms_norm_quantise(x, y, weight | None, eps, offset=0.0, *, kind) -> (total, Rows), and
               rms_norm_quantise(x, weight | None, eps, offset=0.0, *, kind) -> Rows; kind: "int8", "fp8",
               "fp8 blocks", or quantise.Given(scale, offset): int8 by these
activations    gated(gate, up, *, kind="silu", limit=None, alpha=1.0, up_offset=0.0, dtype=None) -> y, the operator `gated`, all
                   kinds; in another dtype if asked
               gated_quantise(..., *, quantise=kind) -> Rows
quantise       quantise_rows(x, kind) -> Rows(numbers int8 or float8_e4m3fn [rows, n], scales float32[rows, 1])
               quantise_blocks(x) -> Rows(float8_e4m3fn [rows, n], scales float32[rows, n / 128])
rotary         Store(numbers [kv_heads, slots, n], scales [kv_heads, slots, 1] | None): the parts of a trivium_torch store. numbers
                   in a float type; int8 with bfloat16 scales (as ops.state.kv_int8 has it); float8_e4m3fn with bfloat16 scales,
                   by row likewise (largest size / 448), or with scales of stride 0 along slots, which are then given, not made
               kv_write(keys: Store, values: Store, k, v, slots int64[tokens]); slot -1: not stored
               latent_write(latents: Store, ropes: Store, latent, rope, slots)
               rope(x, positions int32[tokens], inv_freq float32[half], *, interleaved=False, scale=1.0) -> y
               rope_write(q, k, v, positions, inv_freq, keys: Store, values: Store, slots, *, interleaved, scale) -> q turned
               norm_rope_write(q, k, v, q_weight, k_weight, positions, inv_freq, keys, values, slots, *, eps, offset=0.0,
                   interleaved=False, scale=1.0) -> q: rms_norm of each head of q and k, rope, kv_write
attention      paged_attention(q[tokens, heads, n], keys: Store, values: Store, block_table int32[seqs, blocks],
                   query_starts int32[seqs + 1], context_lens int32[seqs], sinks | None, *, page_size, max_queries, max_context,
                   scale, window=None, softcap=None, causal=True) -> y
               latent_attention(q_latent, q_rope, latents: Store, ropes: Store, block_table, query_starts, context_lens, *,
                   page_size, max_queries, max_context, scale) -> y
int4           Packed(codes uint8[..., in / 2, out], scales[..., groups, out], zeros[..., groups, out] | None, order
                   int32[..., in] | None, group, inputs); its shape is [..., out, in]
               pack_int4(codes uint8[..., out, in], scales[..., out, groups], zeros[..., out, groups] | None, order | None)
                   -> Packed: weight = scale * (code - zero), zeros None: 8; order: input i of the codes is input order[i] of x
               pack_mxfp4(codes uint8[..., out, in], exponents uint8[..., out, in / 32]) -> Packed (scales uint8: exponent + 127)
               linear(x, packed, bias | None, *, invariant=False) -> y; unpack(packed, dtype) -> weight[..., out, in]
int8           linear(x, numbers int8[out, in], scales float32[out, 1], bias | None, *, invariant=False) -> y, x as it comes
               linear_rows(rows: Rows, numbers, scales, bias | None, dtype, *, tile=None) -> y, whole numbers times whole numbers,
                   any batch alike
fp8            linear(x, numbers float8_e4m3fn[out, in], scales, bias | None, *, invariant=False) -> y, x as it comes
               linear_rows(rows: Rows, numbers, scales, bias | None, dtype, *, invariant=False, tile=None) -> y
                   scales float32: [1, 1], [out, 1] or, with quantise_blocks' rows or x as it comes, [out / 128, in / 128]
experts        moe_experts(x, weights[tokens, top_k], ids int32[tokens, top_k], gate, up, down, gate_bias, up_bias, down_bias, *,
                   kind, limit, alpha, up_offset, invariant=False) -> y; gate, up, down: float tensors, Packed, or the
                   Matrix of int8 or fp8 [experts, out, in]
sampler        sample(logits[rows, width], columns: Columns, *, vocab_size, features: Features, top_logprobs=-1) -> Chosen(ids
                   int32[rows], logprobs, ranks, top_ids, top_logprobs); Columns are the device's copies of SampleInputs, Features
                   what any row asks for. Stages 2 to 6, 8, 10, 11 and 13; for typical_p, top_n_sigma and XTC the reference is
                   needed
adapters       lora(y, x, a float[slots, rank, in], b float[slots, rank, out], adapters int32[tokens]) -> z, the operator lora
recurrent      gated_delta_rule(q, k, v, g, beta, state float32[pages, heads, dk, dv], table int32[seqs], query_starts,
                   context_lens, *, scale, max_queries) -> y; the state is changed in place
"""
