"""Makes the goldens hf_tiny_c and hf_tiny_d: random tiny checkpoints and the outputs of transformers.

Runs in a separate environment with torch 2.13.0 (CPU), transformers 5.23.0, numpy 2.4.6 and safetensors 0.8.0:

    python tests/goldens/make_goldens.py tests/goldens hf_tiny_c hf_tiny_d

It draws weights and prompts from seeds until no decision (selected key, expert, group, next token)
is a near tie, in float32 and in a float64 twin. It checks that the two decide alike, and writes the
checkpoint, arrays.npz, grads.npz and meta.json. README.md explains every array.
"""

import contextlib
import json
import math
import pathlib
import sys
from unittest import mock

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

PAD = 0
MIN_GAPS = {"index": 2e-4, "router": 2e-4, "argmax": 3e-3}
NEW_TOKENS = 12
MTP_STEPS = 3

GOLDENS = {
    "hf_tiny_c": {
        "note": "attention_bias; YaRN with mscale and mscale_all_dim; tied embeddings; two shared "
        "experts; n_group 4, topk_group 2; weights not normalised; sharded files; left padding.",
        "classes": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM"),
        "seed": 303,
        "seq": 34,
        "short_prompt": 5,
        "padding": (0, 7),
        "shard": "200KB",
        "mtp": False,
        "config": {
            "vocab_size": 160,
            "hidden_size": 40,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 1,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "q_lora_rank": 28,
            "kv_lora_rank": 18,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 8,
            "v_head_dim": 14,
            "intermediate_size": 72,
            "moe_intermediate_size": 7,
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.3,
            "index_topk": 9,
            "index_n_heads": 6,
            "index_head_dim": 22,
            "indexer_types": ["full", "shared", "full", "full"],
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-4,
            "max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 4.0,
                "beta_slow": 0.25,
                "mscale": 0.9,
                "mscale_all_dim": 0.6,
            },
        },
    },
    "hf_tiny_d": {
        "note": "glm4_moe_lite (GLM-4.7-Flash): no indexer; config.json in the released spelling; "
        "an MTP layer in the same file, with copies of embedding and head as Flash ships them.",
        "classes": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM"),
        "seed": 404,
        "seq": 30,
        "short_prompt": 6,
        "padding": (4, 0),
        "shard": "1GB",
        "mtp": True,
        "config": {
            "vocab_size": 176,
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "q_lora_rank": 26,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 6,
            "v_head_dim": 17,
            "intermediate_size": 88,
            "moe_intermediate_size": 10,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    },
}


# ---- building ------------------------------------------------------------------------------------


@contextlib.contextmanager
def wide():
    """Makes every cast to float32 that transformers writes down a cast to float64."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


def build(spec):
    """Returns a fresh model of the golden, eager everywhere, with the weights of its class's initialisation."""
    config_class, model_class = (getattr(transformers, name) for name in spec["classes"])
    config = config_class(
        **spec["config"], bos_token_id=None, eos_token_id=[1, 2], pad_token_id=PAD
    )
    return eager(model_class(config))


def eager(model):
    """Selects the plain loops, because the other paths add rounding and need aligned sizes."""
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return model.eval()


def random_array(rng, name, shape):
    """Returns weights large enough that every term of the model shows in its output."""
    noise = rng.standard_normal(shape)
    if name.endswith("e_score_correction_bias"):
        return 0.3 * noise
    if name.endswith("norm.weight"):
        return 1.0 + 0.2 * noise
    if name.endswith(".bias"):
        return 0.4 * noise
    if "embed_tokens" in name:
        return 0.3 * noise
    gain = 2.0 if name.endswith(("q_b_proj.weight", "wq_b.weight", "gate.weight")) else 1.0
    return gain * noise / math.sqrt(shape[-1])


def randomise(model, seed):
    rng = np.random.default_rng(seed)
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            if tied and name == "lm_head.weight":
                continue
            tensor.copy_(torch.from_numpy(random_array(rng, name, tuple(tensor.shape))))


def float64_twin(spec, model):
    """Returns the float64 twin: the same weights, every computation in float64. Call it inside wide()."""
    twin = build(spec).double()
    twin.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    if spec["config"].get("tie_word_embeddings"):
        twin.tie_weights()
    return twin


# ---- running -------------------------------------------------------------------------------------


@contextlib.contextmanager
def watch_layers(model):
    """Collects what the layers compute: a dict of lists, in layer order."""
    seen = {name: [] for name in ("attn", "mlp", "topk", "scores", "router")}
    handles = []

    def watch_indexer(indexer):
        plain = indexer.forward
        topk = torch.Tensor.topk

        def forward(*args, **kwargs):
            def recording(scores, *a, **k):
                seen["scores"].append(scores.detach().clone())
                return topk(scores, *a, **k)

            with mock.patch.object(torch.Tensor, "topk", recording):
                chosen = plain(*args, **kwargs)
            seen["topk"].append(chosen)
            return chosen

        indexer.forward = forward
        return lambda: setattr(indexer, "forward", plain)

    restore = []
    for layer in model.model.layers:
        for key, module in (("attn", layer.self_attn), ("mlp", layer.mlp)):

            def keep(_, __, out, key=key):
                seen[key].append((out[0] if isinstance(out, tuple) else out).detach())

            handles.append(module.register_forward_hook(keep))
        if hasattr(layer.mlp, "gate"):
            handles.append(
                layer.mlp.gate.register_forward_hook(
                    lambda m, _, out: seen["router"].append((m, out))
                )
            )
        if getattr(layer.self_attn, "indexer", None) is not None:
            restore.append(watch_indexer(layer.self_attn.indexer))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        for undo in restore:
            undo()


def positions_of(mask):
    return (mask.cumsum(-1) - 1).clamp(min=0)


def visible_keys(mask):
    """Returns bool [b t s]: causal, and the key is no padding."""
    t = mask.shape[1]
    return torch.ones(t, t, dtype=torch.bool).tril()[None] & mask.bool()[:, None]


def run(model, ids, mask=None):
    """Runs one forward without a cache. Returns a dict of arrays, and the smallest gap of every decision."""
    mask = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad(), watch_layers(model) as seen:
        out = model.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions_of(mask),
            use_cache=False,
            output_hidden_states=True,
        )
        final = out.last_hidden_state
        logits = model.lm_head(final)
    b, t = ids.shape
    visible, real = visible_keys(mask), mask.bool()
    states = list(out.hidden_states[:-1])
    states.append(states[-1] + seen["attn"][-1] + seen["mlp"][-1])
    result = {
        "logits": logits,
        "hidden_states": torch.stack(states),
        "final_hidden": final,
        "attn_out": torch.stack(seen["attn"]),
        "mlp_out": torch.stack(seen["mlp"]),
    }
    gaps = {"argmax": best_gap(logits[real], 1)}

    combined, gaps["router"] = [], math.inf
    for gate, (router_logits, weights, chosen) in seen["router"]:
        full = torch.zeros_like(router_logits).scatter(1, chosen, weights.to(router_logits.dtype))
        combined.append(full.view(b, t, -1))
        gap = router_gap(gate, router_logits.view(b, t, -1)[real])
        gaps["router"] = min(gaps["router"], gap)
    result["router_logits"] = torch.stack([x[1][0].view(b, t, -1) for x in seen["router"]])
    result["router_weights"] = torch.stack(combined)

    if seen["topk"]:
        scores = torch.stack([s.masked_fill(~visible, -math.inf) for s in seen["scores"]])
        chosen = [
            torch.zeros(b, t, t, dtype=torch.bool).scatter(-1, i.long(), True) & visible
            for i in seen["topk"]
        ]
        kinds, selected = model.config.indexer_types, []
        for kind in kinds:
            selected.append(chosen.pop(0) if kind == "full" else selected[-1])
        result |= {
            "index_scores": scores,
            "topk_indices": torch.stack(seen["topk"]),
            "selected": torch.stack(selected),
        }
        k = model.config.index_topk
        gaps["index"] = min(best_gap(s[real], k) for s in scores)
    return result, gaps


def best_gap(values, k):
    """Returns the smallest distance between the k-th and the next best of rows with more than k values."""
    if values.shape[-1] <= k:
        return math.inf
    top = values.topk(k + 1, dim=-1).values
    gap = top[..., k - 1] - top[..., k]
    gap = gap[torch.isfinite(gap)]
    return gap.min().item() if gap.numel() else math.inf


def router_gap(gate, router_logits):
    """Returns the smallest gap of a choice of experts or of groups, after the correction bias."""
    biased = router_logits.sigmoid() + gate.e_score_correction_bias
    grouped = biased.view(len(biased), gate.num_group, -1)
    score = grouped.topk(2, dim=-1).values.sum(-1)
    gap = best_gap(score, gate.topk_group)
    is_selected = (
        torch.zeros_like(score).scatter(1, score.topk(gate.topk_group).indices, 1.0).bool()
    )
    biased = grouped.masked_fill(~is_selected[..., None], -math.inf).view_as(biased)
    return min(gap, best_gap(biased, gate.top_k))


def continue_greedily(model, ids, mask, steps):
    """Returns (ids with `steps` more tokens, the logits of each), computed with the KV cache."""
    mask = torch.ones_like(ids) if mask is None else mask
    cache = transformers.DynamicCache(config=model.config)
    new, taken = ids, []
    with torch.no_grad():
        for _ in range(steps):
            places = positions_of(mask)[:, -new.shape[1] :]
            out = model(
                input_ids=new,
                attention_mask=mask,
                position_ids=places,
                past_key_values=cache,
                use_cache=True,
            )
            taken.append(out.logits[:, -1])
            new = taken[-1].argmax(-1, keepdim=True)
            ids, mask = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    return ids, torch.stack(taken, 1)


def loss_and_grads(model, ids):
    """Returns mean next-token cross-entropy and its gradient by module name (None: no gradient)."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


# ---- the MTP layer, composed from transformers' own layer and norm ---------------------------------


def build_mtp(model, seed):
    """Returns the modules of one MTP layer: a MoE decoder layer, three norms and the projection."""
    layer_class, norm_class = type(model.model.layers[-1]), type(model.model.norm)
    d, eps = model.config.hidden_size, model.config.rms_norm_eps
    parts = torch.nn.ModuleDict(
        {
            "block": layer_class(model.config, model.config.num_hidden_layers - 1),
            "enorm": norm_class(d, eps),
            "hnorm": norm_class(d, eps),
            "norm": norm_class(d, eps),
            "eh_proj": torch.nn.Linear(2 * d, d, bias=False),
        }
    ).eval()
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, tensor in sorted(parts.state_dict().items()):
            tensor.copy_(torch.from_numpy(random_array(rng, name, tuple(tensor.shape))))
    return parts


def run_mtp(model, parts, ids, final_hidden):
    """Returns [(hidden, logits)] of MTP_STEPS chained steps with the same weights."""
    results, hidden = [], final_hidden
    with torch.no_grad():
        for k in range(1, MTP_STEPS + 1):
            t = ids.shape[1] - k
            embedded = parts["enorm"](model.model.embed_tokens(ids[:, k:]))
            joined = torch.cat([embedded, parts["hnorm"](hidden[:, :t])], -1)
            x = parts["eh_proj"](joined)
            places = torch.arange(k, k + t)[None]
            mask = torch.full((t, t), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)[None, None]
            x = parts["block"](
                x,
                attention_mask=mask,
                position_ids=places,
                position_embeddings=model.model.rotary_emb(x, places),
            )
            hidden = parts["norm"](x)
            results.append((hidden, model.lm_head(hidden)))
    return results


def mtp_tensors(model, parts):
    """Returns the MTP layer under its released names: single experts, repeated embedding and head."""
    prefix = f"model.layers.{model.config.num_hidden_layers}"
    tensors = {
        f"{prefix}.embed_tokens.weight": model.model.embed_tokens.weight,
        f"{prefix}.shared_head.head.weight": model.lm_head.weight,
        f"{prefix}.shared_head.norm.weight": parts["norm"].weight,
    }
    for name in ("enorm", "hnorm", "eh_proj"):
        tensors[f"{prefix}.{name}.weight"] = parts[name].weight
    for name, tensor in parts["block"].state_dict().items():
        if name == "mlp.experts.gate_up_proj":
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                tensors[f"{prefix}.mlp.experts.{e}.gate_proj.weight"] = gate
                tensors[f"{prefix}.mlp.experts.{e}.up_proj.weight"] = up
        elif name == "mlp.experts.down_proj":
            for e, down in enumerate(tensor):
                tensors[f"{prefix}.mlp.experts.{e}.down_proj.weight"] = down
        else:
            tensors[f"{prefix}.{name}"] = tensor
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


# ---- one golden ----------------------------------------------------------------------------------


def draw(spec, attempt):
    """Returns model, prompt and padded prompt of one attempt."""
    model = build(spec)
    randomise(model, spec["seed"] + 1000 * attempt)
    rng = np.random.default_rng(spec["seed"] + 1000 * attempt + 1)
    ids = torch.from_numpy(rng.integers(3, spec["config"]["vocab_size"], (2, spec["seq"])))
    mask = torch.ones_like(ids)
    for row, width in enumerate(spec["padding"]):
        mask[row, :width] = 0
    return model, ids, torch.where(mask.bool(), ids, PAD), mask


def compute(model, spec, ids, padded, mask):
    """Returns every array of one precision, the smallest gaps over all runs, and the cache's error.

    Stops early, with partial results, after a gap that is a near tie.
    """
    arrays, gaps = run(model, ids)
    off_cache = 0.0

    def watch(ids, mask=None):
        out, more = run(model, ids, mask)
        for name, gap in more.items():
            gaps[name] = min(gaps[name], gap)
        return out

    out = watch(padded, mask)
    arrays["pad_logits"] = out["logits"] * mask[..., None]
    prompts = {
        "long": (ids, torch.ones_like(ids)),
        "short": (ids[:, : spec["short_prompt"]], torch.ones(2, spec["short_prompt"], dtype=int)),
        "pad": (padded, mask),
    }
    for kind, (prompt, seen) in prompts.items():
        if near_tie(gaps):
            break
        grown, logits = continue_greedily(model, prompt, seen, NEW_TOKENS)
        seen = torch.cat([seen, seen.new_ones(2, NEW_TOKENS - 1)], 1)
        full = watch(grown[:, :-1], seen)["logits"][:, -NEW_TOKENS:]
        off_cache = max(off_cache, (full - logits).abs().max().item())
        if kind == "pad":
            arrays["pad_gen_ids"] = grown
        else:
            arrays |= {f"gen_{kind}_ids": grown, f"gen_{kind}_logits": logits}
    return arrays, gaps, off_cache


def near_tie(gaps):
    return any(gap < MIN_GAPS[name] for name, gap in gaps.items())


def find(spec):
    """Returns the first attempt with wide gaps in every decision."""
    for attempt in range(500):
        model, ids, padded, mask = draw(spec, attempt)
        arrays, gaps, off_cache = compute(model, spec, ids, padded, mask)
        if not near_tie(gaps):
            assert off_cache < 1e-4, f"cache and full forward differ by {off_cache}"
            return attempt, model, ids, padded, mask, arrays, gaps
    raise SystemExit("no attempt without a near tie; lower MIN_GAPS or shorten the prompt")


def difference(a, b):
    finite = torch.isfinite(b)
    gap = (a.double() - b.double())[finite].abs().max().item()
    return {"max_abs": gap, "max_rel_to_absmax": gap / b[finite].abs().max().item()}


DECISIONS = ["selected", "gen_long_ids", "gen_short_ids", "pad_gen_ids"]
COMPARED = ["logits", "hidden_states", "final_hidden", "attn_out", "mlp_out", "loss", "mtp_logits"]
COMPARED += ["index_scores", "router_logits", "router_weights"]


def make(name, folder):
    spec = GOLDENS[name]
    attempt, model, ids, padded, mask, arrays, gaps = find(spec)
    arrays["loss"], grads = loss_and_grads(model, ids)
    parts = build_mtp(model, spec["seed"] + 7) if spec["mtp"] else None

    with wide():
        twin = float64_twin(spec, model)
        twin_arrays, _, _ = compute(twin, spec, ids, padded, mask)
        twin_arrays["loss"], twin_grads = loss_and_grads(twin, ids)
        if parts is not None:
            twin_parts = build_mtp(twin, spec["seed"] + 7).double()
            twin_parts.load_state_dict({k: v.double() for k, v in parts.state_dict().items()})
            twin_steps = run_mtp(twin, twin_parts, ids, twin_arrays["final_hidden"])
            twin_arrays["mtp_logits"] = twin_steps[0][1]
    assert twin_arrays["logits"].dtype == torch.float64
    for key in DECISIONS:
        assert key not in arrays or torch.equal(arrays[key], twin_arrays[key]), key
    assert torch.equal(arrays["router_weights"] != 0, twin_arrays["router_weights"] != 0)

    if parts is not None:
        for k, (hidden, logits) in enumerate(
            run_mtp(model, parts, ids, arrays["final_hidden"]), start=1
        ):
            suffix = "" if k == 1 else f"_{k}"
            arrays |= {f"mtp_hidden{suffix}": hidden, f"mtp_logits{suffix}": logits}

    folder = pathlib.Path(folder) / name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*"):
        old.unlink()
    save_checkpoint(model, parts, spec, folder)
    reloaded = eager(type(model).from_pretrained(folder))
    with torch.no_grad():
        again = reloaded(input_ids=ids, use_cache=False).logits
    assert (again - arrays["logits"]).abs().max() < 1e-4, "the saved checkpoint says otherwise"

    kinds = model.config.mlp_layer_types
    arrays |= {
        "input_ids": ids,
        "pad_input_ids": padded,
        "pad_attention_mask": mask,
        "pad_position_ids": positions_of(mask),
        "moe_layers": torch.tensor([i for i, kind in enumerate(kinds) if kind == "sparse"]),
        "logits_f64": twin_arrays["logits"],
        "final_hidden_f64": twin_arrays["final_hidden"],
        "loss_f64": twin_arrays["loss"],
    }
    if "selected" in arrays:
        full = [i for i, kind in enumerate(model.config.indexer_types) if kind == "full"]
        arrays["full_layers"] = torch.tensor(full)
    saved = {key: np.asarray(value.detach()) for key, value in sorted(arrays.items())}
    np.savez_compressed(folder / "arrays.npz", **saved)
    with_grad = {key: g for key, g in sorted(twin_grads.items()) if g is not None}
    rounded = {key: np.asarray(g, np.float32) for key, g in with_grad.items()}
    np.savez_compressed(folder / "grads.npz", **rounded)

    rounding = {k: difference(arrays[k], twin_arrays[k]) for k in COMPARED if k in arrays}
    rounding["grads"] = max(
        (difference(grads[k], g) for k, g in with_grad.items()), key=lambda d: d["max_abs"]
    )
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes 0600
    meta = {
        "fixture": name,
        "note": spec["note"],
        "command": f"python tests/goldens/make_goldens.py tests/goldens {name}",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "attempts": attempt + 1,
        "seed": spec["seed"] + 1000 * attempt,
        "seq": spec["seq"],
        "short_prompt": spec["short_prompt"],
        "new_tokens": NEW_TOKENS,
        "smallest_gaps": gaps,
        "float32_vs_float64": rounding,
        "grad_norms": {key: g.norm().item() for key, g in with_grad.items()},
        "parameters_without_gradient": [key for key, g in twin_grads.items() if g is None],
        "arrays": {key: [str(v.dtype), list(v.shape)] for key, v in saved.items()},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name}: attempt {attempt}, gaps {gaps}, {size / 1e6:.2f} MB")
    print(json.dumps(rounding, indent=1))


def save_checkpoint(model, parts, spec, folder):
    """Writes the files of save_pretrained; with an MTP layer, in the released spelling and one file."""
    model.save_pretrained(folder, max_shard_size=spec["shard"])
    if parts is None:
        return
    path = folder / "model.safetensors"
    save_file(load_file(path) | mtp_tensors(model, parts), path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for key in ("mlp_layer_types", "output_router_logits", "qk_head_dim", "rope_interleave"):
        config.pop(key)
    rope = config.pop("rope_parameters")
    config |= {
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "rope_scaling": None,
        "rope_theta": int(rope["rope_theta"]),
        "topk_method": "noaux_tc",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 3 or set(sys.argv[2:]) - set(GOLDENS):
        raise SystemExit(f"usage: make_goldens.py FOLDER NAME..., names: {', '.join(GOLDENS)}")
    torch.set_num_threads(2)
    for wanted in sys.argv[2:]:
        make(wanted, sys.argv[1])
