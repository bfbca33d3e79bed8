"""Names of pods, meshes of their devices, and messages about axes that do not fit."""

import dataclasses
import importlib.util
import itertools
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from jax.experimental import mesh_utils

from glm5_jax.parallel.mesh import AXES, Region, device_grid, make_mesh, resolve
from launch import pods, xla_flags
from launch.pods import Pod, parse
from pallas_kernels.chips import CHIPS, KINDS, find_chip
from tests.contracts.source_tree import ROOT

DEVICE_KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}


class Device(SimpleNamespace):
    __hash__ = object.__hash__  # as meshes need it


def devices_of(pod: Pod) -> list:
    """Returns devices in the order of jax, with the attributes that meshes need."""
    if pod.platform == "cuda":
        gpus = pod.shape[1]
        return [
            Device(id=i, platform="gpu", process_index=i // gpus) for i in range(pod.num_devices)
        ]
    devices, (x, y, z) = [], (*pod.shape, 1)[:3]
    cores = CHIPS[pod.chip].num_devices
    order = itertools.product(*map(range, (pod.num_slices, z, y, x, cores)))
    for number, (part, k, j, i, core) in enumerate(order):
        devices.append(
            Device(
                id=number,
                platform="tpu",
                device_kind=DEVICE_KINDS[pod.chip],
                coords=(i, j, k),
                core_on_chip=core,
                slice_index=part,
            )
        )
    return devices


def arrange_devices(text: str, slices: int = 1, **axes: int) -> np.ndarray:
    """Returns the devices of a pod on the axes that are longer than 1."""
    pod = parse(text)
    sizes = resolve(axes, pod.num_devices)
    if pod.platform == "cuda":
        pods.check_hosts(pod, sizes, slices)
    grid = device_grid(devices_of(pod), sizes, slices)
    assert sorted(device.id for device in grid.flat) == list(range(pod.num_devices))
    return grid.reshape([axes[axis] for axis in AXES if axes.get(axis, 1) > 1])


# -- names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "pod", "platform", "per_slice", "together"),
    [
        ("v5e:16x16", Pod("v5e", (16, 16)), "tpu", 256, 256),
        ("v5p:8x8x16", Pod("v5p", (8, 8, 16)), "tpu", 1024, 1024),
        ("4*v6e:16x16", Pod("v6e", (16, 16), 4), "tpu", 256, 1024),
        ("tpu7x:4x4x8", Pod("tpu7x", (4, 4, 8)), "tpu", 256, 256),
        ("2*tpu7x:4x4x8", Pod("tpu7x", (4, 4, 8), 2), "tpu", 256, 512),
        ("h200:128x8", Pod("h200", (128, 8)), "cuda", 1024, 1024),
        ("h100:2x64x8", Pod("h100", (64, 8), 2), "cuda", 512, 1024),
    ],
)
def test_name_gives_number_of_devices(text, pod, platform, per_slice, together):
    result = parse(text)
    assert result == pod and str(result) == text
    assert (result.platform, result.devices_per_slice, result.num_devices) == (
        platform,
        per_slice,
        together,
    )
    assert result.device == CHIPS[pod.chip].device
    left_out = xla_flags.FLAGS[pod.chip].keys() - result.options.keys()
    assert left_out <= set(xla_flags.REMOVED)


def test_one_slice_or_partition_is_default():
    assert parse("1*v5e:4x4") == parse("v5e:4x4") and parse("h200:1x2x8") == parse("h200:2x8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("abacus:2x2", "'abacus:2x2' is not a pod; use v5e:16x16"),
        ("v5p", "'v5p' is not a pod"),
        ("v5p:8x8x16x", "is not a pod"),
        ("v7x:4x4x4", "is not a pod"),
        ("-2*v6e:16x16", "is not a pod"),
        ("v5p:8x8", "a slice of v5p has 3 dimensions; give one such as v5p:8x8x16"),
        ("v6e:4x4x4", "a slice of v6e has 2 dimensions; give one such as v6e:16x16"),
        ("h200:1024", "give hosts x GPUs as in h200:128x8"),
        ("h200:1x1x1x8", "give hosts x GPUs"),
        ("h200:1x1024", "a host has up to 8 h200, not 1024; give more hosts, as in h200:128x8"),
        ("h100:64x16", "a host has up to 8 h100, not 16"),
        ("2*h200:128x8", "GPUs have no slices; their partitions are the first number of h200:2x"),
        ("v6e:0x16", "'v6e:0x16' has a size of 0"),
        ("0*v6e:16x16", "has a size of 0"),
    ],
)
def test_refuses_unknown_pod_in_one_line(text, message):
    with pytest.raises(ValueError) as refused:
        parse(text)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("text", "pin"), [("v5p:2x2x2", "libtpu=="), ("h200:1x8", "jax-cuda13-")])
def test_names_package_of_missing_compiler(text, pin, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError) as refused:
        pods.make_pod_mesh(parse(text), {"fsdp": -1})
    message = str(refused.value)
    assert message.startswith(
        f"target '{text}': its compiler is not installed; python -m pip install {pin}"
    )
    assert "bash launch/test.sh aot" in message and "\n" not in message


# -- meshes --------------------------------------------------------------------------------------------------


def test_maps_axis_to_torus_dimension():
    devices = arrange_devices("v5p:4x4x8", fsdp=8, expert=16)
    for row in devices:
        assert len({device.coords[2] for device in row}) == 1
    for column in devices.T:
        assert len({device.coords[:2] for device in column}) == 1


def test_maps_axis_to_part_of_dimension():
    devices = arrange_devices("v5p:4x4x4", fsdp=8, expert=4, context=2)
    assert devices.shape == (8, 4, 2)


def test_devices_of_chip_are_neighbours_on_innermost_axis():
    devices = arrange_devices("tpu7x:4x4x4", fsdp=64, context=2)
    for one, other in devices:
        assert one.coords == other.coords and one.core_on_chip != other.core_on_chip


@pytest.mark.parametrize(
    ("axes", "along_data"),
    [
        ({"data": 4, "fsdp": 16}, 4),
        ({"data": 8, "fsdp": 8}, 4),
        ({"data": 2, "fsdp": 32}, 2),
        ({"data": 6, "fsdp": 32}, 2),
        ({"fsdp": 16, "expert": 4}, 1),
    ],
)
def test_slices_lie_along_data_then_fsdp(axes, along_data):
    shape = "4x4" if np.prod(list(axes.values())) == 64 else "4x12"
    devices = arrange_devices(f"4*v6e:{shape}", **axes)
    slices = np.vectorize(lambda device: device.slice_index)(devices).reshape(
        axes.get("data", 1), axes["fsdp"], -1
    )
    d, f, _ = slices.shape
    blocks = slices.reshape(along_data, d // along_data, 4 // along_data, f * along_data // 4, -1)
    for i, j in itertools.product(range(along_data), range(4 // along_data)):
        assert set(blocks[i, :, j].flat) == {i * (4 // along_data) + j}


def test_slices_lie_along_outer_part_of_expert():
    devices = arrange_devices("4*v6e:4x4", slices=2, fsdp=8, expert=8)
    slices = np.vectorize(lambda device: device.slice_index)(devices).reshape(2, 4, 2, 4)
    blocks = [set(slices[i, :, j].flat) for i, j in itertools.product(range(2), range(2))]
    assert sorted(map(sorted, blocks)) == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("axes", "slices", "far"),
    [
        ({"data": 2, "fsdp": 8, "expert": 4}, 1, ("data", "fsdp")),
        ({"fsdp": 4, "expert": 16}, 1, ("fsdp",)),
        ({"fsdp": 8, "expert": 8}, 2, ("fsdp", "expert")),
    ],
)
def test_region_lists_axes_between_slices(axes, slices, far):
    mesh = make_mesh(axes, devices=devices_of(parse("4*v6e:4x4")), expert_slices=slices)
    assert Region.of(mesh).dcn_axes == far
    one_slice = make_mesh(axes, devices=devices_of(parse("v5p:4x4x4")))
    assert Region.of(one_slice).dcn_axes == ()


def test_gpus_of_host_lie_on_innermost_axes():
    devices = arrange_devices("h200:4x8", fsdp=4, expert=4, context=2)
    for host, block in enumerate(devices):
        assert {device.id // 8 for device in block.flat} == {host}


def test_expert_slice_is_host_and_context_crosses_hosts():
    devices = arrange_devices("h200:8x8", slices=2, fsdp=2, expert=16, context=2)
    host = np.vectorize(lambda device: device.id // 8)(devices).reshape(2, 2, 8, 2)
    np.testing.assert_array_equal(host[..., 0, :], np.arange(8).reshape(2, 2, 2).swapaxes(0, 1))
    assert (host == host[:, :, :1]).all()


def test_real_mesh_has_same_axes(monkeypatch):
    import jax

    monkeypatch.setattr(pods, "list_devices", lambda pod: jax.devices())
    mesh = pods.make_pod_mesh(parse("h200:1x8"), {"fsdp": 4, "expert": -1})
    assert mesh == make_mesh(fsdp=4, expert=2)


@pytest.mark.parametrize(
    ("text", "axes", "message"),
    [
        ("v5p:2x2x2", {"fsdp": 3}, "mesh fsdp=3 does not divide the 8 devices"),
        (
            "3*v6e:4x4",
            {"data": 2, "fsdp": 8, "expert": 3},
            "mesh axes data=2, fsdp=8 and expert_slices 1 do not fit 3 slices of TPUs; let expert_slices",
        ),
        (
            "h200:3x8",
            {"fsdp": 8, "expert": 3},
            "mesh axis expert=3 does not fit the 8 GPUs of a host of h200:3x8: with the axes within, it takes 3",
        ),
        (
            "h200:2x3x8",
            {"fsdp": 3, "expert": 16},
            "mesh axis expert=16 does not fit the 24 GPUs of a partition of h200:2x3x8",
        ),
        (
            "h200:3x8",
            {"slices": 2, "expert": 6, "context": 4},
            "mesh axis expert=3 does not fit the 8 GPUs of a host of h200:3x8: with the axes within, it takes 3",
        ),
    ],
)
def test_names_axes_that_do_not_fit(text, axes, message):
    with pytest.raises(ValueError) as refused:
        arrange_devices(text, **axes)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_names_axis_that_torus_lacks(monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("Failed to find assignment for logical_axis_index 2 of size 6")

    monkeypatch.setattr(mesh_utils, "create_device_mesh", refuse)
    with pytest.raises(ValueError, match="mesh axis expert=6 does not fit the torus of 24 devices"):
        arrange_devices("v6e:2x12", fsdp=4, expert=6)


# -- the table -----------------------------------------------------------------------------------------------


def test_every_pod_has_complete_chip_entry():
    for name in (*pods.TORUS, *pods.GPUS):
        chip = CHIPS[name]
        assert chip.memory and chip.link and chip.num_links and chip.network, name
        assert chip.num_links == 2 * pods.TORUS.get(name, 9), "both directions of each dimension"
    assert set(KINDS.values()) == set(CHIPS) and set(xla_flags.FLAGS) == {*pods.TORUS, *pods.GPUS}


def test_device_has_share_of_chip():
    chip = CHIPS["tpu7x"]
    half = chip.device
    for name in ("bandwidth", "link", "network", "memory"):
        assert getattr(half, name) == getattr(chip, name) / 2, name
    assert half.flops["float8"] == 2307e12 and (half.num_devices, half.per_host) == (1, 8)
    assert half.device == half == find_chip("TPU7x") and find_chip("cpu") is None
    unknown = dataclasses.replace(chip, network=None)
    assert unknown.device.network is None


@pytest.mark.parametrize("name", pods.GPUS)
def test_chip_table_agrees_with_gpu_compiler(name):
    text = (ROOT / "launch" / f"{name}.txtpb").read_text()
    limits = {
        key: int(re.search(rf"\b{key}: (\d+)", text)[1])
        for key in ("device_memory_size", "memory_bandwidth")
    }
    assert limits == {
        "device_memory_size": CHIPS[name].memory,
        "memory_bandwidth": CHIPS[name].bandwidth,
    }
    [kind] = set(re.findall(r'(?:\n  name|device_description_str): "(.*)"', text))
    assert find_chip(kind) == CHIPS[name]


# -- options of XLA ------------------------------------------------------------------------------------------


def test_user_flags_override_chip_flags():
    ours = xla_flags.format_flags("v6e").split()
    assert "--xla_tpu_scoped_vmem_limit_kib=81920" in ours and len(ours) == len(
        xla_flags.FLAGS["v6e"]
    )
    flags = "--xla_tpu_scoped_vmem_limit_kib=1 --xla_tpu_other=2"
    merged = xla_flags.format_flags("v6e", flags).split()
    assert merged == [*(o for o in ours if "vmem" not in o), *flags.split()]
    assert xla_flags.flag_environment("h200", {"XLA_FLAGS": "--a=1"})["XLA_FLAGS"].endswith(
        " --a=1"
    )
    assert list(xla_flags.flag_environment("v5p", {})) == ["LIBTPU_INIT_ARGS"]
    assert xla_flags.flag_environment(None, {"XLA_FLAGS": "--a=1"}) == {}


def test_running_program_has_no_offline_options():
    for chip, options in xla_flags.OFFLINE.items():
        assert parse(f"{chip}:2x2x1").shortcuts == options
        assert not options.keys() & xla_flags.FLAGS[chip].keys()
        assert not any(name in xla_flags.format_flags(chip) for name in options)
    assert parse("v5p:2x2x1").shortcuts == parse("h200:1x4").shortcuts == {}


def test_reserves_gpu_memory_unless_user_sets_it():
    share = pods.parse("h200:1x8").usable_bytes / CHIPS["h200"].memory
    assert 0.9 < share < 0.95 and pods.parse("v5p:2x2x2").usable_bytes == int(CHIPS["v5p"].memory)
    for environment in (
        {},
        {"XLA_CLIENT_MEM_FRACTION": "0.5"},
        {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"},
    ):
        result = dict(environment)
        xla_flags.reserve_gpu_memory(result)
        assert result == (environment or {"XLA_CLIENT_MEM_FRACTION": str(xla_flags.GPU_SHARE)})
    code = "import os, sys; from launch import run; run.main(['run']); print(os.environ['XLA_CLIENT_MEM_FRACTION'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert float(done.stdout) == pytest.approx(share)


def test_jax_accepts_gpu_flags_and_last_one_wins():
    """XLA ends the process on an unknown option, also on a CPU."""
    flags = "--xla_force_host_platform_device_count"
    value = xla_flags.format_flags("h200", f"{flags}=2 {flags}=3")
    code = f"import os; os.environ['XLA_FLAGS'] = {value!r}; import jax; print(jax.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "3\n", done.stderr
