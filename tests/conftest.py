"""Environment and fixtures of all test processes, set before jax is imported.

The XLA flags only speed up compilation. `GLM5_JAX_TEST_XLA_FLAGS=` (empty) runs a test without them, and the
`plain_env` fixture is for child processes without them.
"""

import gc
import importlib.metadata
import os
import pathlib
import sys
import tempfile

import hypothesis
import pytest

FAST_COMPILE = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    # Several parts of a program cost a third more CPU time, and the other cores have tests of their own.
    " --xla_cpu_parallel_codegen_split_count=1"
)
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Later versions abort a process with an unknown flag.
    FAST_COMPILE += " --xla_cpu_use_fusion_emitters=false"


def _cache_folder() -> str:
    """Returns the user's cache folder for compiled programs, shared by workers and later runs."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(base) / "glm5_jax" / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = pathlib.Path(tempfile.mkdtemp())
    return str(folder)


# Only these change what a program computes or prints. Children with `plain_env` do not have them.
TEST_ONLY = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8 "
    + os.environ.get("GLM5_JAX_TEST_XLA_FLAGS", FAST_COMPILE),
    "TF_CPP_MIN_LOG_LEVEL": "2",
}

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _cache_folder())
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["MPLBACKEND"] = "agg"
# Waiting threads of NumPy would take CPU time from the other worker.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.update(TEST_ONLY)

hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("tests")


# JAX, too, looks for garbage whenever Python does, which is every 700 objects by default.
gc.set_threshold(20_000)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collects the tests without garbage collections, which would visit all modules and tests again and again."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


# These tests take minutes each. They run first, because a worker with one of them would finish last.
LONG = ("journeys", "pod", "mesh", "training")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.parent.name not in LONG)
    # Imported late, because coverage does not count lines that run while conftest is imported.
    from pallas_kernels.compat import disable_mesh_program_cache

    disable_mesh_program_cache()


# Every compiled program takes some memory maps, and a process with more than vm.max_map_count (65,530) dies.
MAX_MAPS = 20_000


def _num_maps() -> int:
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)


@pytest.fixture(scope="module", autouse=True)
def _few_programs():
    """Clears compiled programs after a file of tests if there are many; they stay in the cache on disk."""
    yield
    if "jax" in sys.modules and _num_maps() > MAX_MAPS:
        sys.modules["jax"].clear_caches()


@pytest.fixture
def plain_env() -> dict[str, str]:
    """Returns the environment of a child process without test flags, with one CPU device."""
    return {name: value for name, value in os.environ.items() if name not in TEST_ONLY}
