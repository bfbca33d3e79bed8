"""Writes the locks of the Python that runs this file, from the ranges in setup.cfg.

    python3.11 launch/requirements/lock.py      # writes py311-run.txt, -test.txt, -aot.txt, -ray.txt, -bench.txt
    python3.12 launch/requirements/lock.py      # writes py312-*.txt, which serve later Pythons too

`test` adds to `run`, `aot` and `ray` each to both; `bench` stands alone. Every line is one exact pin, dependencies
of dependencies included, so the locks install with `pip install --no-deps`. `bench` is resolved only
where pip knows PyTorch's index of CPU wheels.
"""

import configparser
import json
import pathlib
import subprocess
import sys
import tempfile

FOLDER = pathlib.Path(__file__).resolve().parent
SETUP = FOLDER.parents[1] / "setup.cfg"
# Group -> those that are installed where it is.
BELOW = {"run": (), "test": ("run",), "aot": ("run", "test"), "ray": ("run", "test")}
HEAD = "# Written by launch/requirements/lock.py from setup.cfg.\n"


def requirements(group: str) -> list[str]:
    """The requirement lines that setup.cfg has for `run` or for an extra."""
    config = configparser.ConfigParser()
    config.read(SETUP)
    if group == "run":
        return config["options"]["install_requires"].split()
    return config["options.extras_require"][group].split()


def resolve(wanted: list[str], pins: dict[str, str]) -> dict[str, str]:
    """Names and versions that pip would install for `wanted` while it keeps to `pins`."""
    with tempfile.TemporaryDirectory() as folder:
        constraints = pathlib.Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--quiet", "--only-binary=:all:", "--report=-", f"--constraint={constraints}"]
        report = json.loads(subprocess.check_output([*command, *wanted]))
    packages = [item["metadata"] for item in report["install"]]
    return {item["name"].lower().replace("_", "-"): item["version"] for item in packages}


def write(file: str, pins: dict[str, str]) -> None:
    """Writes one lock."""
    lines = [f"{name}=={pins[name]}\n" for name in sorted(pins)]
    (FOLDER / file).write_text(HEAD + "".join(lines))


def main() -> None:
    tag = f"py{sys.version_info.major}{sys.version_info.minor}"
    held: dict[str, dict[str, str]] = {}
    pins: dict[str, str] = {}
    for group, below in BELOW.items():
        wanted = [line for name in (*below, group) for line in requirements(name)]
        # Nothing in the plugin's metadata says that it must be of jax's own version.
        plugin = {"jax-cuda13-plugin": pins["jax"]} if pins else {}
        there = {name for one in below for name in held[one]}
        found = resolve(wanted, pins | plugin)
        held[group] = {name: found[name] for name in found if name not in there}
        write(f"{tag}-{group}.txt", held[group])
        pins |= held[group]  # what two groups add is of one version
    write(f"{tag}-bench.txt", resolve(requirements("bench"), {}))


if __name__ == "__main__":
    main()
