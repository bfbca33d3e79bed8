"""The full model in NumPy float64, from a HuggingFace config dict and HF-named arrays.

It uses neither JAX nor `glm5_jax`. `forward` runs `glm_moe_dsa` (with IndexShare, expert
groups, YaRN, biases, tied embeddings, left padding and packed documents) and `glm4_moe_lite`, which
is the same without an indexer; `mtp` runs the multi-token-prediction layer in a chain.
"""

import json
import pathlib

import numpy as np
from safetensors.numpy import load_file

from tests.oracles import attention, eight_bits, experts, indexer, indexer_kl

LATENT_NORM_EPS = 1e-6  # transformers' class default, independent of rms_norm_eps
INDEX_NORM_EPS = 1e-6


def load(folder):
    """(config dict, {HF name: float64 array}) of every safetensors file in the folder.

    `mtp.safetensors` joins the main file where a golden has one, as in the released checkpoint.
    """
    folder = pathlib.Path(folder)
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= {name: array.astype(np.float64) for name, array in load_file(path).items()}
    config = json.loads((folder / "config.json").read_text())
    if "rope_parameters" not in config:  # the spelling of older releases
        rope = config.get("rope_scaling") or {}
        config["rope_parameters"] = {"rope_theta": config["rope_theta"]} | rope
    return config, weights


def part(weights, prefix):
    """Returns the arrays with a prefix, by their names without it."""
    start = prefix + "."
    return {n[len(start) :]: w for n, w in weights.items() if n.startswith(start)}


def linear(x, p, name):
    """x W^T, plus the bias if the checkpoint has one."""
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def positions_of(segment_ids):
    """int [b t]: positions that restart at 0 with every segment; 0 where the segment is 0."""
    positions = np.zeros_like(segment_ids)
    for row in range(segment_ids.shape[0]):
        for segment in set(segment_ids[row].tolist()) - {0}:
            at = segment_ids[row] == segment
            positions[row, at] = np.arange(np.sum(at))
    return positions


def turns_of(config, positions):
    """The rotations of both attentions at these positions."""
    frequencies, magnitude = attention.rope_frequencies(
        config["rope_parameters"],
        config["qk_rope_head_dim"],
        config["max_position_embeddings"],
    )
    return attention.rope_turns(frequencies, magnitude, positions)


def index_inputs(p, config, x, c_q, turns):
    """(idx_q [b t i j], idx_k [b t j], idx_w [b t i]) from the normed input and the query latent.

    RoPE rotates the *first* r of the j dimensions. If the config has an "index_cache", queries and keys are quantized
    to 8 bits and dequantized.
    """
    b, t, _ = x.shape
    r = config["qk_rope_head_dim"]
    q = linear(c_q, p, "wq_b").reshape(b, t, config["index_n_heads"], config["index_head_dim"])
    k = linear(x, p, "wk")
    k = attention.layer_norm(k, p["k_norm.weight"], p["k_norm.bias"], INDEX_NORM_EPS)

    def turn(v):
        return np.concatenate([attention.rope_interleaved(v[..., :r], turns), v[..., r:]], -1)

    q, k, kind = turn(q), turn(k), config.get("index_cache")
    if kind:
        q, k = (eight_bits.quantize_dequantize(v, kind) for v in (q, k))
    return q, k, linear(x, p, "weights_proj")


def mla(p, config, x, turns, visible, topk, sparse):
    """Attention of the normed input x [b t d]: (out [b t d], topk, attended keys, index scores, probabilities).

    `topk` is the selection of an earlier layer; a layer with an indexer replaces it. Index scores
    are None without an indexer and -inf where a key is not visible. Probabilities [b t s] are summed over heads.
    If the config has a "latent_cache", c_kv, of up to 128 columns, is quantized to 8 bits and dequantized.
    """
    b, t, _ = x.shape
    h, r, u = (
        config["qk_nope_head_dim"],
        config["qk_rope_head_dim"],
        config["v_head_dim"],
    )
    n, c = config["num_attention_heads"], config["kv_lora_rank"]

    c_q = linear(x, p, "q_a_proj")
    c_q = attention.rms_norm(c_q, p["q_a_layernorm.weight"], LATENT_NORM_EPS)
    q = linear(c_q, p, "q_b_proj").reshape(b, t, n, h + r)
    q_rope = attention.rope_interleaved(q[..., h:], turns)

    c_kv, k_rope = np.split(linear(x, p, "kv_a_proj_with_mqa"), [c], axis=-1)
    c_kv = attention.rms_norm(c_kv, p["kv_a_layernorm.weight"], LATENT_NORM_EPS)
    if config.get("latent_cache"):
        c_kv = eight_bits.quantize_dequantize(c_kv, config["latent_cache"])
    k_rope = attention.rope_interleaved(k_rope, turns)
    kv = linear(c_kv, p, "kv_b_proj").reshape(b, t, n, h + u)
    k_rope = np.broadcast_to(k_rope[:, :, None], (b, t, n, r))

    scores = None
    if "indexer.wk.weight" in p:
        scores = indexer.index_scores(*index_inputs(part(p, "indexer"), config, x, c_q, turns))
        if sparse:
            topk = indexer.select(scores, visible, config["index_topk"])
        scores = np.where(visible, scores, -np.inf)
    keep = visible & indexer.selection_mask(topk, t) if sparse else visible

    scale = attention.softmax_scale(
        config["rope_parameters"], h + r, config["max_position_embeddings"]
    )
    query = np.concatenate([q[..., :h], q_rope], axis=-1)
    key = np.concatenate([kv[..., :h], k_rope], axis=-1)
    out = attention.attend(query, key, kv[..., h:], keep, scale)
    probs = indexer_kl.summed_attention_probs(query, key, keep, scale)
    return linear(out.reshape(b, t, n * u), p, "o_proj"), topk, keep, scores, probs


def feed_forward(p, config, x):
    """Dense SwiGLU or MoE, depending on the layer's weights: (out, router logits, combine weights [e])."""
    if "gate_proj.weight" in p:
        return experts.swiglu(x, *_swiglu_weights(p)), None, None
    router_logits = x @ p["gate.weight"].T
    num_experts = router_logits.shape[-1]
    expert_ids, combine_weights = experts.route(
        router_logits,
        p["gate.e_score_correction_bias"],
        config["num_experts_per_tok"],
        config["n_group"],
        config["topk_group"],
        config["norm_topk_prob"],
        config["routed_scaling_factor"],
    )
    weights = experts.scatter_weights(expert_ids, combine_weights, num_experts)
    out = sum(
        weights[..., e, None] * experts.swiglu(x, *_swiglu_weights(part(p, f"experts.{e}")))
        for e in range(num_experts)
    )
    if config["n_shared_experts"]:
        out = out + experts.swiglu(x, *_swiglu_weights(part(p, "shared_experts")))
    return out, router_logits, weights


def _swiglu_weights(p):
    return p["gate_proj.weight"], p["up_proj.weight"], p["down_proj.weight"]


def layer(p, config, x, turns, visible, topk, sparse):
    """Runs one pre-norm decoder layer; returns (x, topk, intermediate results)."""
    eps = config["rms_norm_eps"]
    normed = attention.rms_norm(x, p["input_layernorm.weight"], eps)
    attn_out, topk, keep, scores, probs = mla(
        part(p, "self_attn"), config, normed, turns, visible, topk, sparse
    )
    x = x + attn_out
    normed = attention.rms_norm(x, p["post_attention_layernorm.weight"], eps)
    mlp_out, router_logits, router_weights = feed_forward(part(p, "mlp"), config, normed)
    trace = {
        "attn_out": attn_out,
        "mlp_out": mlp_out,
        "selected": keep,
        "index_scores": scores,
        "attention": probs,
        "topk": topk if sparse and scores is not None else None,
        "router_logits": router_logits,
        "router_weights": router_weights,
    }
    return x + mlp_out, topk, trace


def head(weights, x):
    """Logits; with tied embeddings the checkpoint has no lm_head."""
    table = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return x @ table.T


def forward(
    weights,
    config,
    token_ids,
    segment_ids=None,
    positions=None,
    attention_kind="sparse",
):
    """Runs token_ids int [b t]; returns a dict of float64 arrays.

    segment_ids int [b t] (0 = padding; default: one document per row) limit attention, and positions default to the
    index within the segment. attention_kind "dense" does not use the indexer. Keys, stacked over the layers that have
    them: logits [b t v], hidden_states [l+1 b t d] (before the final norm), final_hidden [b t d], attn_out and mlp_out
    [l b t d], selected bool [l b t s], index_scores and attention (summed over heads) [l b t s], topk [l b t k],
    router_logits and router_weights [l b t e].
    """
    segment_ids = np.ones_like(token_ids) if segment_ids is None else np.asarray(segment_ids)
    positions = positions_of(segment_ids) if positions is None else np.asarray(positions)
    turns, visible = turns_of(config, positions), attention.visible_keys(segment_ids)
    sparse = attention_kind == "sparse" and config["model_type"] == "glm_moe_dsa"

    x = weights["model.embed_tokens.weight"][token_ids]
    hidden_states, traces, topk = [x], [], None
    for i in range(config["num_hidden_layers"]):
        p = part(weights, f"model.layers.{i}")
        x, topk, trace = layer(p, config, x, turns, visible, topk, sparse)
        hidden_states.append(x)
        traces.append(trace)
    final = attention.rms_norm(x, weights["model.norm.weight"], config["rms_norm_eps"])

    out = {"hidden_states": np.stack(hidden_states), "final_hidden": final}
    for name in traces[0]:
        arrays = [trace[name] for trace in traces if trace[name] is not None]
        out[name] = np.stack(arrays) if arrays else None
    return out | {"logits": head(weights, final)}


def mtp(weights, config, token_ids, final_hidden, segment_ids=None, steps=1):
    """The MTP layer, applied `steps` times with the same weights; a list of one dict per step.

    Step k (from 1) joins the embedding of token i+k with the normed output of step k-1 at i
    (final_hidden [b t d] for the first) and predicts token i+k+1, so it has t-k positions. Each dict:
    hidden [b t-k d] (normed; input of the next step), logits, selected, and valid bool [b t-k]:
    token i+k belongs to the segment of token i. Invalid positions have no meaningful values.
    """
    segment_ids = np.ones_like(token_ids) if segment_ids is None else np.asarray(segment_ids)
    positions, eps = positions_of(segment_ids), config["rms_norm_eps"]
    p = part(weights, f"model.layers.{config['num_hidden_layers']}")
    sparse = config["model_type"] == "glm_moe_dsa"
    embedding = weights["model.embed_tokens.weight"]
    hidden, results = final_hidden, []
    for k in range(1, steps + 1):
        now = segment_ids[:, :-k]
        joined = np.concatenate(
            [
                attention.rms_norm(embedding[token_ids[:, k:]], p["enorm.weight"], eps),
                attention.rms_norm(hidden[:, : now.shape[1]], p["hnorm.weight"], eps),
            ],
            axis=-1,
        )
        # The position of token i+k; only differences of positions matter.
        turns, visible = (
            turns_of(config, positions[:, :-k] + k),
            attention.visible_keys(now),
        )
        x, _, trace = layer(p, config, linear(joined, p, "eh_proj"), turns, visible, None, sparse)
        hidden = attention.rms_norm(x, p["shared_head.norm.weight"], eps)
        results.append(
            {
                "hidden": hidden,
                "logits": head(weights, hidden),
                "selected": trace["selected"],
                "valid": (now == segment_ids[:, k:]) & (now != 0),
            }
        )
    return results


def draft(weights, config, token_ids, final_hidden, drafts):
    """Logits [b k v] of the drafts int [b k] after token_ids [b t], by one MTP layer with one cache.

    final_hidden [b t-1 d]: the trunk has not processed the newest token. The layer has one entry per
    token, computed from the trunk's state before it; a draft's entry is computed from the layer's state.
    """
    hidden, logits = final_hidden, []
    for k in range(drafts.shape[1]):
        known = np.concatenate([token_ids, drafts[:, :k]], axis=1)
        step = mtp(weights, config, known, hidden)[0]
        logits.append(step["logits"][:, -1])
        hidden = np.concatenate([hidden, step["hidden"][:, -1:]], axis=1)
    return np.stack(logits, axis=1)


def mean_cross_entropy(logits, targets):
    """Mean of -log softmax(logits)[target]; logits [b t v], targets int [b t]."""
    top = np.max(logits, axis=-1, keepdims=True)
    lse = np.log(np.sum(np.exp(logits - top), axis=-1)) + top[..., 0]
    return np.mean(lse - np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0])


def greedy(weights, config, token_ids, num_tokens, attention_mask=None):
    """Appends the best next token num_tokens times, by a full forward each, without a cache."""
    mask = np.ones_like(token_ids) if attention_mask is None else np.asarray(attention_mask)
    for _ in range(num_tokens):
        logits = forward(weights, config, token_ids, segment_ids=mask)["logits"][:, -1]
        token_ids = np.concatenate([token_ids, np.argmax(logits, -1)[:, None]], axis=1)
        mask = np.concatenate([mask, np.ones_like(mask[:, :1])], axis=1)
    return token_ids
