"""The names of pods, the meshes that are made of their devices, and what is told of those that do not fit."""

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
    """Devices in the order of jax, with what meshes are made by."""
    if pod.platform == "cuda":
        gpus = pod.shape[1]
        return [
            Device(id=i, platform="gpu", process_index=i // gpus) for i in range(pod.num_devices)
        ]
    found, (x, y, z) = [], (*pod.shape, 1)[:3]
    cores = CHIPS[pod.chip].num_devices
    order = itertools.product(*map(range, (pod.num_slices, z, y, x, cores)))
    for number, (part, k, j, i, core) in enumerate(order):
        found.append(
            Device(
                id=number,
                platform="tpu",
                device_kind=DEVICE_KINDS[pod.chip],
                coords=(i, j, k),
                core_on_chip=core,
                slice_index=part,
            )
        )
    return found


def arranged(text: str, slices: int = 1, **axes: int) -> np.ndarray:
    """The devices of a pod on the axes that are longer than 1."""
    pod = parse(text)
    sizes = resolve(axes, pod.num_devices)
    if pod.platform == "cuda":
        pods.check_hosts(pod, sizes, slices)
    found = device_grid(devices_of(pod), sizes, slices)
    assert sorted(device.id for device in found.flat) == list(range(pod.num_devices))
    return found.reshape([axes[axis] for axis in AXES if axes.get(axis, 1) > 1])


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
def test_a_name_says_how_many_devices_there_are(text, pod, platform, per_slice, together):
    found = parse(text)
    assert found == pod and str(found) == text
    assert (found.platform, found.devices_per_slice, found.num_devices) == (
        platform,
        per_slice,
        together,
    )
    assert found.device == CHIPS[pod.chip].device
    left_out = xla_flags.FLAGS[pod.chip].keys() - found.options.keys()
    assert left_out <= set(xla_flags.REMOVED)


def test_one_slice_or_partition_need_not_be_said():
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
def test_what_is_no_pod_is_answered_in_one_line(text, message):
    with pytest.raises(ValueError) as refused:
        parse(text)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("text", "pin"), [("v5p:2x2x2", "libtpu=="), ("h200:1x8", "jax-cuda13-")])
def test_without_its_compiler_it_is_said_how_to_get_it(text, pin, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError) as refused:
        pods.make_pod_mesh(parse(text), {"fsdp": -1})
    message = str(refused.value)
    assert message.startswith(
        f"target '{text}': its compiler is not installed; python -m pip install {pin}"
    )
    assert "bash launch/test.sh aot" in message and "\n" not in message


# -- meshes --------------------------------------------------------------------------------------------------


def test_an_axis_of_a_mesh_is_a_dimension_of_the_torus():
    found = arranged("v5p:4x4x8", fsdp=8, expert=16)
    for row in found:
        assert len({device.coords[2] for device in row}) == 1
    for column in found.T:
        assert len({device.coords[:2] for device in column}) == 1


def test_an_axis_may_take_a_part_of_a_dimension():
    found = arranged("v5p:4x4x4", fsdp=8, expert=4, context=2)
    assert found.shape == (8, 4, 2)


def test_the_two_devices_of_a_chip_are_neighbours_on_the_innermost_axis():
    found = arranged("tpu7x:4x4x4", fsdp=64, context=2)
    for one, other in found:
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
def test_slices_lie_along_data_and_then_along_fsdp(axes, along_data):
    shape = "4x4" if np.prod(list(axes.values())) == 64 else "4x12"
    found = arranged(f"4*v6e:{shape}", **axes)
    slices = np.vectorize(lambda device: device.slice_index)(found).reshape(
        axes.get("data", 1), axes["fsdp"], -1
    )
    d, f, _ = slices.shape
    blocks = slices.reshape(along_data, d // along_data, 4 // along_data, f * along_data // 4, -1)
    for i, j in itertools.product(range(along_data), range(4 // along_data)):
        assert set(blocks[i, :, j].flat) == {i * (4 // along_data) + j}


def test_slices_lie_along_the_outer_part_of_expert_where_asked():
    found = arranged("4*v6e:4x4", slices=2, fsdp=8, expert=8)
    slices = np.vectorize(lambda device: device.slice_index)(found).reshape(2, 4, 2, 4)
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
def test_a_region_knows_along_which_axes_there_are_other_slices(axes, slices, far):
    mesh = make_mesh(axes, devices=devices_of(parse("4*v6e:4x4")), expert_slices=slices)
    assert Region.of(mesh).dcn_axes == far
    alone = make_mesh(axes, devices=devices_of(parse("v5p:4x4x4")))
    assert Region.of(alone).dcn_axes == ()


def test_the_gpus_of_a_host_are_next_to_each_other_on_the_innermost_axes():
    found = arranged("h200:4x8", fsdp=4, expert=4, context=2)
    for host, block in enumerate(found):
        assert {device.id // 8 for device in block.flat} == {host}


def test_a_slice_of_experts_is_a_host_s_gpus_and_context_is_across_hosts():
    found = arranged("h200:8x8", slices=2, fsdp=2, expert=16, context=2)
    host = np.vectorize(lambda device: device.id // 8)(found).reshape(2, 2, 8, 2)
    np.testing.assert_array_equal(host[..., 0, :], np.arange(8).reshape(2, 2, 2).swapaxes(0, 1))
    assert (host == host[:, :, :1]).all()


def test_a_real_mesh_has_the_same_axes(monkeypatch):
    import jax

    monkeypatch.setattr(pods, "list_devices", lambda pod: jax.devices())
    found = pods.make_pod_mesh(parse("h200:1x8"), {"fsdp": 4, "expert": -1})
    assert found == make_mesh(fsdp=4, expert=2)


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
def test_axes_that_do_not_fit_are_named(text, axes, message):
    with pytest.raises(ValueError) as refused:
        arranged(text, **axes)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_an_axis_that_the_torus_cannot_give_is_named(monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("Failed to find assignment for logical_axis_index 2 of size 6")

    monkeypatch.setattr(mesh_utils, "create_device_mesh", refuse)
    with pytest.raises(ValueError, match="mesh axis expert=6 does not fit the torus of 24 devices"):
        arranged("v6e:2x12", fsdp=4, expert=6)


# -- the table -----------------------------------------------------------------------------------------------


def test_every_pod_has_a_chip_with_what_reports_need():
    for name in (*pods.TORUS, *pods.GPUS):
        chip = CHIPS[name]
        assert chip.memory and chip.link and chip.num_links and chip.network, name
        assert chip.num_links == 2 * pods.TORUS.get(name, 9), "both directions of each dimension"
    assert set(KINDS.values()) == set(CHIPS) and set(xla_flags.FLAGS) == {*pods.TORUS, *pods.GPUS}


def test_a_device_has_its_share_of_a_chip():
    chip = CHIPS["tpu7x"]
    half = chip.device
    for name in ("bandwidth", "link", "network", "memory"):
        assert getattr(half, name) == getattr(chip, name) / 2, name
    assert half.flops["float8"] == 2307e12 and (half.num_devices, half.per_host) == (1, 8)
    assert half.device == half == find_chip("TPU7x") and find_chip("cpu") is None
    unknown = dataclasses.replace(chip, network=None)
    assert unknown.device.network is None


@pytest.mark.parametrize("name", pods.GPUS)
def test_the_compiler_and_the_table_agree_on_a_gpu(name):
    text = (ROOT / "launch" / f"{name}.txtpb").read_text()
    found = {
        key: int(re.search(rf"\b{key}: (\d+)", text)[1])
        for key in ("device_memory_size", "memory_bandwidth")
    }
    assert found == {
        "device_memory_size": CHIPS[name].memory,
        "memory_bandwidth": CHIPS[name].bandwidth,
    }
    [kind] = set(re.findall(r'(?:\n  name|device_description_str): "(.*)"', text))
    assert find_chip(kind) == CHIPS[name]


# -- options of XLA ------------------------------------------------------------------------------------------


def test_what_a_user_says_counts_more_than_what_a_chip_should_have():
    ours = xla_flags.format_flags("v6e").split()
    assert "--xla_tpu_scoped_vmem_limit_kib=81920" in ours and len(ours) == len(
        xla_flags.FLAGS["v6e"]
    )
    own = "--xla_tpu_scoped_vmem_limit_kib=1 --xla_tpu_other=2"
    found = xla_flags.format_flags("v6e", own).split()
    assert found == [*(o for o in ours if "vmem" not in o), *own.split()]
    assert xla_flags.flag_environment("h200", {"XLA_FLAGS": "--a=1"})["XLA_FLAGS"].endswith(
        " --a=1"
    )
    assert list(xla_flags.flag_environment("v5p", {})) == ["LIBTPU_INIT_ARGS"]
    assert xla_flags.flag_environment(None, {"XLA_FLAGS": "--a=1"}) == {}


def test_what_shortens_compilations_is_not_set_where_a_program_runs():
    for chip, own in xla_flags.OFFLINE.items():
        assert parse(f"{chip}:2x2x1").shortcuts == own
        assert not own.keys() & xla_flags.FLAGS[chip].keys()
        assert not any(name in xla_flags.format_flags(chip) for name in own)
    assert parse("v5p:2x2x1").shortcuts == parse("h200:1x4").shortcuts == {}


def test_of_a_gpu_jax_takes_what_is_told_unless_a_user_says_otherwise():
    share = pods.parse("h200:1x8").usable_bytes / CHIPS["h200"].memory
    assert 0.9 < share < 0.95 and pods.parse("v5p:2x2x2").usable_bytes == int(CHIPS["v5p"].memory)
    for given in ({}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}):
        found = dict(given)
        xla_flags.reserve_gpu_memory(found)
        assert found == (given or {"XLA_CLIENT_MEM_FRACTION": str(xla_flags.GPU_SHARE)})
    code = "import os, sys; from launch import run; run.main(['run']); print(os.environ['XLA_CLIENT_MEM_FRACTION'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert float(done.stdout) == pytest.approx(share)


def test_jax_starts_with_the_options_for_gpus_and_the_last_of_two_counts():
    """An option that XLA does not know would end the process, be it one of a CPU."""
    flags = "--xla_force_host_platform_device_count"
    value = xla_flags.format_flags("h200", f"{flags}=2 {flags}=3")
    code = f"import os; os.environ['XLA_FLAGS'] = {value!r}; import jax; print(jax.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "3\n", done.stderr
