"""Library calls of torch that kernels are compared with; imported where torch is installed.

Each call is checked against XLA at small sizes before it is timed (`bench.baseline_difference`).
"""

import time
from collections.abc import Callable
from typing import Any

import torch  # pyright: ignore[reportMissingImports]: only the benchmarks have it
from torch.nn import functional  # pyright: ignore[reportMissingImports]: only the benchmarks have it

from pallas_kernels.flash_mla.cases import SCALE


def has_gpu() -> bool:
    """Returns whether this torch can use a GPU of this machine."""
    return torch.cuda.is_available()


def tensors(inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arrays as torch tensors in the same memory; none of the calls writes to its inputs."""
    return {name: torch.from_dlpack(array) for name, array in inputs.items()}


def on_host(run, inputs, sizes) -> list:
    """Returns the results of run(tensors, sizes) for jax arrays, as numpy arrays."""
    results = run(tensors(inputs), sizes)
    results = results if isinstance(results, tuple) else (results,)
    # torch does not support numpy's bfloat16.
    return [(x.float() if x.is_floating_point() else x).detach().cpu().numpy() for x in results]


def make_timer(run, inputs, sizes) -> Callable[[int], float]:
    """Returns a function (calls) -> seconds that times run(tensors, sizes), for `bench.time_runs`.

    All calls are queued before one wait.
    """
    torch_inputs = tensors(inputs)

    def wait():
        if has_gpu():
            torch.cuda.synchronize()

    def time_calls(calls: int) -> float:
        wait()
        start_s = time.perf_counter()
        for _ in range(calls):
            run(torch_inputs, sizes)
        wait()
        return time.perf_counter() - start_s

    return time_calls


def top_k(x, sizes):
    """Indices of the k largest, in any order."""
    return torch.topk(x["scores"], sizes["k"], sorted=False).indices.int()


def attention(q, k, v, scale):
    """Causal attention whose queries are the last ones of the sequence; torch picks flash attention or cuDNN."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    t, s = q.shape[2], k.shape[2]
    options = {"scale": scale, "enable_gqa": k.shape[1] != q.shape[1]}
    if t == s:
        options["is_causal"] = True
    elif t > 1:
        options["attn_mask"] = torch.ones(t, s, dtype=torch.bool, device=q.device).tril(s - t)
    return functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def flash(x, sizes):
    """`flash_mla` without documents."""
    return attention(x["q"], x["k"], x.get("v", x["k"]), SCALE)


def flash_backward(x, sizes):
    """Gradients of queries, keys and values."""
    q, k, v = (x[name].detach().requires_grad_() for name in "qkv")
    return torch.autograd.grad(attention(q, k, v, SCALE), [q, k, v], x["dout"])


def grouped(rows, weights, x, sizes):
    """Grouped matmul; torch leaves rows that belong to no expert as they were in memory."""
    ends = torch.cumsum(x["group_sizes"], 0).to(torch.int32)
    y = functional.grouped_mm(rows[: sizes["filled"]], weights, offs=ends)
    missing = sizes["m"] - sizes["filled"]
    return functional.pad(y, (0, 0, 0, missing)) if missing else y


def experts(x, sizes):
    """`grouped_matmul`."""
    return grouped(x["x"], x["w"], x, sizes)


def experts_backward(x, sizes):
    """Gradients of the rows and of the weights."""
    rows, weights = (x[name].detach().requires_grad_() for name in ("x", "w"))
    y = grouped(rows, weights, x, sizes)
    return torch.autograd.grad(y, (rows, weights), x["dy"])


def linear_cross_entropy(x, sizes):
    """Returns the loss of each row, with the logits in memory."""
    logits = x["hidden"] @ x["head"]
    return functional.cross_entropy(logits.float(), x["targets"].long(), reduction="none")


def dense(x, sizes):
    """Dense layer with torch's attention; the up-projections are those of `dsa.dense`."""
    c_kv, k_rope = x["latent"].split([sizes["c"], sizes["r"]], -1)
    k_nope = torch.einsum("bsc,cnh->bsnh", c_kv, x["k_b"])
    v = torch.einsum("bsc,cnu->bsnu", c_kv, x["v_b"])
    k = torch.cat([k_nope, k_rope[:, :, None].expand(*k_nope.shape[:3], -1)], -1)
    return attention(x["q"], k, v, (sizes["h"] + sizes["r"]) ** -0.5)
