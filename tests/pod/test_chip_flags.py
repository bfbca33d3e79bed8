"""Tests of the offline compilers: the devices, memory and compiler options of each chip."""

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
MAX_VMEM_KIB = {"v5p": 65472}  # libtpu's maximum


def program(pod: pods.Pod, rows: int = 512):
    """Lowers the gradient of scanned layers with gathered weights for all devices."""
    mesh = pods.make_pod_mesh(pod, {"fsdp": -1})

    def loss(weights, x):
        def layer(x, w):
            gathered = jax.lax.all_gather(w, "fsdp", axis=0, tiled=True)
            return jnp.tanh(x @ gathered), None

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
def test_compiler_accepts_only_options_of_chip(chip):
    pod = pod_of(SMALL[chip])
    lowered = program(pod)
    assert lowered.compile(compiler_options=pod.options)
    invented = "xla_gpu_warp_speed" if pod.platform == "cuda" else "xla_tpu_warp_speed"
    with pytest.raises(Exception, match=f"No such compile option: '{invented}'"):
        lowered.compile(compiler_options=pod.options | {invented: "true"})


def repeated(pod: pods.Pod):
    """Lowers products of weights that are gathered one by one, as in layers without a loop."""
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
def test_shortcuts_do_not_change_reports(chip):
    """Collectives and memory are the same, and compilation takes less CPU time."""
    pod = pod_of(SMALL[chip])
    mesh, lowered, reports, seconds = pods.make_pod_mesh(pod, {"fsdp": -1}), repeated(pod), [], []
    # The shorter compilation runs first, because it also starts libtpu.
    for options in (pod.options | pod.shortcuts, pod.options):
        began = time.process_time()
        compiled = lowered.compile(compiler_options=options)
        seconds.append(time.process_time() - began)
        sent = summarize_traffic(find_collectives(compiled.as_text(), mesh), mesh)
        stats = compiled.memory_analysis()
        reports.append((sent, stats.temp_size_in_bytes, stats.argument_size_in_bytes))
    assert reports[0] == reports[1] and reports[0][0][0].count == LAYERS
    assert seconds[0] < seconds[1] * 2 / 3, seconds


START = """
from launch import pods
print(len(pods.list_devices(pods.parse("v6e:2x2"))))
"""


@pytest.mark.parametrize("chip", xla_flags.TPU)
def test_libtpu_accepts_only_flags_of_chip(chip):
    """Libtpu reads the launchers' flags once for all kinds of chips."""
    pod_of(SMALL[chip])
    for flag, code in (("", 0), ("--xla_tpu_warp_speed=true", 1)):
        env = os.environ | {"LIBTPU_INIT_ARGS": xla_flags.format_flags(chip, flag)}
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
def test_libtpu_does_not_warn_of_chip_options(chip, tmp_path):
    """Libtpu only logs a warning about options that a chip does not support."""
    pod_of(SMALL[chip])
    fused = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"  # supported by v5e only
    cases = {
        "default": ((), False),
        "fused": ((f"{fused}=true",), chip != "v5e"),
        "memory": ((f"{VMEM}={2**18}",), True),
    }
    for name, (options, warns) in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        env = os.environ | {"TPU_LOG_DIR": str(folder)}
        command = [sys.executable, "-c", COMPILE, SMALL[chip], *options]
        subprocess.run(command, env=env, cwd=ROOT, check=True, capture_output=True)
        log = [line for file in folder.iterdir() for line in file.read_text().splitlines()]
        warnings = [line for line in log if "at your own risk" in line or TOO_MUCH in line]
        assert log and bool(warnings) == warns, (name, warnings[:1])


def feed_forward(pod: pods.Pod):
    """Lowers GLM-5's dense feed-forward over 8,192 tokens with its gradients, replicated."""
    mesh = pods.make_pod_mesh(pod, {"fsdp": -1})

    def loss(x, up, down):
        inside = jax.nn.silu(jnp.einsum("btd,df->btf", x, up))
        return jnp.sum(jnp.einsum("btf,fd->btd", inside, down) + x, dtype=jnp.float32)

    shapes = (2, 4096, 6144), (6144, 12288), (12288, 6144)
    replicated = NamedSharding(mesh, P())
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=replicated) for shape in shapes]
    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*args)


@pytest.mark.parametrize("chip", [c for c, flags in xla_flags.TPU.items() if VMEM in flags])
def test_vmem_limit_does_not_increase_cycles(chip):
    """By libtpu's estimate it takes at most the default's cycles, and at most 1% more than all VMEM."""
    pod, cycles = pod_of(SMALL[chip]), {}
    chosen = int(pod.options[VMEM])
    largest = MAX_VMEM_KIB.get(chip, chosen)
    for limit in dict.fromkeys((None, chosen, largest)):
        options = {name: value for name, value in pod.options.items() if name != VMEM}
        options |= {} if limit is None else {VMEM: str(limit)}
        began = time.process_time()
        text = feed_forward(pod).compile(compiler_options=options).as_text()
        estimates = re.findall(r'"estimated_cycles":"(\d+)"', text.partition("ENTRY")[2])
        cycles[limit] = sum(map(int, estimates))
        seconds = time.process_time() - began
        print(
            f"{chip} {options.get(VMEM, 'default')} KiB: {cycles[limit]:,} cycles, {seconds:.0f} s"
        )
    assert 0 < cycles[chosen] <= cycles[None]
    assert cycles[chosen] <= 1.01 * cycles[largest]


@pytest.mark.parametrize(
    "text", [*SMALL.values(), "v5e:16x16", "2*v6e:4x4", "2*tpu7x:2x2x2", "h200:2x2x8"]
)
def test_compilers_know_devices_of_pod_names(text):
    pod = pod_of(text)
    devices = pods.list_devices(pod)
    assert len(devices) == pod.num_devices and find_chip(devices[0].device_kind) == pod.device
    if pod.platform == "tpu" and pod.num_slices > 1:
        slices = [device.slice_index for device in devices]
        assert sorted(slices) == sorted(list(range(pod.num_slices)) * pod.devices_per_slice)
    hosts = {device.process_index for device in devices}
    assert len(hosts) == max(1, len(devices) // pod.device.per_host)
    assert pods.make_pod_mesh(pod, {"data": pod.num_slices, "fsdp": -1}).size == pod.num_devices


def test_reports_unknown_topology_in_one_line():
    with pytest.raises(ValueError, match="target 'v6e:3x5': its compiler says: ") as error:
        pods.list_devices(pod_of("v6e:3x5"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("chip", pods.TORUS)
def test_chip_memory_equals_libtpu_limit(chip):
    """Libtpu's error for a too large program contains the available memory in GiB."""
    pod = pod_of(SMALL[chip])
    where = NamedSharding(pods.make_pod_mesh(pod, {"fsdp": -1}), P())
    x = jax.ShapeDtypeStruct((int(CHIPS[chip].memory) >> 20, 2**20), jnp.int8, sharding=where)
    with pytest.raises(Exception) as error:
        jax.jit(lambda x: x + 1).lower(x).compile()
    needed, available = re.search(
        r"([\d.]+)G\) exceeds available HBM \(([\d.]+)G", str(error.value)
    ).groups()
    assert float(needed) == pytest.approx(2 * x.size / GIB, abs=0.01), "libtpu's G is not GiB"
    assert float(available) == pytest.approx(pod.device.memory / GIB, abs=0.005)
