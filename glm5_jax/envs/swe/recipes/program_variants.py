"""Plants variants of programs of tests, as C has them: copies of a source that expect another value, each a program of CTest.

A failing test ends its program with an error, so that a variant needs a program of its own. The program has the sources,
libraries and options of the one that it copies. `planting` describes why, and how values are drawn.
"""

import posixpath
import re
from collections.abc import Sequence

from glm5_jax.envs.swe.file_tree import FileTree, TreeFile, text_file
from glm5_jax.envs.swe.paths import language_of
from glm5_jax.envs.swe.recipes.planting import (
    CanaryDraw,
    PlantedVariants,
    TestSite,
    draw_change,
    num_copies,
    other_values,
)
from glm5_jax.envs.swe.recipes.token_variants import find_token_sites

_MAX_PROGRAMS = 3
# Adds programs and tests like those of this folder that are made of a source.
_CMAKE = """
cmake_policy(PUSH)
cmake_policy(SET CMP0054 NEW)  # projects of old versions of CMake do not know if(TEST)
cmake_policy(SET CMP0064 NEW)
get_property(planted_targets DIRECTORY PROPERTY BUILDSYSTEM_TARGETS)
foreach(target IN LISTS planted_targets)
  get_target_property(kind ${{target}} TYPE)
  get_target_property(sources ${{target}} SOURCES)
  if(kind STREQUAL "EXECUTABLE" AND "${{sources}};" MATCHES "(^|[/;]){pattern};")
    foreach(word {words})
      string(REGEX REPLACE "(^|[/;]){pattern};" "\\\\1{stem}_${{word}}{suffix};" copied "${{sources}};")
      add_executable(${{target}}_${{word}} ${{copied}})
      foreach(property {properties})
        get_target_property(value ${{target}} ${{property}})
        if(value)
          set_target_properties(${{target}}_${{word}} PROPERTIES ${{property}} "${{value}}")
        endif()
      endforeach()
      add_test(NAME ${{target}}_${{word}} COMMAND ${{target}}_${{word}})
      if(TEST ${{target}})
        get_test_property(${{target}} WORKING_DIRECTORY value)
        if(value)
          set_tests_properties(${{target}}_${{word}} PROPERTIES WORKING_DIRECTORY "${{value}}")
        endif()
      endif()
    endforeach()
  endif()
endforeach()
cmake_policy(POP)
"""
_PROPERTIES = (
    "LINK_LIBRARIES INCLUDE_DIRECTORIES COMPILE_DEFINITIONS COMPILE_OPTIONS COMPILE_FEATURES COMPILE_FLAGS "
    "LINK_OPTIONS LINK_FLAGS LINK_DIRECTORIES C_STANDARD CXX_STANDARD"
)


def plant_program_variants(
    tree: FileTree, focus: Sequence[str], draw: CanaryDraw
) -> PlantedVariants:
    """Returns copies of the sources in focus of C and C++ that expect other values, and the CMakeLists.txt with their programs."""
    sites = {}
    for path in focus:
        listed = _sites(tree, path, draw)
        if listed and _lists_of(tree, path) is not None:
            sites[path] = listed
    chosen = draw.random.sample(sorted(sites), min(len(sites), _MAX_PROGRAMS))
    copies, files, names, swaps = num_copies(len(chosen)), {}, [], []
    texts: dict[str, str] = {}
    for path in chosen:
        site = draw.random.choice(sites[path])
        source = tree[path].content
        change = draw_change(source, site, draw)
        right = source[change.start : change.end]
        others = [change.opposite] if change.opposite else other_values(right, copies, draw)
        values = [right, *others]
        draw.random.shuffle(values)
        words: list[str] = []
        for _ in others:
            words.append(draw.new_name("", "", [*names, *words]))
        stem, suffix = posixpath.splitext(posixpath.basename(path))
        for word, value in zip(["", *words], values):
            text = source[: change.start] + value + source[change.end :]
            name = f"{stem}_{word}" if word else stem
            place = posixpath.join(posixpath.dirname(path), f"{name}{suffix}")
            files[place] = TreeFile(tree[path].mode, text)
            swaps += [("", f"_{word}")] if word and value == right else []
        names += [f"_{word}" for word in words]
        lists = _lists_of(tree, path) or ""
        texts.setdefault(lists, _text(tree, lists))
        texts[lists] += _CMAKE.format(
            pattern=re.escape(f"{stem}{suffix}").replace("\\", "\\\\"),
            stem=stem,
            suffix=suffix,
            words=" ".join(words),
            properties=_PROPERTIES,
        )
    files |= {path: text_file(text) for path, text in texts.items()}
    return PlantedVariants(files, tuple(names), tuple(swaps))


def _sites(tree: FileTree, path: str, draw: CanaryDraw) -> list[TestSite]:
    """Returns the tests of a source whose values no attempt knows; all of them if none has a name that fails before."""
    if path not in tree or language_of(path) not in ("c", "cpp"):
        return []
    source = tree[path].content
    sites = find_token_sites(source, "c")
    failing = [
        site
        for site in sites
        if any(
            source[site.name_start : site.name_end].decode("utf-8", "replace") in name
            for name in draw.failing_tests
        )
    ]
    return failing or sites


def _lists_of(tree: FileTree, path: str) -> str | None:
    """Returns the nearest CMakeLists.txt at or above a source that adds programs."""
    folder = posixpath.dirname(path)
    while True:
        lists = posixpath.join(folder, "CMakeLists.txt")
        if re.search(r"\badd_executable\b", _text(tree, lists)):
            return lists
        if not folder:
            return None
        folder = posixpath.dirname(folder)


def _text(tree: FileTree, path: str) -> str:
    file = tree.get(path)
    return "" if file is None or file.is_link else file.content.decode("utf-8", "replace")
