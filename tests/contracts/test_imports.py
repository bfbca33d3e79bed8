"""Imports go from high to low levels, and only listed files use the network, processes or the environment."""

import configparser
import pathlib
import sys

import pytest

from tests.contracts.source_tree import PACKAGES, ROOT, Import, dotted_names, imports, python_files

LEVELS = {
    "pallas_kernels": 1,
    **dict.fromkeys(["config", "presets", "compat", "parallel", "runtime", "metrics"], 2),
    **dict.fromkeys(["model", "text"], 3),
    **dict.fromkeys(["data", "checkpoint"], 4),
    **dict.fromkeys(["training", "inference"], 5),
    "rl": 6,
    **dict.fromkeys(["agents", "envs", "evals"], 7),
    "experiments": 8,
    "launch": 9,
}
SIDEWAYS = {("envs", "agents")}  # the one import between packages of one level, level 2 aside
IMPORT_NAMES = {"absl-py": "absl", "math-verify": "math_verify", "orbax-checkpoint": "orbax"}
NETWORK = ("socket", "socketserver", "http", "urllib", "aiohttp", "requests", "httpx")
NETWORK_FILES = (
    "server",
    "http_server",
    "addresses",
    "client",
    "gateway",
    "service",
    "task_service",
    "engine_connection",
    "command_stream",
)
PROCESSES = ("subprocess", "multiprocessing", "concurrent.futures.ProcessPoolExecutor", "pty")
PROCESS_CALLS = ("system", "popen", "fork", "forkpty", "posix_spawn", "spawnv", "execv", "execve")
GRADER = (
    "glm5_jax/envs/terminal/grader/"  # copied into sandboxes, where it runs without this package
)
PROCESS_FILES = ("glm5_jax/runtime/process.py", "glm5_jax/envs/sandbox/", GRADER, "launch/")

# Where libraries may be imported that the project is only compared with.
COMPARISONS = (
    "experiments/benchmarks/",
    "pallas_kernels/baselines.py",
    "pallas_kernels/torch_calls.py",
)


def all_imports() -> list[Import]:
    return [entry for path in python_files(*PACKAGES) for entry in imports(path)]


def package_of(name: str) -> str:
    """Returns the package of the level table that a dotted name or a path in dots belongs to."""
    parts = name.split(".")
    return parts[1] if parts[0] == "glm5_jax" and len(parts) > 1 else parts[0]


def may_import(source: str, target: str) -> bool:
    """Returns True if files of one package of the table may import another."""
    below = LEVELS[target] < LEVELS[source]
    return (
        below
        or source == target
        or LEVELS[source] == LEVELS[target] == 2
        or ((source, target) in SIDEWAYS)
    )


@pytest.mark.usefixtures("parsed")
def test_imports_go_from_high_to_low():
    wrong = []
    for entry in all_imports():
        if not entry.is_from(*PACKAGES, "tests"):
            continue
        source = ".".join(entry.path.with_suffix("").parts)
        if source == "glm5_jax.__init__":  # the surface opens onto every package
            continue
        source, target = package_of(source), package_of(entry.name)
        if target in LEVELS and may_import(source, target):
            continue
        if target not in LEVELS and source == "experiments" and entry.is_from("glm5_jax"):
            continue  # what experiments and their readers import is the surface
        wrong.append(str(entry))
    assert not wrong, "\n".join(wrong)


def test_every_package_has_level():
    known = {package_of(".".join(path.with_suffix("").parts)) for path in python_files(*PACKAGES)}
    assert known - set(LEVELS) <= {"__init__"}


def test_levels_match_design():
    for source, target in [("model", "parallel"), ("envs", "agents"), ("config", "parallel")]:
        assert may_import(source, target), (source, target)
    for source, target in [
        ("parallel", "model"),
        ("model", "text"),
        ("training", "inference"),
        ("agents", "envs"),
        ("training", "evals"),
        ("experiments", "launch"),
    ]:
        assert not may_import(source, target), (source, target)


def import_graph() -> dict[str, set[str]]:
    """Returns {module: modules of ours that it imports}, imports inside functions included."""
    modules = {module_name(path): path for path in python_files(*PACKAGES)}
    graph = {}
    for name, path in modules.items():
        # `from package import name` imports a module, or the module that defines the name.
        targets = (
            entry.name if entry.name in modules else entry.name.rpartition(".")[0]
            for entry in imports(path)
        )
        graph[name] = {target for target in targets if target in modules} - {name}
    return graph


def module_name(path: pathlib.PurePosixPath) -> str:
    """Returns the dotted name of a file; a package's is that of its folder."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def find_circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Returns the sets of several modules that all import each other, directly or over others."""
    reachable = {name: reach(graph, name) for name in graph}
    circles = []
    for name, targets in reachable.items():
        circle = {target for target in targets if name in reachable[target]}
        if len(circle) > 1 and circle not in circles:
            circles.append(circle)
    return circles


def reach(graph: dict[str, set[str]], start: str) -> set[str]:
    """Returns all nodes that edges lead to from a node; the node itself only if it is on a circle."""
    nodes, pending = set(), [start]
    while pending:
        new = graph[pending.pop()] - nodes
        nodes |= new
        pending += new
    return nodes


def test_finds_circles_over_several_modules():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert find_circles(graph) == [{"a", "b", "c"}, {"d", "e"}]


@pytest.mark.usefixtures("parsed")
def test_imports_have_no_circles():
    circles = find_circles(import_graph())
    assert not circles, "\n".join(", ".join(sorted(circle)) for circle in circles)


def test_readme_names_imported_libraries():
    readme = (ROOT / "README.md").read_text("utf-8")
    modules = {"JAX": "jax", "NNX": "flax.nnx", "Pallas": "jax.experimental.pallas"}
    for word, module in modules.items():
        is_imported = any(entry.is_from(module) for entry in all_imports())
        assert (word in readme) == is_imported, word


def test_kernels_import_only_jax_jaxtyping_and_numpy():
    wrong = [
        str(entry)
        for path in python_files("pallas_kernels")
        for entry in imports(path)
        if not entry.is_from(
            "jax", "jaxtyping", "numpy", "pallas_kernels", *sys.stdlib_module_names
        )
        and not str(entry.path).startswith(COMPARISONS)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("modules", "places"),
    [
        (("orbax",), ("glm5_jax/checkpoint/store.py",)),
        (("grain",), ("glm5_jax/data/",)),
        (("absl.flags", "absl.app", "ml_collections.config_flags"), ("launch/",)),
        (
            ("argparse",),
            (
                "launch/",
                "pallas_kernels/bench.py",
                "experiments/benchmarks/",
                "experiments/arguments.py",
            ),
        ),
        # The verifiers library reads the key of an endpoint from a variable only.
        (
            ("os.environ", "os.environb", "os.getenv", "os.putenv"),
            ("launch/", GRADER, "glm5_jax/envs/verifiers/service.py"),
        ),
        (PROCESSES, PROCESS_FILES),
        (("jax._src",), ("glm5_jax/compat.py", "pallas_kernels/compat.py")),
        (("ray",), ("launch/on_ray.py",)),
    ],
    ids=lambda value: value[0],
)
def test_restricted_modules_stay_in_their_files(modules, places):
    wrong = [str(entry) for entry in all_imports() if entry.is_from(*modules)]
    wrong += [line for path in python_files(*PACKAGES) for line in dotted_uses(path, modules)]
    wrong = [line for line in wrong if not line.startswith(places)]
    assert not wrong, "\n".join(wrong)


def dotted_uses(path: pathlib.PurePosixPath, names) -> list[str]:
    return [f"{path}:{line} uses {name}" for line, name in dotted_names(path) if name in names]


def test_network_modules_stay_in_network_files():
    wrong = [
        str(entry)
        for entry in all_imports()
        if entry.is_from(*NETWORK)
        and entry.path.stem not in NETWORK_FILES
        and str(entry.path) != "experiments/benchmarks/simulated_fleet.py"  # counts requests
    ]
    assert not wrong, "\n".join(wrong)


def test_starts_no_process_through_os():
    calls = tuple(f"os.{name}" for name in PROCESS_CALLS)
    wrong = [
        line
        for path in python_files(*PACKAGES)
        if not str(path).startswith(PROCESS_FILES)
        for line in dotted_uses(path, calls)
    ]
    assert not wrong, "\n".join(wrong)


def declared_imports(section: str, option: str) -> set[str]:
    """Returns the import names of the requirements under an option of setup.cfg."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config[section][option].split()
    names = [line.split(">")[0].split("=")[0].split("<")[0] for line in lines]
    return {IMPORT_NAMES.get(name, name) for name in names}


def test_imports_equal_requirements_of_setup_cfg():
    """The programs that glm5_jax is timed against run in a separate environment."""
    required = declared_imports("options", "install_requires")
    bench = declared_imports("options.extras_require", "bench") - required
    used, foreign = set(), []
    for entry in all_imports():
        name = entry.name.split(".")[0]
        used.add(name)
        if name in bench and not str(entry.path).startswith(COMPARISONS):
            foreign.append(str(entry))
    assert not foreign, "\n".join(foreign)
    # Not in the lock of the environment for comparisons, which Python 3.11 shares: it needs 3.12.
    extras = ("ray", "hub", "wandb")
    where_present = {"tokamax"}.union(
        *(declared_imports("options.extras_require", extra) for extra in extras)
    )
    assert used - {*sys.stdlib_module_names, *PACKAGES} - bench - where_present == required


def test_rl_algorithm_imports_no_other_package_of_rl():
    """`rl.algorithm` is pure: it may use the types of rl, which are modules of `rl` itself."""
    wrong = [
        str(entry)
        for entry in all_imports()
        if str(entry.path).startswith("glm5_jax/rl/algorithm/")
        and entry.is_from("glm5_jax.rl")
        and not entry.is_from("glm5_jax.rl.algorithm")
        and (ROOT / "/".join(entry.name.split(".")[:3])).is_dir()
    ]
    assert not wrong, "\n".join(wrong)
