"""GLM-5's serving programs at their true size for chips that are not there, and small ones through the real compilers."""

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
EXPERTS = 76 * 256 * 3 * 6144 * 2048  # weights of routed experts, the MTP layer's included
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
def test_true_size_lowers_from_shapes(layout, name):
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
    assert pages == 78 * row * options.max_length, "one sequence a device"
    assert max(pod.replicated_bytes(program.arguments["weights"]).values()) < 0.1 * 2**30


KERNELS = {
    "v5p:2x2x2": {"lightning_indexer", "sparse_flash_attention"},
    "h200:1x8": {"score_keys", "select_rows", "sparse_attend"},
}
PROJECTIONS = {"v5p:2x2x2": "mla_prologue", "h200:1x8": "mla_project"}


@pytest.mark.aot
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("target", KERNELS)
def test_small_programs_compile_with_the_kernels_of_their_chip(target, quantised):
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
        found = kernels(text)
        product = "w4a8_matmul" if quantised else "grouped_matmul"
        assert any(product in kernel for kernel in found), (name, found)
        if name == "decode":
            assert found >= KERNELS[target]
            # It takes weights of one dtype; in W4A8 q_b has 8 bits and what makes latents 16.
            assert (PROJECTIONS[target] in found) != quantised
        assert report.fits and not report.replicated
        # But for what is left of the slots, the cache is written in place.
        assert report.unaliased_result_bytes < 0.02 * report.argument_bytes["cache"], (
            "pages are copied"
        )
        assert "ragged-all-to-all" in {row.kind for row in report.traffic}
        assert {"products", "memory", "links"} == report.seconds.keys()
        assert report.parts["experts"] > 0 and "chip-seconds for a million" in describe(report)


@pytest.mark.aot
def test_weights_are_gathered_a_layer_ahead_and_no_more():
    """Three times as many layers take no more in between."""
    target = "v6e:2x4"
    mesh, taken = mesh_of(target, {"fsdp": 8}), {}
    for layers in (4, 12):
        sizes = {"num_hidden_layers": layers, "first_k_dense_replace": layers, "hidden_size": 4096}
        cfg = dataclasses.replace(presets.small(), **sizes)
        options = EngineConfig(max_length=1024, max_num_seqs=2)
        program = lower_decode(cfg, mesh, pod_of(target).platform, options)
        report, _ = report_of("small", target, program, mesh, pod_of(target), 0.0)
        taken[layers] = report.temporary_bytes
    assert taken[12] < 1.2 * taken[4]
