"""Pytest plugin for `launch/test.sh --coverage`, which requires that each module has 75% of its lines covered.

Modules that mostly slow tests or processes of a sandbox run have a floor of their own in `FLOORS`.

Pytest lists the other modules and counts them in its last line, and the run fails.
"""

import dataclasses
import pathlib

import coverage
import pytest

FLOOR = 75
# In percent of the lines that the default tests run, a few below what was measured. Floors may rise, not fall.
FLOORS = {
    "glm5_jax/compat.py": 45,
    "glm5_jax/envs/reasoning/code_child.py": 70,
    "glm5_jax/envs/swe/awareness.py": 40,
    "glm5_jax/envs/swe/evaluation.py": 35,
    "glm5_jax/envs/swe/grading.py": 70,
    "glm5_jax/envs/swe/mutations/maker.py": 30,
    "glm5_jax/envs/swe/pairs.py": 50,
    "glm5_jax/envs/swe/recipes/ruby.py": 70,
    "glm5_jax/envs/swe/registries.py": 30,
    "glm5_jax/envs/swe/submitted_plans.py": 55,
    "glm5_jax/envs/terminal/synthesis/attacks.py": 50,
    "glm5_jax/envs/terminal/synthesis/sandbox_checks.py": 25,
    "glm5_jax/envs/terminal/synthesis/sandbox_runs.py": 65,
    "glm5_jax/envs/terminal/synthesis/validator.py": 45,
    "glm5_jax/inference/followers/follower.py": 70,
    "glm5_jax/inference/followers/server.py": 65,
    "glm5_jax/inference/weight_sources.py": 65,
    "glm5_jax/model/ablations/layer.py": 70,
    "glm5_jax/rl/trainers/skill_matrix.py": 45,
    "pallas_kernels/baselines.py": 70,
    "pallas_kernels/dsa.py": 50,
    "pallas_kernels/gated_delta/gpu.py": 50,
    "pallas_kernels/grouped_matmul/gpu.py": 55,
}
TITLE = "modules under their floor of line coverage"


@dataclasses.dataclass(frozen=True)
class Module:
    """Path of a module, percentage of its lines that ran, and numbers of the other lines."""

    path: pathlib.Path
    percent: float
    not_run: str


def modules(measured: coverage.Coverage) -> list[Module]:
    """Returns all modules of the measured packages, including those that nothing imported."""
    results = []
    for path in sorted(measured.get_data().measured_files()):
        _, statements, _, missing, ranges = measured.analysis2(path)
        percent = 100 * (1 - len(missing) / max(1, len(statements)))
        results.append(Module(pathlib.Path(path).relative_to(pathlib.Path.cwd()), percent, ranges))
    return results


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Reads the data of all processes, which pytest-cov has combined; does nothing in xdist's workers."""
    if hasattr(session.config, "workerinput"):
        return
    measured = coverage.Coverage()
    measured.load()
    low = [
        module
        for module in modules(measured)
        if module.percent < FLOORS.get(module.path.as_posix(), FLOOR)
    ]
    if low:
        session.config.pluginmanager.getplugin("terminalreporter").stats[TITLE] = low
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    """Lists the modules below the floor."""
    for module in terminalreporter.stats.get(TITLE, []):
        line = f"{module.path}: {module.percent:.0f}% covered, not run: {module.not_run}"
        terminalreporter.write_line(line, red=True)
