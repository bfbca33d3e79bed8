"""Library calls that the benchmark compares kernels with, in addition to XLA.

torch and tokamax are used where they are installed. The torch calls are in `torch_calls`.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from pallas_kernels import backends, dsa
from pallas_kernels.flash_mla.cases import SCALE
from pallas_kernels.index_scores import index_scores


class Baseline(NamedTuple):
    """A library's call for the same case.

    Attributes:
      library: package that must be installed.
      run: run(inputs, sizes) returns the first of the case's results. With torch it takes and returns torch
        tensors.
      same: whether the results must agree. False: a different call, whose time is informative.
    """

    library: str
    run: Callable[[dict[str, Any], Any], Any]
    same: bool = True


def available_baselines(kernel: str, case: str) -> dict[str, Baseline]:
    """Returns the baselines of a case whose library is installed and can use this machine's accelerator, by name."""
    candidates = BASELINES.get((kernel, case), {})
    return {
        name: baseline for name, baseline in candidates.items() if _is_available(baseline.library)
    }


def _is_available(library: str) -> bool:
    if importlib.util.find_spec(library) is None:
        return False
    if library != "torch":
        return library == "jax" or backends.platform() in backends.BACKEND_OF_PLATFORM
    return backends.platform() == "cpu" or torch_calls().has_gpu()


def torch_calls():
    """Returns the module `torch_calls`, which imports torch."""
    return importlib.import_module("pallas_kernels.torch_calls")


def _torch(name: str, same: bool = True) -> Baseline:
    return Baseline("torch", lambda x, sizes: getattr(torch_calls(), name)(x, sizes), same)


def result_on_host(baseline: Baseline, inputs, sizes) -> list:
    """Returns the results of a baseline for jax arrays, as numpy arrays."""
    if baseline.library == "torch":
        return torch_calls().on_host(baseline.run, inputs, sizes)
    return jax.tree.leaves(jax.device_get(jax.jit(lambda x: baseline.run(x, sizes))(inputs)))


def _top_k(x, sizes):
    return lax.top_k(x["scores"], sizes["k"])[1]


def _cudnn(x, sizes):
    return jax.nn.dot_product_attention(
        x["q"], x["k"], x["v"], scale=SCALE, is_causal=True, implementation="cudnn"
    )


def _tokamax_attention(x, sizes):
    import tokamax  # pyright: ignore[reportMissingImports]: only the benchmarks have it

    return tokamax.dot_product_attention(x["q"], x["k"], x["v"], scale=SCALE, is_causal=True)


def _gradients(forward, names, cotangent):
    """Returns a baseline that computes gradients of a jax baseline with respect to the named inputs."""

    def run(x, sizes):
        def apply(*inputs):
            return forward(x | dict(zip(names, inputs)), sizes)

        return jax.vjp(apply, *(x[name] for name in names))[1](x[cotangent])

    return run


def _ragged_dot(x, sizes):
    return lax.ragged_dot(x["x"], x["w"], x["group_sizes"])


def _tokamax_ragged_dot(x, sizes):
    import tokamax  # pyright: ignore[reportMissingImports]: only the benchmarks have it

    return tokamax.ragged_dot(x["x"], x["w"], x["group_sizes"])


def _tokamax_cross_entropy(x, sizes):
    import tokamax  # pyright: ignore[reportMissingImports]: only the benchmarks have it

    loss = tokamax.linear_softmax_cross_entropy_loss
    return loss(x["hidden"], x["targets"], x["head"], reduction="none")


def _scores(x, sizes):
    """Writes the indexer's scores to memory. Selection in one pass must take hardly longer."""
    return index_scores(x["idx_q"], x["idx_w"], x["idx_k"])


_FLASH = {
    "torch": _torch("flash"),
    "cudnn": Baseline("jax_cuda13_plugin", _cudnn),
    "tokamax": Baseline("tokamax", _tokamax_attention),
}
_FLASH_BACKWARD = {
    "torch": _torch("flash_backward"),
    "cudnn": Baseline("jax_cuda13_plugin", _gradients(_cudnn, "qkv", "dout")),
    "tokamax": Baseline("tokamax", _gradients(_tokamax_attention, "qkv", "dout")),
}
_EXPERTS = {
    "lax.ragged_dot": Baseline("jax", _ragged_dot),
    "torch": _torch("experts"),
    "tokamax": Baseline("tokamax", _tokamax_ragged_dot),
}
_EXPERTS_BACKWARD = {
    "lax.ragged_dot": Baseline("jax", _gradients(_ragged_dot, ("x", "w"), "dy")),
    "torch": _torch("experts_backward"),
    "tokamax": Baseline("tokamax", _gradients(_tokamax_ragged_dot, ("x", "w"), "dy")),
}
_SELECTION = {"lax.top_k": Baseline("jax", _top_k), "torch": _torch("top_k")}
_DENSE = {
    "dense": Baseline("jax", dsa.dense, same=False),
    "torch": _torch("dense", same=False),
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
        "torch": _torch("linear_cross_entropy"),
        "tokamax": Baseline("tokamax", _tokamax_cross_entropy),
    },
}
