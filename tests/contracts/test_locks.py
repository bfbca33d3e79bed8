"""Checks that locks satisfy setup.cfg, are complete, and hold only exact pins."""

import configparser
import importlib.metadata
import re
import sys

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.contracts.source_tree import ROOT

LOCKS = ROOT / "launch" / "requirements"
TAGS = ("py311", "py312")
GROUPS = ("run", "test", "aot", "ray")
THIS_TAG = "py311" if sys.version_info < (3, 12) else "py312"


def lock(tag: str, *groups: str) -> dict[str, str]:
    """Returns the names and versions that the locks of the groups pin."""
    lines = [x for group in groups for x in (LOCKS / f"{tag}-{group}.txt").read_text().splitlines()]
    pins = {tuple(line.split("==")) for line in lines if not line.startswith("#")}
    assert all(len(pin) == 2 and re.fullmatch(r"[a-z0-9-]+", pin[0]) for pin in pins), pins
    assert len({name for name, _ in pins}) == len(pins)
    return dict(pins)


def requirements_of(group: str) -> list[Requirement]:
    """Returns the requirements of setup.cfg in `run` or in an extra."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    options = config["options.extras_require"]
    lines = config["options"]["install_requires"] if group == "run" else options[group]
    return [Requirement(line) for line in lines.split()]


@pytest.mark.parametrize("tag", TAGS)
def test_locks_satisfy_ranges_of_setup_cfg(tag):
    pins = lock(tag, *GROUPS)
    for requirement in [r for group in GROUPS for r in requirements_of(group)]:
        name = canonicalize_name(requirement.name)
        assert requirement.specifier.contains(pins[name]), (
            f"{requirement} but {tag} has {pins[name]}"
        )


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("group", ["docs", "clients"])
def test_independent_locks_satisfy_their_ranges(tag, group):
    pins = lock(tag, group)
    for requirement in requirements_of(group):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)])


def test_locks_cover_both_ends_of_jax_range():
    assert lock("py311", "run")["jax"].startswith("0.10.")
    assert lock("py312", "run")["jax"].startswith("0.11.")


@pytest.mark.parametrize("tag", TAGS)
def test_jax_packages_have_equal_versions(tag):
    pins = lock(tag, *GROUPS)
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")
    assert len({pins[name] for name in names}) == 1


@pytest.mark.parametrize("groups", [("run",), ("run", "test")], ids=["run", "test"])
def test_locks_are_complete(groups):
    """`run` must work without the packages of the tests, which are installed next to it."""
    pins = lock(THIS_TAG, *groups)
    pending = [
        (r.name, extra) for g in groups for r in requirements_of(g) for extra in ["", *r.extras]
    ]
    seen = set()
    while pending:
        name, extra = pending.pop()
        name = canonicalize_name(name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        assert name in pins, f"{name} is needed and not in {THIS_TAG}-{groups[-1]}.txt"
        for line in importlib.metadata.requires(name) or []:
            needed = Requirement(line)
            environment = {**default_environment(), "extra": extra}
            if needed.marker is None or needed.marker.evaluate(environment):
                pending += [(needed.name, e) for e in ["", *needed.extras]]
    assert {name for name, _ in seen} == set(pins)


def test_installed_versions_equal_locked_versions():
    pins = lock(THIS_TAG, "run", "test")
    assert {name: importlib.metadata.version(name) for name in pins} == pins
