"""Recipes for C and C++ projects with CMake: tests are programs of CTest, with Unity or GoogleTest inside."""

import posixpath
import re
from collections.abc import Sequence

from glm5_jax.envs.swe.file_tree import FileTree, TreeFile, text_file, with_changes
from glm5_jax.envs.swe.recipes.failing_assertions import GTEST
from glm5_jax.envs.swe.recipes.plan import (
    RESULTS,
    SEED,
    Canaries,
    ProjectPlan,
    RecipeError,
    matching,
    text_of,
)
from glm5_jax.envs.swe.recipes.planting import CanaryDraw
from glm5_jax.envs.swe.recipes.program_variants import plant_program_variants
from glm5_jax.envs.swe.recipes.token_variants import plant_token_variants

_OPTION = re.compile(r"^\s*(?:option|cmake_dependent_option)\s*\(\s*(\w+)", re.MULTILINE)
_ON = re.compile(r"TESTS?(?:ING)?(?:$|_)|_UTILS$")
# Warnings of newer compilers stop builds of old sources.
_OFF = re.compile(r"WERROR|WARNINGS?_AS_ERRORS?|CUSTOM_COMPILER_FLAGS|BENCHMARK|EXAMPLES?$|_DOCS?$")
_NEVER = re.compile(r"SANITIZ|FUZZ|VALGRIND|COVERAGE|OVERRIDE")
_LIBRARY = re.compile(r"^\s*add_library\s*\(\s*([^\s)]+)", re.MULTILINE)
_SOURCES = ("*.c", "*.cc", "*.cpp", "*.cxx")
_SOURCE_ENDS = (".cc", ".cpp", ".cxx")


# Bodies of programs that end with a code.
_PROGRAMS = (
    "return {code};",
    "exit({code});",
    "int got = {one}; if (got != {two}) return {code}; return 1 - {code};",
    "return {one} < {two} ? {code} : 1 - {code};",
)


class CMakeRecipe:
    """Recipe of CMake.

    Attributes:
      language: "c" or "cpp".
      name: name and version.
    """

    build_folders: tuple[str, ...] = ("build/",)

    def __init__(self, language: str):
        self.language = language
        self.name = f"{language}-cmake/1"

    def plan(self, tree: FileTree, focus: Sequence[str]) -> ProjectPlan:
        """Returns the commands of a project, with its options for tests turned on."""
        if "CMakeLists.txt" not in tree:
            raise RecipeError("there is no CMakeLists.txt at the top; leave the project out")
        flags = " ".join(f"-D{name}={value}" for name, value in _options(tree))
        configure = (
            "cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0 "
            f"-DCMAKE_C_FLAGS_DEBUG=-g -DFETCHCONTENT_FULLY_DISCONNECTED=ON {flags}"
        ).strip()
        parser = _parser(tree)
        tests, shuffled = _gtest_commands() if parser == "gtest" else _ctest_commands()
        return ProjectPlan(
            recipe=self.name,
            log_parser=parser,
            test_cmds=(tests,),
            shuffled_cmds=(shuffled,),
            setup_cmds=(configure, "cmake --build build"),
            # CMake configures again where a CMakeLists.txt is newer than the build.
            rebuild_cmds=(configure, "cmake --build build"),
            apt=("cmake", "ninja-build", "gcc" if self.language == "c" else "g++", "pkg-config")
            + (("libgtest-dev",) if parser == "gtest" else ()),
        )

    def canaries(self, tree: FileTree, focus: Sequence[str], draw: CanaryDraw) -> Canaries:
        """Returns tests in the CMakeLists.txt of the tests: in a program of GoogleTest, or two programs of CTest."""
        lists = [path for path in matching(tree, "CMakeLists.txt") if "/" in path]
        folders = {posixpath.dirname(path) for path in focus}
        near = [path for path in lists if posixpath.dirname(path) in folders]
        tests = [path for path in lists if re.search(r"(?:^|/)tests?/", path)]
        chosen = (near or tests or ["CMakeLists.txt"])[0]
        is_gtest = _parser(tree) == "gtest"
        return (_gtest_canaries if is_gtest else _ctest_canaries)(tree, chosen, focus, draw)


def _options(tree: FileTree) -> list[tuple[str, str]]:
    """Returns the options to set, with their values."""
    names: dict[str, str] = {}
    for path in matching(tree, "CMakeLists.txt"):
        for name in _OPTION.findall(text_of(tree, path)):
            if not _NEVER.search(name):
                value = "OFF" if _OFF.search(name) else "ON" if _ON.search(name) else ""
                names |= {name: value} if value else {}
    return sorted(names.items())


def _parser(tree: FileTree) -> str:
    texts = [text_of(tree, path) for path in matching(tree, *_SOURCES)]
    if any("gtest/gtest.h" in text for text in texts):
        return "gtest"
    return "unity" if any("RUN_TEST(" in text for text in texts) else "ctest"


def _ctest_commands() -> tuple[str, str]:
    command = f"ctest --test-dir build -V --timeout 60 --output-junit {RESULTS}/ctest.xml"
    return command, f"{command} --schedule-random"


def _gtest_commands() -> tuple[str, str]:
    def command(options: str) -> str:
        return (
            "code=0; for t in $(find build -type f -perm -u+x -name '*test*' ! -name '*.so*' ! -path '*CMakeFiles*' | "
            f"sort); do $t --gtest_output=xml:{RESULTS}/$(basename $t).xml{options} || code=$?; done; exit $code"
        )

    return command(""), command(f" --gtest_shuffle --gtest_random_seed={SEED}")


def _append(tree: FileTree, path: str, text: str) -> dict[str, TreeFile]:
    return {path: text_file(f"{text_of(tree, path)}\n{text}")}


def _gtest_canaries(tree: FileTree, lists: str, focus: Sequence[str], draw: CanaryDraw) -> Canaries:
    text = text_of(tree, lists)
    names = (
        "|".join(re.escape(posixpath.basename(path)) for path in focus if path in tree) or r"\w+"
    )
    programs = re.findall(rf"add_executable\s*\(\s*\"?(\w+)\"?[^)]*\b(?:{names})\b", text)
    programs += re.findall(r"add_executable\s*\(\s*\"?(\w+)", text)
    if not programs:
        raise RecipeError(f"{lists} has no add_executable; leave the project out")
    # With the headers of a test in focus, since one of the project's could replace an assertion.
    folder = posixpath.dirname(lists)
    in_folder = [path for path in focus if path in tree and posixpath.dirname(path) == folder]
    near = next((path for path in in_folder if path.endswith(_SOURCE_ENDS)), "")
    lines = ["#include <gtest/gtest.h>", *_plain_includes(text_of(tree, near))]
    passing, failing = draw.word("a").capitalize(), draw.word("z").capitalize()
    for suite, forms in ((passing, {"holds": "EXPECT_EQ(1, 1)"}), (failing, GTEST)):
        tests = draw.statements(forms)
        lines += [f"TEST({suite}, {name}) {{ {body}; }}" for name, body in tests.items()]
    source = "\n".join([*lines, ""])
    name = f"{draw.word()}.cpp"
    files = _append(tree, lists, f"target_sources({programs[0]} PRIVATE {name})\n")
    path = posixpath.join(posixpath.dirname(lists), name)
    variants = plant_token_variants(tree, focus, "cpp", draw)
    return Canaries(
        files={**files, path: text_file(source)},
        passing=f"{passing}::",
        failing=f"{failing}::",
        variant_files=variants.files,
        variants=variants.names,
        swaps=variants.swaps,
    )


def _plain_includes(text: str) -> list[str]:
    """Returns the lines of a source, before its first test, that include a header under no condition."""
    lines, depth = [], 0
    for line in text.partition("TEST")[0].splitlines():
        directive = line.strip().replace("# ", "#")
        depth += directive.startswith("#if") - directive.startswith("#endif")
        is_source = re.search(r"\.c\w*[>\"]", directive)  # its definitions would be there twice
        if directive.startswith("#include") and not depth and not is_source:
            lines.append(line.strip())
    return lines


def _ctest_canaries(tree: FileTree, lists: str, focus: Sequence[str], draw: CanaryDraw) -> Canaries:
    libraries = _LIBRARY.findall(text_of(tree, "CMakeLists.txt"))
    names = draw.word("a"), draw.word("z")
    text = "".join(_ctest_program(name, libraries) for name in names)
    folder = posixpath.dirname(lists)
    codes = 0, draw.random.randint(1, 99)
    sources = {
        posixpath.join(folder, f"{name}.c"): text_file(_program_with(code, draw))
        for name, code in zip(names, codes)
    }
    files = {**_append(tree, lists, text), **sources}
    variants = plant_program_variants(with_changes(tree, files), focus, draw)
    return Canaries(
        files=files,
        passing=f"ctest::{names[0]}",
        failing=f"ctest::{names[1]}",
        variant_files=variants.files,
        variants=variants.names,
        swaps=variants.swaps,
    )


def _program_with(code: int, draw: CanaryDraw) -> str:
    """Returns a program that ends with a code, in one of several forms."""
    one, two = sorted(draw.random.sample(range(1000), 2))
    form = draw.random.choice(_PROGRAMS).format(code=code, one=one, two=two)
    return f"#include <stdlib.h>\n\nint main(void) {{ {form} }}\n"


def _ctest_program(name: str, libraries: Sequence[str]) -> str:
    """Returns the lines of CMake that add a program and its test."""
    lines = [f"add_executable({name} {name}.c)"]
    if (
        libraries
    ):  # a library that prints results when it is loaded then does so in this program too
        lines.append(f"target_link_libraries({name} -Wl,--no-as-needed {libraries[0]})")
    return "\n".join([*lines, f"add_test(NAME {name} COMMAND {name})", ""])
