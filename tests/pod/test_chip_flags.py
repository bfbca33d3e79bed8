"""What the offline compilers say of each chip: its devices, its memory, and the options that training there has."""

import os
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from launch import pods, xla_flags
from launch.aot.hlo import find_collectives
from launch.aot.program_report import summarize_traffic
from pallas_kernels.chips import CHIPS, find_chip
from tests.contracts.source_tree import ROOT
from tests.kernels.offline import TOO_MUCH, pod_of

pytestmark = pytest.mark.aot

SMALL = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
SMALL |= {"h100": "h100:1x4", "h200": "h200:1x4"}
GIB = 2**30
LAYERS = 96
VMEM = "xla_tpu_scoped_vmem_limit_kib"
MOST = {"v5p": 65472}  # of it, as libtpu says


def program(pod: pods.Pod, rows: int = 512):
    """A product of a gathered weight in a scanned layer, whose gradient is summed, lowered for all devices."""
    mesh = pods.make_pod_mesh(pod, {"fsdp": -1})

    def loss(weights, x):
        def layer(x, w):
            whole = jax.lax.all_gather(w, "fsdp", axis=0, tiled=True)
            return jnp.tanh(x @ whole), None

        x, _ = jax.lax.scan(layer, x, weights)
        return jax.lax.psum(jnp.sum(x), "fsdp")

    specs = (P(None, "fsdp"), P("fsdp"))
    local = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    shapes = ((4, 512, 512), (rows * mesh.size, 512))
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs)
    ]
    return jax.jit(jax.grad(local)).lower(*args)


@pytest.mark.parametrize("chip", xla_flags.FLAGS)
def test_the_compiler_takes_the_options_of_a_chip_and_no_others(chip):
    pod = pod_of(SMALL[chip])
    lowered = program(pod)
    assert lowered.compile(compiler_options=pod.options)
    invented = "xla_gpu_warp_speed" if pod.platform == "cuda" else "xla_tpu_warp_speed"
    with pytest.raises(Exception, match=f"No such compile option: '{invented}'"):
        lowered.compile(compiler_options=pod.options | {invented: "true"})


def repeated(pod: pods.Pod):
    """Products of weights that are gathered one after the other, as in layers that are no loop."""
    mesh = pods.make_pod_mesh(pod, {"fsdp": -1})

    def forward(weights, x):
        for w in weights:
            w, x = jax.lax.optimization_barrier((w, x))
            x = jnp.tanh(x @ jax.lax.all_gather(w, "fsdp", axis=0, tiled=True))
        return x

    specs = ([P("fsdp")] * LAYERS, P("fsdp"))
    local = jax.shard_map(forward, mesh=mesh, in_specs=specs, out_specs=P("fsdp"))
    shape = jax.ShapeDtypeStruct(
        (2048, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp"))
    )
    return jax.jit(local).lower([shape] * LAYERS, shape)


@pytest.mark.parametrize("chip", xla_flags.OFFLINE)
def test_what_shortens_compilations_changes_nothing_that_is_told(chip):
    """Collectives, and memory, in less time of processors."""
    pod = pod_of(SMALL[chip])
    mesh, lowered, told, seconds = pods.make_pod_mesh(pod, {"fsdp": -1}), repeated(pod), [], []
    # The shorter one first: it starts libtpu too.
    for options in (pod.options | pod.shortcuts, pod.options):
        began = time.process_time()
        compiled = lowered.compile(compiler_options=options)
        seconds.append(time.process_time() - began)
        sent = summarize_traffic(find_collectives(compiled.as_text(), mesh), mesh)
        stats = compiled.memory_analysis()
        told.append((sent, stats.temp_size_in_bytes, stats.argument_size_in_bytes))
    assert told[0] == told[1] and told[0][0][0].count == LAYERS
    assert seconds[0] < seconds[1] * 2 / 3, seconds


START = """
from launch import pods
print(len(pods.list_devices(pods.parse("v6e:2x2"))))
"""


@pytest.mark.parametrize("chip", xla_flags.TPU)
def test_libtpu_starts_with_the_options_of_a_chip_and_no_others(chip):
    """As the launchers say them. Libtpu reads them once for all kinds of chips."""
    pod_of(SMALL[chip])
    for own, code in (("", 0), ("--xla_tpu_warp_speed=true", 1)):
        env = os.environ | {"LIBTPU_INIT_ARGS": xla_flags.format_flags(chip, own)}
        command = [sys.executable, "-c", START]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout == "4\n") == (code, code == 0), done.stderr
    assert "Unknown command line flag 'xla_tpu_warp_speed'" in done.stderr


COMPILE = """
import sys
from launch import pods
from tests.pod import test_chip_flags
pod = pods.parse(sys.argv[1])
options = pod.options | dict(word.split("=") for word in sys.argv[2:])
test_chip_flags.program(pod).compile(compiler_options=options)
"""


@pytest.mark.parametrize("chip", xla_flags.TPU)
def test_libtpu_does_not_warn_of_an_option_of_a_chip(chip, tmp_path):
    """As it does, in its own log alone, of what a chip does not support but compiles all the same."""
    pod_of(SMALL[chip])
    fused = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"  # for v5e alone
    cases = {
        "own": ((), False),
        "fused": ((f"{fused}=true",), chip != "v5e"),
        "memory": ((f"{VMEM}={2**18}",), True),
    }
    for name, (own, warned) in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        env = os.environ | {"TPU_LOG_DIR": str(folder)}
        command = [sys.executable, "-c", COMPILE, SMALL[chip], *own]
        subprocess.run(command, env=env, cwd=ROOT, check=True, capture_output=True)
        said = [line for file in folder.iterdir() for line in file.read_text().splitlines()]
        risks = [line for line in said if "at your own risk" in line or TOO_MUCH in line]
        assert said and bool(risks) == warned, (name, risks[:1])


def gated(pod: pods.Pod):
    """GLM-5's dense feed-forward over 8,192 tokens with its gradients, on one device each."""
    mesh = pods.make_pod_mesh(pod, {"fsdp": -1})

    def loss(x, up, down):
        inside = jax.nn.silu(jnp.einsum("btd,df->btf", x, up))
        return jnp.sum(jnp.einsum("btf,fd->btd", inside, down) + x, dtype=jnp.float32)

    shapes = (2, 4096, 6144), (6144, 12288), (12288, 6144)
    whole = NamedSharding(mesh, P())
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole) for shape in shapes]
    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*args)


@pytest.mark.parametrize("chip", [c for c, own in xla_flags.TPU.items() if VMEM in own])
def test_products_take_no_more_cycles_with_the_memory_that_a_chip_is_told(chip):
    """By libtpu's own estimate: than with its default, nor 1% more than with all that there is."""
    pod, cycles = pod_of(SMALL[chip]), {}
    own = int(pod.options[VMEM])
    for limit in dict.fromkeys((None, own, MOST.get(chip, own))):
        options = {name: value for name, value in pod.options.items() if name != VMEM}
        options |= {} if limit is None else {VMEM: str(limit)}
        began = time.process_time()
        text = gated(pod).compile(compiler_options=options).as_text()
        found = re.findall(r'"estimated_cycles":"(\d+)"', text.partition("ENTRY")[2])
        cycles[limit] = sum(map(int, found))
        seconds = time.process_time() - began
        print(
            f"{chip} {options.get(VMEM, 'default')} KiB: {cycles[limit]:,} cycles, {seconds:.0f} s"
        )
    assert 0 < cycles[own] <= cycles[None]
    assert cycles[own] <= 1.01 * cycles[MOST.get(chip, own)]


@pytest.mark.parametrize(
    "text", [*SMALL.values(), "v5e:16x16", "2*v6e:4x4", "2*tpu7x:2x2x2", "h200:2x2x8"]
)
def test_compilers_know_as_many_devices_as_a_name_says(text):
    pod = pod_of(text)
    found = pods.list_devices(pod)
    assert len(found) == pod.num_devices and find_chip(found[0].device_kind) == pod.device
    if pod.platform == "tpu" and pod.num_slices > 1:
        slices = [device.slice_index for device in found]
        assert sorted(slices) == sorted(list(range(pod.num_slices)) * pod.devices_per_slice)
    hosts = {device.process_index for device in found}
    assert len(hosts) == max(1, len(found) // pod.device.per_host)
    assert pods.make_pod_mesh(pod, {"data": pod.num_slices, "fsdp": -1}).size == pod.num_devices


def test_what_the_compiler_does_not_know_is_told_in_one_line():
    with pytest.raises(ValueError, match="target 'v6e:3x5': its compiler says: ") as refused:
        pods.list_devices(pod_of("v6e:3x5"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("chip", pods.TORUS)
def test_the_table_has_the_memory_that_libtpu_allows(chip):
    """Its refusal of a program says how much there is, in GiB to two places."""
    pod = pod_of(SMALL[chip])
    where = NamedSharding(pods.make_pod_mesh(pod, {"fsdp": -1}), P())
    x = jax.ShapeDtypeStruct((int(CHIPS[chip].memory) >> 20, 2**20), jnp.int8, sharding=where)
    with pytest.raises(Exception) as refused:
        jax.jit(lambda x: x + 1).lower(x).compile()
    needed, most = re.search(
        r"([\d.]+)G\) exceeds available HBM \(([\d.]+)G", str(refused.value)
    ).groups()
    assert float(needed) == pytest.approx(2 * x.size / GIB, abs=0.01), "what G is"
    assert float(most) == pytest.approx(pod.device.memory / GIB, abs=0.005)
