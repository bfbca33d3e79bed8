"""What every test process has in common; set before anything imports jax.

The XLA flags are for compile speed alone. `GLM5_JAX_TEST_XLA_FLAGS=` (empty) runs a test under the
flags of real runs, and the `plain_env` fixture starts a child process that way.
"""

import importlib.metadata
import os
import pathlib
import sys
import tempfile

import hypothesis
import pytest

FAST_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Later ones do not know it, and end a process that says it.
    FAST_COMPILE += " --xla_cpu_use_fusion_emitters=false"


def _cache_folder() -> str:
    """Compiled programs are kept in the user's cache, shared by the workers and by later runs."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(base) / "glm5_jax" / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = pathlib.Path(tempfile.mkdtemp())
    return str(folder)


# These alone change what a program computes or prints; children of `plain_env` lack them.
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
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.update(TEST_ONLY)

hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("tests")


# Few tests that take minutes each: begun last, one of them would run alone.
LONG = ("journeys", "pod", "mesh", "training")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.parent.name not in LONG)
    # Not at the top: the lines of what is imported there would not count as covered.
    from pallas_kernels.compat import disable_mesh_program_cache

    disable_mesh_program_cache()


# A process may map so many pieces of memory (vm.max_map_count is 65,530), and every compiled program takes some:
# a worker that keeps all of its tests' programs dies of it.
MOST_MAPS = 20_000


def _num_maps() -> int:
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)


@pytest.fixture(scope="module", autouse=True)
def _few_programs():
    """Forgets compiled programs after a file of tests once there are many; the cache on disk keeps them."""
    yield
    if "jax" in sys.modules and _num_maps() > MOST_MAPS:
        sys.modules["jax"].clear_caches()


@pytest.fixture
def plain_env() -> dict[str, str]:
    """The environment of a child process that runs as a user's would: one CPU device, no test flags."""
    return {name: value for name, value in os.environ.items() if name not in TEST_ONLY}
