"""Writes the locks of the Python that runs this file, from the ranges in setup.cfg.

    python3.11 launch/requirements/lock.py      # writes py311-run.txt, -test, -aot, -ray, -bench, -docs and -clients
    python3.12 launch/requirements/lock.py      # writes py312-*.txt, also for later Pythons

`test` extends `run`; `aot` and `ray` each extend both; `bench`, `docs` and `clients` are independent. Every line is one
exact pin, and indirect dependencies are included, so the locks install with `pip install --no-deps`. To resolve
`bench`, pip needs PyTorch's index of CPU wheels.
"""

import configparser
import json
import pathlib
import subprocess
import sys
import tempfile

FOLDER = pathlib.Path(__file__).resolve().parent
SETUP = FOLDER.parents[1] / "setup.cfg"
# Group -> groups that are installed together with it.
BASES = {"run": (), "test": ("run",), "aot": ("run", "test"), "ray": ("run", "test")}
INDEPENDENT = ("bench", "docs", "clients")  # each for an environment of its own
SOURCE_ONLY = "rouge-score,sqlitedict,word2number"  # packages of `clients` without a wheel
HEAD = "# Written by launch/requirements/lock.py from setup.cfg.\n"


def requirements(group: str) -> list[str]:
    """Returns the requirement lines of setup.cfg for `run` or for an extra."""
    config = configparser.ConfigParser()
    config.read(SETUP)
    if group == "run":
        return config["options"]["install_requires"].split()
    return config["options.extras_require"][group].split()


def resolve(wanted: list[str], pins: dict[str, str]) -> dict[str, str]:
    """Returns {name: version} of the packages that pip would install for `wanted` under the constraints `pins`."""
    with tempfile.TemporaryDirectory() as folder:
        constraints = pathlib.Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--quiet", "--only-binary=:all:", f"--no-binary={SOURCE_ONLY}"]
        command += ["--report=-", f"--constraint={constraints}"]
        report = json.loads(subprocess.check_output([*command, *wanted]))
    packages = [item["metadata"] for item in report["install"]]
    return {item["name"].lower().replace("_", "-"): item["version"] for item in packages}


def write(file: str, pins: dict[str, str]) -> None:
    """Writes one lock."""
    lines = [f"{name}=={pins[name]}\n" for name in sorted(pins)]
    (FOLDER / file).write_text(HEAD + "".join(lines))


def main() -> None:
    tag = f"py{sys.version_info.major}{sys.version_info.minor}"
    packages: dict[str, dict[str, str]] = {}
    pins: dict[str, str] = {}
    for group, bases in BASES.items():
        wanted = [line for name in (*bases, group) for line in requirements(name)]
        # The plugin's metadata does not require jax's version, although it must be the same.
        plugin = {"jax-cuda13-plugin": pins["jax"]} if pins else {}
        base_packages = {name for base in bases for name in packages[base]}
        resolved = resolve(wanted, pins | plugin)
        packages[group] = {name: resolved[name] for name in resolved if name not in base_packages}
        write(f"{tag}-{group}.txt", packages[group])
        pins |= packages[group]  # the same version in all groups
    for group in INDEPENDENT:
        write(f"{tag}-{group}.txt", resolve(requirements(group), {}))


if __name__ == "__main__":
    main()
