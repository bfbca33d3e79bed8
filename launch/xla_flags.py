"""XLA options for training on each chip, and the environment variables that carry them.

Each set follows the public recipes for mixtures of experts on that chip, as far as the offline compiler accepts them
(tests/pod/test_chip_flags.py). None was timed in this project. Options that the user has set take precedence.
"""

from collections.abc import Mapping, MutableMapping

# Common to the recipes for TPUs: github.com/AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py.
_GRADIENTS = {  # DATA_PARALLEL_OVERLAP: gradient sums over slices overlap with the step
    "xla_tpu_enable_data_parallel_all_reduce_opt": "true",
    "xla_tpu_data_parallel_opt_different_sized_ops": "true",
}
# openxla.org/xla/flags_guidance: all-to-alls (experts, Muon) are asynchronous only with this option.
_EXCHANGES = {"xla_tpu_enable_async_all_to_all": "true"}
_TPU_SCHEDULER = {"xla_tpu_enable_latency_hiding_scheduler": "true"}
_TPU = _TPU_SCHEDULER | _EXCHANGES
# All-gathers overlap with matrix products.
_GATHERS = {
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_enable_async_all_gather": "true",
}

TPU = {
    # maxtext, benchmarks/maxtext_v5e_model_configs.py. CF_FOR_ALL_GATHER (continuation fusion) overlaps all-gathers with
    # fused products. libtpu 0.0.42 accepts it on other chips too, but its log warns of wrong results and of steps that
    # hang.
    "v5e": _TPU
    | _GRADIENTS
    | _GATHERS
    | {
        "xla_tpu_enable_async_collective_fusion": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
        "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    },
    # github.com/AI-Hypercomputer/tpu-recipes, training/v5p/Mixtral-8X7B-Maxtext, except for the last option. The recipe's
    # 81920 is more VMEM than a v5p has, so all of it would be reserved and none left for prefetching. With half of it,
    # libtpu estimates 0.6% more cycles for products, and compiling takes a quarter of the time
    # (tests/pod/test_chip_flags.py).
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
# that XLA may still recompute values that do not fit. The options are explained in docs.nvidia.com/jax-toolbox, "GPU
# performance".
_HOPPER = {
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    "xla_gpu_enable_triton_gemm": "false",  # cuBLAS
    "xla_gpu_enable_command_buffer": "",
    "xla_gpu_all_reduce_combine_threshold_bytes": "71303168",
    "xla_gpu_all_gather_combine_threshold_bytes": "536870912",
    "xla_gpu_reduce_scatter_combine_threshold_bytes": "134217728",
    "xla_gpu_enable_pipelined_all_gather": "true",
    # The recipe and XLA's defaults enable both. With a loop over microbatches around the layers' loops, these passes did
    # not finish within a quarter of an hour.
    "xla_gpu_enable_pipelined_reduce_scatter": "false",
    "xla_gpu_enable_pipelined_all_reduce": "false",
    "xla_gpu_enable_while_loop_double_buffering": "true",
    "xla_gpu_enable_all_gather_combine_by_dim": "false",
    "xla_gpu_enable_reduce_scatter_combine_by_dim": "false",
}
# Options of `_HOPPER` that XLA has removed since jax 0.11.
REMOVED = (
    "xla_gpu_enable_pipelined_all_gather",
    "xla_gpu_enable_pipelined_reduce_scatter",
    "xla_gpu_enable_pipelined_all_reduce",
)
FLAGS = TPU | {"h100": _HOPPER, "h200": _HOPPER}

# Options for compiling without the chip only. libtpu compiles each gather on a SparseCore as a separate LLVM program:
# 1,939 in a decode, because its layers are not a loop. This option compiles equal programs once. It is off by default,
# and programs compiled with it have not been run in this project. In the reports of launch.compile it changes only the
# code's size, by 1% (tests/pod/test_chip_flags.py).
OFFLINE = {"tpu7x": {"xla_tpu_enable_sparse_core_computation_deduplication": "true"}}

# JAX's default share of GPU memory is three quarters. This one leaves 12 GB of an H200 for CUDA and NCCL; chosen here,
# not measured.
GPU_SHARE = 0.92
_SHARE = "XLA_CLIENT_MEM_FRACTION"
_SHARES = (_SHARE, "XLA_PYTHON_CLIENT_MEM_FRACTION")


def reserve_gpu_memory(environment: MutableMapping[str, str]) -> None:
    """Sets JAX's share of GPU memory unless it is set. Call this before JAX initialises its devices."""
    if not any(environment.get(name) for name in _SHARES):
        environment[_SHARE] = str(GPU_SHARE)


def flags_variable(chip: str) -> str:
    """Returns the name of the environment variable from which a chip's compiler reads its options."""
    return "LIBTPU_INIT_ARGS" if chip in TPU else "XLA_FLAGS"


def format_flags(chip: str, overrides: str = "") -> str:
    """Returns the value of `flags_variable`: the chip's options, then the `overrides`.

    overrides: a value of that variable; the chip's options that it also sets are left out.
    """
    overridden = {word.lstrip("-").partition("=")[0] for word in overrides.split()}
    options = [f"--{name}={value}" for name, value in FLAGS[chip].items() if name not in overridden]
    return " ".join([*options, overrides]).strip()


def flag_environment(chip: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables to set for a process on such chips; {} for a chip without options.

    environment: the process's variables; options set in it take precedence.
    """
    if chip not in FLAGS:
        return {}
    name = flags_variable(chip)
    return {name: format_flags(chip, environment.get(name, ""))}
