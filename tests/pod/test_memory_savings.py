"""Tests of the savings of each memory option, in compiled programs of eight chips and in the 744B step's shapes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from glm5_jax import presets
from glm5_jax.data.record import STREAMS
from glm5_jax.model import glm5
from glm5_jax.parallel.flops import count_flops
from glm5_jax.parallel.mesh import BATCH_AXES, SEQUENCE_AXES, abstract_mesh
from glm5_jax.parallel.tree import flatten, unflatten
from glm5_jax.training import muon
from glm5_jax.training.gradients import BATCH_KEYS, gradient_function
from glm5_jax.training.optimizer import OptimizerConfig, groups_of
from glm5_jax.training.step_config import StepConfig
from launch.aot.hlo import axes_of, find_collectives
from launch.aot.hlo_text import count_runs, parse_hlo
from pallas_kernels.cross_entropy import linear_cross_entropy
from tests.kernels.offline import compile_for, pod_of
from tests.mesh import cases
from tests.mesh.traffic import traffic
from tests.pod.test_lowering import pretraining
from tests.pod.test_offline_compilers import mesh_of

TPU, GPU, AXES = "v5p:2x2x2", "h200:1x8", {"fsdp": 4, "expert": 2}
ROWS, LENGTH, MB, GB = 32, 2048, 1e6, 1e9  # 8,192 tokens per chip
HOST = "S(5)"  # the host's pinned memory, in a layout
MODEL = dataclasses.replace(
    presets.small(),
    num_hidden_layers=8,
    first_k_dense_replace=0,  # one body to compile
    n_routed_experts=8,
    num_nextn_predict_layers=0,
    attention="dense",
    index_topk=None,
    indexer_types=None,
)
SPARSE = dataclasses.replace(MODEL, attention="sparse", index_topk=presets.small().index_topk)


def batch_of(rows, length, where=None):
    dtypes = {key: STREAMS.get(key, np.int32) for key in BATCH_KEYS}
    return {
        key: jax.ShapeDtypeStruct((rows, length), dtype, sharding=where)
        for key, dtype in dtypes.items()
    }


@functools.cache
def compiled(target, model=MODEL, axes=tuple(AXES.items()), shape=(ROWS, LENGTH), **step):
    """Compiles the gradients of a step in bfloat16, with the launchers' options for the chip's compiler."""
    mesh = mesh_of(target, dict(axes))
    shardings = glm5.param_shardings(model, mesh)
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=s),
        glm5.abstract_params(model),
        shardings,
    )
    batch = batch_of(*shape, NamedSharding(mesh, P(BATCH_AXES, SEQUENCE_AXES)))
    run = gradient_function(model, StepConfig(token_chunk=1024, **step), mesh)
    jitted = jax.jit(run, out_shardings=(None, None, shardings))
    lowered = jitted.lower(params, batch, cases.RATES)
    return lowered.compile(compiler_options=pod_of(target).options)


def print_memory(name, program):
    """Prints and returns the bytes of temporaries (on the device, on the host)."""
    analysis = program.memory_analysis()
    sizes = analysis.temp_size_in_bytes, analysis.host_temp_size_in_bytes
    print(f"{name}: temporaries {sizes[0] / MB:,.0f} MB, on the host {sizes[1] / MB:,.0f} MB")
    return sizes


def copies_to_and_from_the_host(text: str) -> list[tuple[bool, str, int]]:
    """Returns (is in a loop, name, operations between start and end) of a program's asynchronous copies."""
    module, copies = parse_hlo(text), []
    runs = count_runs(module)
    for name, computation in module.computations.items():
        instructions = list(computation.instructions.values())
        starts = {i.name: n for n, i in enumerate(instructions) if HOST in i.shape}
        for n, instruction in enumerate(instructions):
            start = starts.get(instruction.operands[0]) if instruction.operands else None
            if instruction.opcode.endswith("-done") and start is not None:
                work = [i for i in instructions[start:n] if i.opcode in ("fusion", "custom-call")]
                copies.append((runs[name].in_loop, instructions[start].name, len(work)))
    return copies


@pytest.mark.aot
@pytest.mark.parametrize("target", [TPU, GPU])
def test_offload_copies_layer_inputs_ahead(target):
    before, after = (compiled(target, remat=remat) for remat in ("full", "offload"))
    inputs = MODEL.num_hidden_layers * ROWS * LENGTH // 8 * MODEL.hidden_size * 2
    print(f"inputs of layers: {inputs / MB:.0f} MB")
    bytes_before, host_bytes_before = print_memory(f"{target} remat full", before)
    bytes_after, host_bytes_after = print_memory(f"{target} remat offload", after)
    assert host_bytes_before == 0 and host_bytes_after >= inputs
    assert bytes_after < bytes_before - 0.7 * inputs
    assert HOST not in before.as_text()
    copies = copies_to_and_from_the_host(after.as_text())
    print(*copies, sep="\n")
    assert any(in_loop and work for in_loop, _, work in copies), "no copy overlaps with computation"


@pytest.mark.aot
def test_remat_kinds_trade_memory_for_flops():
    """Storing the selected keys costs some memory and saves a second selection."""
    temporaries, flops = {}, {}
    for remat in ("full", "topk", "dots"):
        temporaries[remat], _ = print_memory(f"remat {remat}", compiled(TPU, SPARSE, remat=remat))
        step = StepConfig(token_chunk=1024, remat=remat)
        run = gradient_function(SPARSE, step, abstract_mesh(AXES))
        flops[remat] = count_flops(
            run, glm5.abstract_params(SPARSE), batch_of(ROWS, LENGTH), cases.RATES
        )
        print(f"{flops[remat] / 1e12:.2f} TFLOP")
    assert temporaries["full"] < temporaries["topk"] < temporaries["dots"]
    assert flops["full"] > flops["topk"] > flops["dots"]


@pytest.mark.aot
def test_context_axis_divides_memory_of_a_row():
    """Two rows of 32K tokens are sharded over two chips or four each."""
    temporaries = {}
    for number, target in ((2, "v5p:2x2x1"), (4, TPU)):
        axes = {"fsdp": 2, "context": number}
        temporaries[number], _ = print_memory(
            f"two rows over {axes}", compiled(target, SPARSE, tuple(axes.items()), (2, 32_768))
        )
    assert temporaries[4] < 0.6 * temporaries[2]


@pytest.mark.aot
@pytest.mark.parametrize("chip", ["v5p", "h200"])
def test_stores_logits_of_one_chunk(chip):
    """Compares all logits at once, XLA's chunks (`step.loss_chunk`) and the kernel, for GLM-5's head."""
    model, tokens, temporaries = presets.glm5(), 8192, {}
    logits = tokens * model.vocab_size * 4
    print(f"all logits in float32: {logits / MB:,.0f} MB")
    shapes = (
        jax.ShapeDtypeStruct((tokens, model.hidden_size), jnp.bfloat16),
        jax.ShapeDtypeStruct((model.hidden_size, model.vocab_size), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    for name, form, chunk in (
        ("all", "xla", tokens),
        ("chunks", "xla", 1024),
        ("kernel", "auto", 1),
    ):
        nll = functools.partial(linear_cross_entropy, chunk=chunk, implementation=form)
        gradient = jax.grad(lambda *args, nll=nll: nll(*args)[0].sum(), (0, 1))
        temporaries[name], _ = print_memory(
            f"{chip} logits {name}", compile_for(chip, gradient, *shapes)
        )
    assert temporaries["all"] > logits
    assert temporaries["chunks"] < temporaries["all"] - 0.6 * logits
    assert temporaries["kernel"] < temporaries["all"]


@pytest.mark.aot
def test_pregathered_weights_trade_memory_for_traffic():
    """The step has four microbatches; pregathered weights are sent once."""
    mesh, temporaries, sent_bytes = mesh_of(TPU, AXES), {}, {}
    for mode in ("sharded", "experts", "local"):
        program = compiled(TPU, remat="full", rows_per_device=1, accumulate=mode)
        temporaries[mode], _ = print_memory(f"accumulate {mode}", program)
        over = [c for c in find_collectives(program.as_text()) if axes_of(c, mesh) == ("fsdp",)]
        sent_bytes[mode] = sum(c.moved * (c.times or 1) for c in over)
        print(f"sent over fsdp in a step: {sent_bytes[mode] / MB:,.0f} MB")
    assert temporaries["sharded"] < temporaries["experts"] < temporaries["local"]
    assert sent_bytes["sharded"] > sent_bytes["experts"] > sent_bytes["local"]


def muon_update(model, mesh, blocks):
    """Returns (Newton-Schulz of all of Muon's weights, its abstract argument, shardings)."""
    groups = flatten(groups_of(OptimizerConfig(), glm5.axis_letters(model)))

    def chosen(values):
        return unflatten({p: v for p, v in flatten(values).items() if groups[p] == "muon"})

    letters, shapes = chosen(glm5.axis_letters(model)), chosen(glm5.abstract_params(model))
    where = cases.shardings_of(letters, shapes, mesh)
    transform = muon.orthogonalize(letters, mesh=mesh, blocks=blocks)
    args = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=s), shapes, where
    )
    return lambda updates: transform.update(updates, optax.EmptyState())[0], args, where


@pytest.mark.aot
@pytest.mark.parametrize("target", [TPU, GPU])
def test_owned_blocks_save_memory_and_flops(target):
    mesh, temporaries, flops = mesh_of(target, AXES), {}, {}
    for blocks in ("owned", "everywhere"):
        update, args, where = muon_update(MODEL, mesh, blocks)
        program = jax.jit(update, out_shardings=where).lower(args).compile()
        temporaries[blocks], _ = print_memory(f"{target} Newton-Schulz, blocks {blocks}", program)
        flops[blocks] = count_flops(update, args)
        collectives = find_collectives(program.as_text())
        moved = sum(c.moved * (c.times or 1) for c in collectives)
        print(f"{flops[blocks] / 1e12:.2f} TFLOP, {moved / MB:,.0f} MB sent")
        assert {c.kind for c in collectives} == {
            "all-to-all" if blocks == "owned" else "all-gather"
        }
    assert temporaries["owned"] < temporaries["everywhere"]
    assert 3 * flops["owned"] < flops["everywhere"]


@pytest.mark.slow
def test_owned_blocks_save_flops_of_744b_model():
    config, flops = pretraining(), {}
    mesh = abstract_mesh(dataclasses.asdict(config.mesh))
    for blocks in ("owned", "everywhere"):
        flops[blocks] = count_flops(*muon_update(config.model, mesh, blocks)[:2])
        print(f"Newton-Schulz, blocks {blocks}: {flops[blocks] / 1e12:.1f} TFLOP per chip")
    assert flops["everywhere"] > 10 * flops["owned"]


@functools.cache
def traffic_per_chip(mode, rows_per_device, **axes):
    """Returns {(collective, mesh axes): bytes per chip} of the gradients of a step of the 744B model."""
    config = pretraining()
    mesh = abstract_mesh({**dataclasses.asdict(config.mesh), **axes})
    step = dataclasses.replace(config.step, rows_per_device=rows_per_device, accumulate=mode)
    run = gradient_function(config.model, step, mesh)
    batch = batch_of(config.first_batch_rows, config.row_length)
    return traffic(run, glm5.abstract_params(config.model), batch, cases.RATES)


@pytest.mark.slow
def test_context_devices_exchange_latents_and_index_keys_only():
    """Queries are not exchanged (GLM-5 2.4)."""
    mesh = abstract_mesh({"fsdp": 2, "context": 4})
    step = StepConfig(token_chunk=1024, remat="full")
    run = gradient_function(SPARSE, step, mesh)
    long, short = (
        traffic(run, glm5.abstract_params(SPARSE), batch_of(2, length), cases.RATES)
        for length in (32_768, 16_384)
    )
    more = {kind: long[kind, ("context",)] - short[kind, ("context",)] for kind, _ in long}
    tokens, layers = 16_384, SPARSE.num_hidden_layers
    latents, keys = SPARSE.kv_lora_rank + SPARSE.qk_rope_head_dim, SPARSE.index_head_dim
    # Bfloat16 in the forward and its recomputation, and the segment numbers once.
    assert more.pop("all_gather") == tokens * (2 * layers * (latents + keys) * 2 + 4)
    assert more.pop("reduce_scatter") == tokens / 4 * layers * latents * 2
    assert not any(more.values())


@pytest.mark.slow
def test_pregathered_experts_are_sent_once_per_step():
    """256 experts over 256 chips, each sharded over four, are gathered by each of four microbatches or once."""
    always, once = (
        traffic_per_chip(mode, 1, fsdp=4, expert=256) for mode in ("sharded", "experts")
    )
    model = presets.glm5()
    layers = model.num_hidden_layers - model.first_k_dense_replace
    expert = 3 * model.hidden_size * model.moe_intermediate_size * 2  # in bfloat16
    saved = {}
    for kind in ("all_gather", "reduce_scatter"):
        # Only weights and their gradients are sent over fsdp.
        bytes_before, bytes_after = (
            sum(size for (name, axes), size in sizes.items() if name == kind and "fsdp" in axes)
            for sizes in (always, once)
        )
        print(
            f"{kind} over fsdp, GB per chip and step: "
            f"sharded {bytes_before / GB:.1f}, experts {bytes_after / GB:.1f}"
        )
        saved[kind] = bytes_before - bytes_after
    # Forward and recomputation of each microbatch gather them; the MTP layer's are gathered in each of three steps.
    assert saved["all_gather"] > (2 * 4 - 1) * layers * expert
    assert saved["reduce_scatter"] > 0
