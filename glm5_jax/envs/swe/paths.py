"""Tells tests, code and other files apart by their paths.

Parts of a path count, not letters in it: `src/latest/x.py` is code. The forms of names are those of the test runners of
nine languages. A test folder holds tests and their data, in any language.
"""

import pathlib
import re
from typing import Literal

Kind = Literal["code", "test", "aux"]

_TEST_FOLDERS = {"test", "tests", "spec", "specs", "__tests__", "testing", "e2e", "t", "testdata"}
_TEST_NAMES = re.compile(
    r"test_.*\.py|.*_test\.py|conftest\.py"
    r"|.*(?:Test|Tests|IT)\.java|.*_test\.go"
    r"|.*\.(?:test|spec)\.[cm]?[jt]sx?"
    r"|.*Test\.php|.*_spec\.rb|test_.*\.rb|.*_test\.rb"
)
_LANGUAGES = {
    "python": ("py", "pyi", "pyx", "pxd"),
    "java": ("java",),
    "go": ("go",),
    "c": ("c", "h"),
    "cpp": ("cc", "cpp", "cxx", "c++", "hh", "hpp", "hxx", "h++", "ipp", "inl", "tcc"),
    "javascript": ("js", "jsx", "mjs", "cjs"),
    "typescript": ("ts", "tsx", "mts", "cts"),
    "php": ("php", "phtml", "inc"),
    "ruby": ("rb", "rake", "gemspec", "erb", "ru"),
}
LANGUAGES = tuple(_LANGUAGES)
_LANGUAGE_OF = {
    suffix: language for language, suffixes in _LANGUAGES.items() for suffix in suffixes
}
# Files next to sources that a change of behaviour can need: other languages, data, templates and build files.
_MORE_CODE = {
    *(
        "rs",
        "s",
        "asm",
        "kt",
        "scala",
        "groovy",
        "cs",
        "vue",
        "svelte",
        "sh",
        "bash",
        "awk",
        "pl",
        "pm",
        "lua",
        "y",
        "l",
    ),
    *(
        "json",
        "yaml",
        "yml",
        "toml",
        "xml",
        "html",
        "htm",
        "css",
        "scss",
        "sass",
        "less",
        "sql",
        "proto",
        "graphql",
    ),
    *(
        "tmpl",
        "tpl",
        "twig",
        "j2",
        "jinja",
        "jinja2",
        "mustache",
        "hbs",
        "ejs",
        "cmake",
        "in",
        "am",
        "ac",
        "m4",
        "gradle",
    ),
    *("properties", "cfg", "ini", "mk", "bazel", "bzl", "g4", "peg", "gyp", "gypi", "wsdl", "xsd"),
}
_BUILD_FILES = {
    *(
        "makefile",
        "gnumakefile",
        "rakefile",
        "gemfile",
        "dockerfile",
        "cmakelists.txt",
        "meson.build",
        "configure",
    ),
    *(
        "requirements.txt",
        "constraints.txt",
        "build",
        "workspace",
        "go.mod",
        "jakefile",
        "gulpfile",
        "meson_options.txt",
    ),
}
_LOCK_FILES = {
    *(
        "package-lock.json",
        "npm-shrinkwrap.json",
        "yarn.lock",
        "pnpm-lock.yaml",
        "composer.lock",
        "gemfile.lock",
    ),
    *("poetry.lock", "pipfile.lock", "uv.lock", "cargo.lock", "go.sum", "bun.lockb"),
}
_AUX_FOLDERS = {
    *(
        ".github",
        ".gitlab",
        ".circleci",
        ".travis",
        ".azure-pipelines",
        ".changeset",
        "changelog.d",
        "changes",
        "newsfragments",
    ),
    *("doc", "docs", "documentation", "man", "debian", ".pc"),
}
_DOC_FOLDERS = ("doc/", "docs/", "documentation/")
_BARE_CODE_FOLDERS = {"bin", "sbin", "exe", "scripts", "include", "src", "lib"}
_AUX_NAMES = re.compile(
    r"(?:changelog|changes|history|news|release[-_]?notes|readme|license|licence|copying|copyright|authors|contributors"
    r"|contributing|maintainers|credits|thanks|todo|security|code_of_conduct|codeowners)(?:[._-].*)?"
    r"|\.gitlab-ci\.ya?ml|\.travis\.ya?ml|appveyor\.ya?ml|\.appveyor\.ya?ml|azure-pipelines\.ya?ml|jenkinsfile"
    r"|\.pre-commit-config\.yaml|\.gitignore|\.gitattributes|\.mailmap|\.editorconfig|\.readthedocs\.ya?ml",
    re.IGNORECASE,
)

# Configuration of test runners, which an attempt could use to change what the tests report.
_RUNNER_CONFIG = re.compile(
    r"conftest\.py|\.?pytest\.(?:ini|toml)|tox\.ini|sitecustomize\.py|usercustomize\.py|.*\.pth"
    r"|\.mocharc(?:\..*)?|mocha\.opts|(?:jest|vitest|vite)(?:\.\w+)?\.config\..*|\.npmrc"
    r"|vitest\.(?:workspace|projects)\..*|babel\.config\..*|\.babelrc(?:\..*)?|\.swcrc|jest-preset\..*"
    r"|phpunit(?:\..*)?\.xml(?:\.dist)?|\.rspec(?:-local)?|go\.work|spec_helper\.rb|rails_helper\.rb|\.rubyopt"
    r"|CTestCustom\.cmake|CTestTestfile\.cmake|jvm\.config|maven\.config|junit-platform\.properties"
)


def suffix_of(path: str) -> str:
    """Returns the suffix of a file name without its dot, in lower case; empty if there is none."""
    return pathlib.PurePosixPath(path).suffix.lower().removeprefix(".")


def language_of(path: str) -> str | None:
    """Returns the language of a source file by its suffix; None for other files. Headers of C++ may count as C."""
    return _LANGUAGE_OF.get(suffix_of(path))


def is_test_path(path: str) -> bool:
    """Returns whether a file is a test, or data of one."""
    *folders, name = path.split("/")
    return bool(
        {folder.lower() for folder in folders} & _TEST_FOLDERS or _TEST_NAMES.fullmatch(name)
    )


def is_runner_config(path: str) -> bool:
    """Returns whether a file configures a test runner and nothing else."""
    return bool(_RUNNER_CONFIG.fullmatch(path.rpartition("/")[2]))


def classify_path(path: str) -> Kind:
    """Returns whether a file is a test, code, or neither (documentation, change logs, lock files, CI).

    Build files and data next to sources count as code, because a change of behaviour can need them.
    """
    *folders, name = path.split("/")
    lower = {folder.lower() for folder in folders}
    if name.lower() in _LOCK_FILES or lower & {".github", "debian", ".pc"}:
        return "aux"
    if is_test_path(path):
        return "test"
    is_source = language_of(path) is not None
    if _AUX_NAMES.fullmatch(name) and not is_source:
        return "aux"
    if lower & _AUX_FOLDERS and (not is_source or path.lower().startswith(_DOC_FOLDERS)):
        return "aux"
    if is_source or name.lower() in _BUILD_FILES or suffix_of(path) in _MORE_CODE:
        return "code"
    # Headers of C++ libraries and scripts have no suffix.
    is_bare = "." not in name and bool(lower & _BARE_CODE_FOLDERS)
    return "code" if is_bare else "aux"
