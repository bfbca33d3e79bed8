"""Programs of the engine, lowered from shapes: those that an engine runs, with the bytes on its devices."""

import dataclasses
import itertools
import json
import re

import jax
import pytest

from glm5_jax import presets
from glm5_jax.inference.quantize import rotation, table
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.runner import Runner
from glm5_jax.inference.serving_cost import BOUND
from glm5_jax.inference.shapes import resolve_shapes
from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import abstract_mesh, make_mesh
from glm5_jax.parallel.tree import flatten
from launch import command_line, compile as command
from launch.aot import programs as pod, serving_programs
from launch.aot.serving_programs import arguments_of, lower_decode, lower_prefill
from tests.mesh import cases

GROUP = 4
# A dense layer, and one with experts and without an indexer.
CFG = dataclasses.replace(
    cases.config(),
    num_hidden_layers=2,
    indexer_types=("full", "shared"),
    eos_token_id=(),
    int4_group=GROUP,
)
PLAIN = dataclasses.replace(CFG, int4_group=None)
AXES = {"fsdp": 2, "expert": 2, "tensor": 2}  # four groups of two devices
SMALL = EngineConfig(max_length=32, max_num_seqs=2, page_size=8, prefill_chunk=16)
LOWER = {"prefill": lower_prefill, "decode": lower_decode}


def total(tree) -> int:
    return sum(pod.bytes_on_device(tree).values())


def runner_of(mesh, options: EngineConfig, quantised: bool) -> Runner:
    """Returns the runner of an engine with random weights."""
    params, cfg = cases.params(PLAIN), PLAIN
    if quantised:
        params, cfg = table.quantise(*rotation.rotate(params, cfg), GROUP)
    if mesh is not None:
        params = jax.device_put(params, glm5.param_shardings(cfg, mesh, params))
    (shape, _), execution = resolve_shapes(cfg, options), options.execution()
    return Runner(glm5.Glm5(cfg, params=params, mesh=mesh), shape, execution)


KINDS = {
    "plain": (SMALL, False),
    "w4a8": (dataclasses.replace(SMALL, index_cache="int8", latent_cache="fp8"), True),
    "drafts": (dataclasses.replace(SMALL, num_speculative_tokens=2), False),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("one device", "prefill"),
        ("plain", "decode"),
        *[
            pytest.param(kind, name, marks=pytest.mark.slow)
            for kind, name in itertools.product(["one device", *KINDS], LOWER)
            if (kind, name) not in (("one device", "prefill"), ("plain", "decode"))
        ],
    ],
)
def test_lowers_program_of_engine(kind, name):
    """Text and bytes on each device equal those of an engine on real devices."""
    mesh = None if kind == "one device" else make_mesh(AXES)
    options, quantised = KINDS.get(kind, KINDS["drafts"])
    runner = runner_of(mesh, options, quantised)
    program = LOWER[name](CFG if quantised else PLAIN, mesh, "cpu", options, quantised)
    lowered, held = runner.lower_dummy(name)
    assert program.lowered.as_text() == lowered.as_text()
    for part, tree in held.items():
        arrays, shapes = (
            flatten(serving_programs.flatten_leaves(tree)),
            flatten(program.arguments[part]),
        )
        assert {path: (x.shape, x.dtype) for path, x in shapes.items()} == {
            path: (a.shape, a.dtype) for path, a in arrays.items()
        }
        if part != "inputs":
            each = {path: a.addressable_shards[0].data.nbytes for path, a in arrays.items()}
            assert pod.bytes_on_device(program.arguments[part]) == each


CHIPS = {"tpu": "TPU v5p", "cuda": "NVIDIA H200"}


@pytest.mark.parametrize(
    ("name", "platform"),
    [
        ("prefill", "tpu"),
        pytest.param("decode", "cuda", marks=pytest.mark.slow),
        pytest.param("prefill", "cuda", marks=pytest.mark.slow),
        pytest.param("decode", "tpu", marks=pytest.mark.slow),
    ],
)
def test_lowers_for_absent_chips(name, platform):
    mesh = abstract_mesh(AXES, CHIPS[platform])
    program = LOWER[name](CFG, mesh, platform, *KINDS["w4a8"])
    text = program.lowered.as_text()
    assert "mhlo.num_partitions = 8" in text
    assert "ragged_all_to_all" in text, "rows do not travel between the experts' devices"
    sliced = re.findall(r"stablehlo\.(?:dynamic_)?slice %arg\d+ .*: \(tensor<(.*?)>", text)
    assert {shape[-3:] for shape in sliced} <= {"i32"}, (
        "a layer's weights are copied out of a stack"
    )
    waiting = text.count("stablehlo.optimization_barrier %arg")
    assert waiting == CFG.num_hidden_layers - 1, "layers' weights wait for no activations"
    assert "i8" in text and {*program.arguments} == {"weights", "cache", "inputs"}
    assert max(pod.replicated_bytes(program.arguments["weights"]).values()) < 10_000
    assert (program.rows, program.length) == {"prefill": (4, 16), "decode": (8, 1)}[name]
    assert (
        program.max_cached_tokens == 32
        and min(program.parts["experts"], program.parts["indexer"]) > 0
    )
    assert {cost.dtype for cost in program.min_costs} == {"bfloat16", "int8"}


@pytest.mark.slow
@pytest.mark.parametrize("quantised", [False, True])
def test_counts_flops_by_part(quantised):
    """Four layers of GLM-5's size, so that other work is small on every chip."""
    cfg = dataclasses.replace(presets.glm5(), num_hidden_layers=4)
    options = EngineConfig(max_length=32_768, max_num_seqs=2, prefill_chunk=2048)
    programs = {}
    for platform, chip in CHIPS.items():
        mesh = abstract_mesh({"expert": 8}, chip)
        for name, lower in LOWER.items():
            program = lower(cfg, mesh, platform, options, quantised)
            first = programs.setdefault(name, program)
            assert program.parts == first.parts, "GPUs do the same work"
            parts = program.parts
            assert min(parts[part] for part in ("indexer", "attention", "experts", "mlp")) > 0
            turned = 2 * program.rows * program.length // mesh.size * cfg.hidden_size**2
            assert parts["mtp"] == 0 and parts["rest"] == quantised * turned
    for name, program in programs.items():
        done = sum(program.parts.values())
        assert done == pytest.approx(program.model_flops, rel=0.03), name
        assert program.model_flops == sum(cost.flops for cost in program.min_costs)


def test_pages_have_layout_of_chip():
    """A TPU's rows of latents are words in full lanes, also where the tests run on a CPU."""
    cfg = dataclasses.replace(PLAIN, dtype="bfloat16")
    cfg = dataclasses.replace(cfg, kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128)
    options = EngineConfig(max_length=1024, max_num_seqs=1, page_size=64, prefill_chunk=16)
    rows = {}
    for platform, chip in CHIPS.items():
        mesh = abstract_mesh({"expert": 8}, chip)
        arguments = arguments_of("decode", cfg, mesh, options)
        layer = flatten(arguments["cache"]["layers"]["0"])
        rows[platform] = sum(pod.bytes_on_device(layer).values()) / 1024
    assert rows == {"cuda": 1152 + 256, "tpu": 1536 + 256}


def test_bytes_on_device_follow_from_shapes():
    """Pages hold the full batch, split over the groups. Quantised weights take half a byte and a scale per group."""
    mesh = abstract_mesh({"expert": 8}, CHIPS["cuda"])
    cfg = dataclasses.replace(PLAIN, dtype="bfloat16", index_head_dim=28)
    options = dataclasses.replace(SMALL, max_length=64, max_num_seqs=1)
    held = {}
    for quantised in (False, True):
        variant = dataclasses.replace(cfg, int4_group=GROUP if quantised else None)
        arguments = arguments_of("decode", variant, mesh, options, quantised)
        sizes = pod.bytes_on_device(arguments["weights"])
        held[quantised] = sum(size for path, size in sizes.items() if "/experts/" in path)
        latents = 2 * 64 * 2 * (24 + 4)
        keys = 64 * 2 * 28  # the second layer has no indexer
        assert total(arguments["cache"]["layers"]) == latents + keys, "one sequence a device"
    experts = (1 + 1) * 16 * 3 * 32 * 8 // 8  # one layer, and the MTP layer's
    assert held == {False: 2 * experts, True: experts // 2 + 4 * experts // GROUP}


def test_only_pages_grow_with_sequences():
    mesh = abstract_mesh(AXES)
    one, two = (
        arguments_of("decode", PLAIN, mesh, dataclasses.replace(SMALL, max_num_seqs=batch))
        for batch in (2, 4)
    )
    assert total(two["cache"]["layers"]) == 2 * total(one["cache"]["layers"])
    assert total(two["weights"]) == total(one["weights"])
    assert two["inputs"]["tables"].shape == (4, 4, 4)


def test_places_full_size_model_without_memory():
    """W4A8 on eight H200: half a byte for each expert's weight, and all weights split in eight."""
    cfg, mesh = presets.glm5(), abstract_mesh({"expert": 8})
    plain, packed = (
        pod.bytes_on_device(
            serving_programs.flatten_leaves(serving_programs.abstract_weights(cfg, mesh, quantised))
        )
        for quantised in (False, True)
    )
    experts = 76 * 256 * 3 * 6144 * 2048
    sizes = [
        sum(size for path, size in weights.items() if "/experts/" in path)
        for weights in (plain, packed)
    ]
    assert sizes == [2 * experts // 8, (experts // 2 + 4 * experts // 128) // 8]
    assert sum(plain.values()) == pytest.approx(2 * cfg.num_stored_parameters / 8, rel=0.01)
    assert 50e9 < sum(packed.values()) < 54e9


@pytest.mark.parametrize(
    ("cfg", "changes", "message"),
    [
        (CFG, {"max_length": 4096}, "exceeds max_position_embeddings"),
        (CFG, {"max_num_seqs": 0}, "max_num_seqs is 0; it must be positive"),
        (CFG, {"page_size": 0}, "page_size is 0"),
        (presets.ablation("gqa"), {}, "the engine serves only full attention"),
        (
            dataclasses.replace(CFG, num_nextn_predict_layers=0),
            {"num_speculative_tokens": 1},
            "num_speculative_tokens is 1, and the model has no MTP layer; use 0",
        ),
    ],
)
def test_refuses_options_that_engine_refuses(cfg, changes, message):
    options = dataclasses.replace(SMALL, **changes)
    with pytest.raises(ValueError, match=message):
        lower_decode(cfg, abstract_mesh(AXES), "tpu", options)


SERVED = [
    "compile",
    "--experiment=experiments/serve.py:tiny",
    "--experiment.mesh.fsdp=2",
    "--experiment.mesh.expert=4",
    "--experiment.engine.max_length=128",
    "--model.num_hidden_layers=2",
]


@pytest.mark.slow
def test_reports_both_programs(capsys):
    assert command.main(SERVED) == 0
    out = capsys.readouterr().out
    for name in LOWER:
        assert f"serve:tiny: {name} on 8 devices of no topology, fsdp 2, expert 4" in out
    assert "64 rows of 1 tokens, 8 tokens per device, each with up to 128 in its pages" in out
    assert (
        out.count(BOUND) == 2 and "chip-seconds for a million, 64 sequences decoded at once" in out
    )
    assert "saved activations" not in out


@pytest.mark.slow
def test_prints_json_with_bytes_of_each_kind(capsys):
    flags = ["--model.dtype=bfloat16", "--quantised", "--model.int4_group=32"]
    assert command.main([*SERVED, *flags, "--json"]) == 0
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [report["program"] for report in reports] == [*LOWER]
    assert reports[0]["argument_bytes"]["weights"] == reports[1]["argument_bytes"]["weights"]
    assert reports[1]["fits"] is None and reports[1]["token_costs"][0]["batch"] == 64
    cfg = dataclasses.replace(presets.tiny(), num_hidden_layers=2, dtype="bfloat16")
    mesh, options = (
        abstract_mesh({"fsdp": 2, "expert": 4}),
        command_line.parse(SERVED[:-1]).config.engine,
    )
    plain, packed = (
        arguments_of("decode", variant, mesh, options, variant is not cfg)
        for variant in (cfg, dataclasses.replace(cfg, int4_group=32))
    )
    assert total(packed["weights"]) < 0.75 * total(plain["weights"])
    for kind, size in reports[1]["argument_bytes"].items():
        assert size == total(packed[kind]), kind
    assert reports[1]["argument_bytes"]["cache"] == total(plain["cache"])


def test_reads_model_of_checkpoint(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    config = {"model": dataclasses.asdict(PLAIN)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flag = f"--experiment.checkpoint={tmp_path}"
    config = command_line.parse([*SERVED[:2], flag]).config
    for quantised in (False, True):
        assert command.read_served_model(config, "tiny", ["compile"], quantised) == (
            PLAIN,
            quantised,
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--model", "tiny"], "--model is followed by a blank; write --model=NAME"),
        (["--model=glm6"], "no model 'glm6'; use --model=glm5, glm5_2"),
        (
            ["--model.heads=3"],
            "--model.heads: no field 'heads'; did you mean --model.num_attention_heads",
        ),
        (["--model.num_attention_heads=0"], "--model."),
        (["--experiment.checkpoint=nowhere"], "both name a model; give one"),
        (
            ["--experiment.engine.num_speculative_tokens=2", "--model.num_nextn_predict_layers=0"],
            "no MTP layer",
        ),
        (["--experiment.engine.max_length=1000000"], "exceeds max_position_embeddings"),
        (["--experiment.engine.max_num_seqs=0"], "max_num_seqs is 0; it must be positive"),
        (["--experiment.engine.latent_cache=int3"], "latent_cache is 'int3'"),
        (["--experiment.mesh.expert=3"], "mesh axis expert=3 does not divide n_routed_experts"),
        (["--experiment.mesh.expert=-1"], "mesh axis expert is left open (-1)"),
        (["--topology=abacus:2x2"], "'abacus:2x2' is not a pod"),
    ],
)
def test_reports_mistake_in_one_line(changes, message, capsys):
    assert command.main(SERVED + changes) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--quantised", "--model.num_hidden_layers=4"])
def test_refuses_serving_flags_for_stage(flag, capsys):
    assert command.main(["compile", "--experiment=experiments/pretrain.py:tiny", flag]) == 2
    assert f"{flag} is for experiments that serve" in capsys.readouterr().err
