"""Options of XLA that training on a chip should have, and the environment variables that say them.

Each set is what public recipes for mixtures of experts on that chip say, as far as the offline compiler takes it
(tests/pod/test_chip_flags.py); none was timed here. What a user has set himself counts instead.
"""

from collections.abc import Mapping, MutableMapping

# What the recipes for TPUs share: github.com/AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py.
_GRADIENTS = {  # DATA_PARALLEL_OVERLAP: sums of gradients over slices go on while the step does
    "xla_tpu_enable_data_parallel_all_reduce_opt": "true",
    "xla_tpu_data_parallel_opt_different_sized_ops": "true",
}
# openxla.org/xla/flags_guidance: all-to-alls (of experts, of Muon) are asynchronous only if this is set.
_EXCHANGES = {"xla_tpu_enable_async_all_to_all": "true"}
_TPU_SCHEDULER = {"xla_tpu_enable_latency_hiding_scheduler": "true"}
_TPU = _TPU_SCHEDULER | _EXCHANGES
# Gathers go on while products do.
_GATHERS = {
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_enable_async_all_gather": "true",
}

TPU = {
    # maxtext, benchmarks/maxtext_v5e_model_configs.py. CF_FOR_ALL_GATHER, continuation fusion, has gathers go on inside fused
    # products. On other chips libtpu 0.0.42 takes it too, and warns in its log of wrong results and of steps that hang.
    "v5e": _TPU
    | _GRADIENTS
    | _GATHERS
    | {
        "xla_tpu_enable_async_collective_fusion": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
        "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    },
    # github.com/AI-Hypercomputer/tpu-recipes, training/v5p/Mixtral-8X7B-Maxtext, but for the last: the recipe's 81920 is more than a
    # v5p has: all of it counts then, and nothing is left to fetch ahead into. By libtpu's own estimate products take 0.6%
    # more cycles with half, and a quarter of the time to compile (tests/pod/test_chip_flags.py).
    "v5p": _TPU
    | _GRADIENTS
    | _GATHERS
    | {
        "xla_tpu_megacore_fusion_allow_ags": "false",
        "xla_enable_async_collective_permute": "true",
        "xla_tpu_enable_ag_backward_pipelining": "true",
        "xla_tpu_scoped_vmem_limit_kib": "32768",
    },
    # tpu-recipes, training/trillium/Mixtral-8x22B-MaxText, without its continuation fusion.
    "v6e": _TPU | _GRADIENTS | _GATHERS | {"xla_tpu_scoped_vmem_limit_kib": "81920"},
    # tpu-recipes, training/ironwood/deepseek3-671b/4k-bf16-tpu7x-4x8x8: collectives on the SparseCores
    "tpu7x": _TPU
    | {
        "xla_tpu_scoped_vmem_limit_kib": "65536",
        "xla_tpu_bf16_emission_mode": "NATIVE_EMISSION",
        "xla_tpu_enable_sparse_core_reduce_scatter_v2": "true",
        "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "true",
        "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": "true",
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
        "xla_tpu_enable_all_gather_offload_tracing": "true",
        "xla_tpu_use_tc_device_shape_on_sc": "true",
        "xla_sc_disable_megacore_partitioning": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "false",
        "xla_enable_async_all_gather": "true",
        "xla_tpu_prefer_async_allgather_to_allreduce": "true",
        "xla_tpu_use_single_sparse_core_for_all_gather_offload": "true",
        "xla_tpu_enable_concurrent_sparse_core_offloading": "true",
    },
}
# github.com/AI-Hypercomputer/gpu-recipes, training/a3ultra/mixtral-8x7b (H200), without its xla_disable_hlo_passes, so
# that XLA may still recompute what does not fit; what each does: docs.nvidia.com/jax-toolbox, "GPU performance".
_HOPPER = {
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    "xla_gpu_enable_triton_gemm": "false",  # cuBLAS
    "xla_gpu_enable_command_buffer": "",
    "xla_gpu_all_reduce_combine_threshold_bytes": "71303168",
    "xla_gpu_all_gather_combine_threshold_bytes": "536870912",
    "xla_gpu_reduce_scatter_combine_threshold_bytes": "134217728",
    "xla_gpu_enable_pipelined_all_gather": "true",
    # The recipe has them, and XLA by default: with a loop over microbatches around the layers' loops it was not done with
    # that in a quarter of an hour.
    "xla_gpu_enable_pipelined_reduce_scatter": "false",
    "xla_gpu_enable_pipelined_all_reduce": "false",
    "xla_gpu_enable_while_loop_double_buffering": "true",
    "xla_gpu_enable_all_gather_combine_by_dim": "false",
    "xla_gpu_enable_reduce_scatter_combine_by_dim": "false",
}
# Of these, what XLA has no more since jax 0.11.
REMOVED = (
    "xla_gpu_enable_pipelined_all_gather",
    "xla_gpu_enable_pipelined_reduce_scatter",
    "xla_gpu_enable_pipelined_all_reduce",
)
FLAGS = TPU | {"h100": _HOPPER, "h200": _HOPPER}

# Of compilations without the chip alone: each gather that libtpu puts on a SparseCore is a program that LLVM compiles, 1,939 in a
# decode, whose layers are no loop. This compiles those once that are equal, which libtpu does not do of itself, and nobody
# here has seen run. Of what launch.compile tells it changes the code's size alone, by 1% (tests/pod/test_chip_flags.py).
OFFLINE = {"tpu7x": {"xla_tpu_enable_sparse_core_computation_deduplication": "true"}}

# Of a GPU's memory JAX takes three quarters if nobody says how much. What is left here, 12 GB of an H200, is for CUDA and
# NCCL; ours, not measured.
GPU_SHARE = 0.92
_SHARE = "XLA_CLIENT_MEM_FRACTION"
_SHARES = (_SHARE, "XLA_PYTHON_CLIENT_MEM_FRACTION")


def claim(environment: MutableMapping[str, str]) -> None:
    """Says there how much of a GPU's memory JAX may take, if nobody has; before JAX sees its devices."""
    if not any(environment.get(name) for name in _SHARES):
        environment[_SHARE] = str(GPU_SHARE)


def variable(chip: str) -> str:
    """The environment variable from which a chip's compiler reads its options."""
    return "LIBTPU_INIT_ARGS" if chip in TPU else "XLA_FLAGS"


def words(chip: str, own: str = "") -> str:
    """The value of `variable`: the options of the chip, without those that `own`, a value too, says otherwise; then `own`."""
    said = {word.lstrip("-").partition("=")[0] for word in own.split()}
    found = [f"--{name}={value}" for name, value in FLAGS[chip].items() if name not in said]
    return " ".join([*found, own]).strip()


def environment(chip: str | None, given: Mapping[str, str]) -> dict[str, str]:
    """What the environment of a process on such chips has besides `given`, which counts more; nothing for others."""
    if chip not in FLAGS:
        return {}
    name = variable(chip)
    return {name: words(chip, given.get(name, ""))}
