"""Filters what an attempt changed, before it is graded.

The trusted side compares the attempt's work folder with the base tree. Changes that could decide the result without solving
the task are dropped: tests, files of the test patch, configuration of test runners, links that lead outside.
"""

import dataclasses
import json
import posixpath
import re
import stat
import sys
import tomllib
from collections.abc import Collection, Mapping

from glm5_jax.envs.swe.file_tree import FileTree, TreeFile
from glm5_jax.envs.swe.instance import SweInstance
from glm5_jax.envs.swe.patches import parse_patch
from glm5_jax.envs.swe.paths import is_runner_config, is_test_path
from glm5_jax.envs.swe.recipes import RECIPE_FOLDER

MAX_FILE_BYTES = 5 << 20
# Folders of tools and build outputs, which are no part of a solution.
IGNORED_FOLDERS = frozenset(
    {RECIPE_FOLDER, ".git", "node_modules", "__pycache__", ".pytest_cache", ".gradle", ".cache"}
)
_PLUGINS = re.compile(
    r"(?:^|/)[^/]+\.(?:dist|egg)-info/|(?:^|/)\.mvn/|(?:^|/)\.bundle/|(?:^|/)\.user\.ini$|(?:^|/)php\.ini$"
    r"|(?:^|/)(?:__mocks__|mockito-extensions)/|(?:^|/)META-INF/services/(?:org\.junit|junit)\."
)
# Parts of test runners and assertion libraries. A file of this name would be loaded instead.
_OF_RUNNERS = re.compile(
    r"(?:^|/)(?:org/(?:junit|hamcrest|opentest4j|assertj|mockito|testng|apiguardian)|junit/framework)/"
    r"|(?:^|/)lib/(?:minitest|rspec|test/unit)(?:/|\.rb$)"
    r"|(?:^|/)(?:gtest|gmock|catch2|doctest|unity|cmocka)/[^/]+\.h(?:pp)?$"
    # Compilers look in a project's folders before their own.
    r"|(?:^|/)(?:assert|setjmp|stdarg|stddef|stdio|stdlib|string)\.h$|(?:^|/)(?:cassert|cstdio|cstdlib|iostream)$"
    r"|(?:^|/)(?:unity|unity_internals|catch|catch_all|catch_amalgamated|doctest|cmocka|check)\.h(?:pp)?$"
)
_VENDORED = frozenset({"vendor", "third_party", "thirdparty", "external", "extern", "_vendor"})
# Modules of pytest, and those that Python imports at its start. They may also be folders.
_RUNNER_MODULES = frozenset(
    "pytest _pytest pluggy iniconfig packaging pygments py sitecustomize usercustomize".split()
)
# Sections of files that configure test runners and builds alike.
_SETUP_SECTIONS = re.compile(r"tool:pytest|tool\.pytest.*|aliases")
_HEADER = re.compile(r"^\s*\[+\s*([^\]]+?)\s*\]+\s*(?:[#;].*)?$", re.MULTILINE)
_PACKAGE_KEYS = ("babel", "mocha", "jest", "vitest", "ava", "tap", "nyc", "imports")
_GO_REPLACE = re.compile(r"^\s*replace\b.*|=>.*", re.MULTILINE)
_ENABLES_TESTS = re.compile(
    r"(?i)\b(?:function|macro)\s*\(\s*(?:add_test|enable_testing|target_sources|add_executable)\b.*"
    r"|\bCTEST_\w+|CMAKE_(?:C|CXX|CROSSCOMPILING)_?\w*(?:LAUNCHER|EMULATOR|COMPILER)\b.*"
    r"|\b(?:set_tests_properties|cmake_language)\b.*|\bset_property\s*\(\s*TEST\b.*|\bTEST_INCLUDE_FILES?\b.*"
    r"|\b(?:WILL_FAIL|PASS_REGULAR_EXPRESSION|SKIP_RETURN_CODE|RULE_LAUNCH_\w+|TEST_LAUNCHER|CROSSCOMPILING_EMULATOR)\b.*"
    r"|[\s(\"'=]-(?:include|imacros)\b.*"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweSubmission:
    """Changes of an attempt that are graded.

    Attributes:
      files: changed files by path; None: deleted.
      dropped: why a change is not graded, by path.
    """

    files: Mapping[str, TreeFile | None]
    dropped: Mapping[str, str] = dataclasses.field(default_factory=dict)


def filter_changes(
    changes: Mapping[str, TreeFile | None],
    base: FileTree,
    instance: SweInstance,
) -> SweSubmission:
    """Returns the changes to grade.

    Args:
      changes: difference of the work folder to the base tree, without outputs of the build.
      base: base tree.
      instance: its test patch names files that an attempt cannot write, and its gold patch files that it may.
    """
    gold = _paths(instance.patch)
    tests = _paths(instance.test_patch) | _paths(instance.aux_patch)
    files, dropped = {}, {}
    for path, file in changes.items():
        reason = _content_problem(path, file)
        if reason is None and path not in gold:
            reason = _path_problem(path, tests) or _configuration_problem(path, file, base)
            reason = reason or _replacement_problem(path, base)
        if reason is None:
            files[path] = file
        else:
            dropped[path] = reason
    return SweSubmission(files=files, dropped=dropped)


def _paths(patch: str) -> set[str]:
    return {path for file in parse_patch(patch) for path in file.paths}


def _path_problem(path: str, tests: Collection[str]) -> str | None:
    if path in tests:
        return "the tests of the instance replace it"
    if is_test_path(path):
        return "it is a test"
    if is_runner_config(path) or _PLUGINS.search(path):
        return "it configures the test runner"
    return None


def _replacement_problem(path: str, base: FileTree) -> str | None:
    """Returns why a file is dropped: it stands for a part of the test runner, of a library, or of Python."""
    folders = path.split("/")[:-1]
    if _VENDORED & {folder.lower() for folder in folders}:
        return "it is a part of another project"
    if path in base:
        return None
    if _OF_RUNNERS.search(path):
        return "it replaces a part of the test runner"
    # The folders that Python looks for modules in, before its own.
    name = path.removeprefix("src/").split("/")[0]
    module = name.partition(".")[0]
    is_module = name.endswith((".py", ".pyc", ".so")) or "." not in name
    is_known = any(p.startswith((f"{name}/", f"src/{name}/")) for p in base)
    if is_module and not is_known and module in _RUNNER_MODULES | sys.stdlib_module_names:
        if path.endswith((".py", ".pyc", ".so")):
            return "it replaces a module of Python or of the test runner"
    return None


def _content_problem(path: str, file: TreeFile | None) -> str | None:
    if file is None:
        return None
    if file.is_link:
        target = file.content.decode("utf-8", "surrogateescape")
        place = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if target.startswith("/") or place.split("/")[0] == "..":
            return "it is a link that leads outside"
        return None
    if file.mode & (stat.S_ISUID | stat.S_ISGID):
        return "it has a set-user-id or set-group-id bit"
    if len(file.content) > MAX_FILE_BYTES:
        return f"it is larger than {MAX_FILE_BYTES >> 20} MiB"
    return None


def _configuration_problem(path: str, file: TreeFile | None, base: FileTree) -> str | None:
    """Returns why a build file is dropped: it changes what the test runner reads from it."""
    old = base.get(path)
    before = _runner_settings(path, old.content if old else b"")
    after = _runner_settings(path, file.content if file else b"")
    if before == after:
        return None
    return "it changes the settings of the test runner"


def _runner_settings(path: str, content: bytes) -> object:
    """Returns the part of a build file that a test runner reads; None for other files."""
    name = posixpath.basename(path)
    text = content.decode("utf-8", "replace")
    if name == "setup.cfg":
        return _sections(text, _SETUP_SECTIONS)
    if name == "pyproject.toml":
        return _tools(text)
    if name == "package.json":
        try:
            value = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError):
            return text
        scripts = value.get("scripts") if isinstance(value, dict) else None
        keys = {key: value.get(key) for key in _PACKAGE_KEYS} if isinstance(value, dict) else {}
        return keys, scripts.get("test") if isinstance(scripts, dict) else None
    if name == "go.mod":
        return _GO_REPLACE.findall(text)
    if name == "CMakeLists.txt" or name.endswith(".cmake"):
        return _ENABLES_TESTS.findall(text)
    return None


def _tools(text: str) -> object:
    """Returns the tables of pytest and tox in a pyproject.toml, in whatever form; its text if it is no TOML."""
    try:
        tool = tomllib.loads(text).get("tool")
    except (ValueError, RecursionError):
        return text
    return (
        [tool.get(name) for name in ("pytest", "tox")] if isinstance(tool, dict) else [None, None]
    )


def _sections(text: str, names: re.Pattern[str]) -> list[str]:
    """Returns the sections of an INI file with these names."""
    # Readers of such files also end lines at carriage returns and form feeds.
    parts = _HEADER.split("\n".join(text.removeprefix("\ufeff").splitlines()))
    return [
        f"{name}\n{body.strip()}"
        for name, body in zip(parts[1::2], parts[2::2])
        if names.fullmatch(name)
    ]
