"""Tests of GLM-5's serving programs: lowered at full size, and small ones compiled for their chips."""

import dataclasses

import pytest

from glm5_jax import presets
from glm5_jax.inference.request import EngineConfig
from glm5_jax.parallel.mesh import abstract_mesh
from launch.aot import programs as pod
from launch.aot.program_report import describe, report_of
from launch.aot.serving_programs import lower_decode, lower_prefill
from tests.kernels.offline import pod_of
from tests.pod.test_kernels_in_model import kernels
from tests.pod.test_offline_compilers import mesh_of

GLM5 = presets.glm5()
EXPERTS = 76 * 256 * 3 * 6144 * 2048  # weights of routed experts, including the MTP layer's
LOWER = {"prefill": lower_prefill, "decode": lower_decode}
LAYOUTS = {
    "8 H200, 128K": (
        "NVIDIA H200",
        {"expert": 8},
        EngineConfig(max_length=131_072, max_num_seqs=1, index_cache="fp8", latent_cache="fp8"),
    ),
    "64 v5e, 200K": (
        "TPU v5e",
        {"fsdp": 8, "expert": 8},
        EngineConfig(max_length=202_752, max_num_seqs=1, index_cache="int8", latent_cache="fp8"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOWER)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_size_serving_lowers_from_shapes(layout, name):
    chip, axes, options = LAYOUTS[layout]
    mesh = abstract_mesh(axes, chip)
    platform = mesh.abstract_device.platform
    program = LOWER[name](GLM5, mesh, platform, options, quantised=True)
    text = program.lowered.as_text()
    assert f"mhlo.num_partitions = {mesh.size}" in text
    weights = pod.bytes_on_device(program.arguments["weights"])
    routed = sum(size for path, size in weights.items() if "/experts/" in path)
    assert routed == (EXPERTS // 2 + 4 * EXPERTS // 128) // mesh.size
    rest = 2 * (GLM5.num_stored_parameters - EXPERTS) / mesh.size
    assert routed + rest / 2 < sum(weights.values()) < routed + 1.1 * rest
    pages = sum(pod.bytes_on_device(program.arguments["cache"]["layers"]).values())
    row = (656 if platform == "cuda" else 1024) + 132
    assert pages == 78 * row * options.max_length, "one sequence per device"
    assert max(pod.replicated_bytes(program.arguments["weights"]).values()) < 0.1 * 2**30


KERNELS = {
    "v5p:2x2x2": {"lightning_indexer", "sparse_flash_attention"},
    "h200:1x8": {"score_keys", "select_rows", "sparse_attend"},
}
PROJECTIONS = {"v5p:2x2x2": "mla_prologue", "h200:1x8": "mla_project"}


@pytest.mark.aot
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("target", KERNELS)
def test_small_serving_programs_use_kernels_of_chip(target, quantised):
    widths = {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64}
    cfg = dataclasses.replace(
        presets.small(), num_hidden_layers=2, index_head_dim=128, index_topk=512, **widths
    )
    kinds = {"index_cache": "int8", "latent_cache": "fp8"} if quantised else {}
    options = EngineConfig(max_length=4096, max_num_seqs=2, **kinds)
    mesh, platform = mesh_of(target, {"fsdp": 2, "expert": 4}), pod_of(target).platform
    for name, lower in LOWER.items():
        program = lower(cfg, mesh, platform, options, quantised)
        report, text = report_of("small", target, program, mesh, pod_of(target), 0.0)
        names = kernels(text)
        product = "w4a8_matmul" if quantised else "grouped_matmul"
        assert any(product in kernel for kernel in names), (name, names)
        if name == "decode":
            assert names >= KERNELS[target]
            # The prologue needs weights of one dtype. In W4A8 q_b has 8 bits and kv_a 16.
            assert (PROJECTIONS[target] in names) != quantised
        assert report.fits and not report.replicated
        # Except for the slot state, the cache is written in place.
        assert report.unaliased_result_bytes < 0.02 * report.argument_bytes["cache"], (
            "pages are copied"
        )
        assert "ragged-all-to-all" in {row.kind for row in report.traffic}
        assert {"products", "memory", "links"} == report.seconds.keys()
        assert report.parts["experts"] > 0 and "chip-seconds for a million" in describe(report)


@pytest.mark.aot
def test_gathers_weights_one_layer_ahead():
    """Temporary memory does not grow with the number of layers."""
    target = "v6e:2x4"
    mesh, temporary_bytes = mesh_of(target, {"fsdp": 8}), {}
    for layers in (4, 12):
        sizes = {"num_hidden_layers": layers, "first_k_dense_replace": layers, "hidden_size": 4096}
        cfg = dataclasses.replace(presets.small(), **sizes)
        options = EngineConfig(max_length=1024, max_num_seqs=2)
        program = lower_decode(cfg, mesh, pod_of(target).platform, options)
        report, _ = report_of("small", target, program, mesh, pod_of(target), 0.0)
        temporary_bytes[layers] = report.temporary_bytes
    assert temporary_bytes[12] < 1.2 * temporary_bytes[4]
