"""What the kernels are compared with beside XLA: the best call of a library that is on this machine.

torch and tokamax are used where they are installed and no other module imports them.
"""

import importlib.util
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from pallas_kernels import dispatch, dsa
from pallas_kernels.flash_mla.cases import SCALE
from pallas_kernels.index_scores import index_scores


class Baseline(NamedTuple):
    """run(inputs, sizes): the same call by a library, giving the first of a case's results.

    library: what must be installed. With torch the inputs and results are its tensors. same: whether
    the results must agree; if not, it is another call, whose time tells something.
    """

    library: str
    run: Callable[[dict[str, Any], Any], Any]
    same: bool = True


def present(kernel: str, case: str) -> dict[str, Baseline]:
    """The baselines of a case whose library is installed and has this machine's accelerator, by name."""
    found = BASELINES.get((kernel, case), {})
    return {name: baseline for name, baseline in found.items() if _is_there(baseline.library)}


def _is_there(library: str) -> bool:
    if importlib.util.find_spec(library) is None:
        return False
    if library != "torch":
        return library == "jax" or dispatch.platform() in dispatch.OF_PLATFORM
    import torch

    return dispatch.platform() == "cpu" or torch.cuda.is_available()


def result_on_host(baseline: Baseline, inputs, sizes) -> list:
    """What a baseline gives for jax arrays, as numpy arrays."""
    if baseline.library != "torch":
        return jax.tree.leaves(jax.device_get(jax.jit(lambda x: baseline.run(x, sizes))(inputs)))
    given = baseline.run(to_torch(inputs), sizes)
    given = given if isinstance(given, tuple) else (given,)
    # numpy has no bfloat16 that torch knows.
    return [(x.float() if x.is_floating_point() else x).detach().cpu().numpy() for x in given]


def to_torch(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same arrays as torch tensors, in the same memory: none of the calls writes to its inputs."""
    import torch

    return {name: torch.from_dlpack(array) for name, array in inputs.items()}


def torch_clock(baseline: Baseline, inputs, sizes) -> Callable[[int], float]:
    """The seconds that so many calls take, queued one behind the other; for `bench.time_runs`."""
    import torch

    given = to_torch(inputs)

    def wait():
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def spent(calls: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            baseline.run(given, sizes)
        wait()
        return time.perf_counter() - start

    return spent


def _torch_top_k(x, sizes):
    import torch

    return torch.topk(x["scores"], sizes["k"], sorted=False).indices.int()


def _top_k(x, sizes):
    return lax.top_k(x["scores"], sizes["k"])[1]


def _torch_attention(q, k, v, scale):
    """The queries are the last ones of the sequence. torch picks flash attention or cuDNN where it can."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    t, s = q.shape[2], k.shape[2]
    options = {"scale": scale, "enable_gqa": k.shape[1] != q.shape[1]}
    if t == s:
        options["is_causal"] = True
    elif t > 1:
        options["attn_mask"] = torch.ones(t, s, dtype=torch.bool, device=q.device).tril(s - t)
    return scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def _torch_flash(x, sizes):
    return _torch_attention(x["q"], x["k"], x.get("v", x["k"]), SCALE)


def _torch_flash_backward(x, sizes):
    import torch

    given = [x[name].detach().requires_grad_() for name in "qkv"]
    return torch.autograd.grad(_torch_attention(*given, SCALE), given, x["dout"])


def _cudnn(x, sizes):
    return jax.nn.dot_product_attention(
        x["q"], x["k"], x["v"], scale=SCALE, is_causal=True, implementation="cudnn"
    )


def _tokamax_attention(x, sizes):
    import tokamax

    return tokamax.dot_product_attention(x["q"], x["k"], x["v"], scale=SCALE, is_causal=True)


def _gradients(forward, names, cotangent):
    """The gradients of a jax baseline in those inputs."""

    def run(x, sizes):
        def of(*given):
            return forward(x | dict(zip(names, given)), sizes)

        return jax.vjp(of, *(x[name] for name in names))[1](x[cotangent])

    return run


def _ragged_dot(x, sizes):
    return lax.ragged_dot(x["x"], x["w"], x["group_sizes"])


def _tokamax_ragged_dot(x, sizes):
    import tokamax

    return tokamax.ragged_dot(x["x"], x["w"], x["group_sizes"])


def _torch_grouped(rows, weights, x, sizes):
    """torch leaves the rows that no expert has as they were in memory."""
    import torch

    ends = torch.cumsum(x["group_sizes"], 0).to(torch.int32)
    y = torch.nn.functional.grouped_mm(rows[: sizes["filled"]], weights, offs=ends)
    missing = sizes["m"] - sizes["filled"]
    return torch.nn.functional.pad(y, (0, 0, 0, missing)) if missing else y


def _torch_experts(x, sizes):
    return _torch_grouped(x["x"], x["w"], x, sizes)


def _torch_experts_backward(x, sizes):
    import torch

    rows, weights = (x[name].detach().requires_grad_() for name in ("x", "w"))
    y = _torch_grouped(rows, weights, x, sizes)
    return torch.autograd.grad(y, (rows, weights), x["dy"])


def _torch_cross_entropy(x, sizes):
    from torch.nn.functional import cross_entropy

    logits = x["hidden"] @ x["head"]
    return cross_entropy(logits.float(), x["targets"].long(), reduction="none")


def _tokamax_cross_entropy(x, sizes):
    import tokamax

    loss = tokamax.linear_softmax_cross_entropy_loss
    return loss(x["hidden"], x["targets"], x["head"], reduction="none")


def _scores(x, sizes):
    """The indexer's scores written to memory, which selection in one pass must hardly exceed."""
    return index_scores(x["idx_q"], x["idx_w"], x["idx_k"])


def _torch_dense(x, sizes):
    """The dense layer with torch's attention; the up-projections as in `dsa.dense`."""
    import torch

    c_kv, k_rope = x["latent"].split([sizes["c"], sizes["r"]], -1)
    k_nope = torch.einsum("bsc,cnh->bsnh", c_kv, x["k_b"])
    v = torch.einsum("bsc,cnu->bsnu", c_kv, x["v_b"])
    k = torch.cat([k_nope, k_rope[:, :, None].expand(*k_nope.shape[:3], -1)], -1)
    return _torch_attention(x["q"], k, v, (sizes["h"] + sizes["r"]) ** -0.5)


_FLASH = {
    "torch": Baseline("torch", _torch_flash),
    "cudnn": Baseline("jax_cuda13_plugin", _cudnn),
    "tokamax": Baseline("tokamax", _tokamax_attention),
}
_FLASH_BACKWARD = {
    "torch": Baseline("torch", _torch_flash_backward),
    "cudnn": Baseline("jax_cuda13_plugin", _gradients(_cudnn, "qkv", "dout")),
    "tokamax": Baseline("tokamax", _gradients(_tokamax_attention, "qkv", "dout")),
}
_EXPERTS = {
    "lax.ragged_dot": Baseline("jax", _ragged_dot),
    "torch": Baseline("torch", _torch_experts),
    "tokamax": Baseline("tokamax", _tokamax_ragged_dot),
}
_EXPERTS_BACKWARD = {
    "lax.ragged_dot": Baseline("jax", _gradients(_ragged_dot, ("x", "w"), "dy")),
    "torch": Baseline("torch", _torch_experts_backward),
    "tokamax": Baseline("tokamax", _gradients(_tokamax_ragged_dot, ("x", "w"), "dy")),
}
_SELECTION = {"lax.top_k": Baseline("jax", _top_k), "torch": Baseline("torch", _torch_top_k)}
_DENSE = {
    "dense": Baseline("jax", dsa.dense, same=False),
    "torch": Baseline("torch", _torch_dense, same=False),
}

BASELINES = {
    **{("top_k", case): _SELECTION for case in ("decode", "prefill")},
    **{("dsa", case): _DENSE for case in dsa.CASES},
    ("lightning_indexer", "prefill"): {"scoring": Baseline("jax", _scores, same=False)},
    ("flash_mla", "long_forward"): _FLASH,
    ("flash_mla", "long_backward"): _FLASH_BACKWARD,
    ("flash_mla", "decode"): {"torch": _FLASH["torch"]},
    **{
        ("grouped_matmul", c): _EXPERTS
        for c in ("forward", "forward_down", "forward_skewed", "decode")
    },
    **{
        ("grouped_matmul", c): _EXPERTS_BACKWARD
        for c in ("backward", "backward_down", "backward_skewed")
    },
    ("cross_entropy", "forward"): {
        "torch": Baseline("torch", _torch_cross_entropy),
        "tokamax": Baseline("tokamax", _tokamax_cross_entropy),
    },
}
