"""Forms of test scripts in which an attempt can still forge its reward, found by the text of the tests.

The grader decides which rights programs have by the files that they come from. It cannot help where the tests themselves
take an attempt's text for their own, or leave the verdict to the attempt's program. This is a search in texts: it names
some tasks that are safe, and misses forms that are written in another way.
"""

import re

from glm5_jax.envs.terminal.task import TerminalTask

SHARED = 'environment_mode = "shared": tests run in the sandbox that the attempt has changed'
# What the tests do -> a pattern for it in shell scripts, and in Python.
_SHELL = {
    "evaluate a text that may be the attempt's (eval)": r"\beval\s",
    "run a file in their own shell (source)": r"(?m)^\s*(?:source|\.)\s+(?!.*(?:\.local/bin/env|/tests/|/etc/))\S",
    "run a text that may be the attempt's (-c with a substitution)": r"\s-\w*c\s+[\"']?\$\(",
    "run the attempt's own tests (pytest, unittest or doctest outside of /tests)": (
        r"(?m)^(?!.*\b(?:install|add)\b).*(?:\bdoctest\b|\bpytest\b(?![^\n;|&]*/tests\b)|\bunittest\b(?!.*/tests\b))"
    ),
    "give the attempt's programs the answers as their standard input (done < /tests/...)": r"\bdone\s*<\s*/tests/",
    "believe the exit code of the attempt's program": (
        r"(?m)^\s*(?:if|while)\s+(?:!\s+)?(?:cd\s+\S+\s*&&\s*)?(?:\./|/(?!usr/|bin/|tests/|grader/)\w+/)\S+[^|\n]*;\s*then"
        r"|^\s*(?:\./|/(?!usr/|bin/|tests/)\w+/)\S+[^|\n]*&&\s*echo\s+1"
    ),
    "run tests in an interpreter that loads the attempt's code (node, perl, ruby, php)": (
        r"(?m)^\s*(?:if\s+)?(?:node|perl|ruby|php|npx|npm)\s+[^\n]*(?:/tests|test)\b"
    ),
}
_PYTHON = {
    "execute a text that may be the attempt's (exec or eval)": r"(?<![\w.])(?:exec|eval)\s*\(",
    "load objects that execute code (pickle and the like)": (
        r"\b(?:pickle|dill|cloudpickle|joblib|marshal|shelve|torch)\.(?:load|loads|open)\s*\(|yaml\.(?:unsafe_)?load\s*\("
        r"|allow_pickle\s*=\s*True"
    ),
    "take all names that the attempt's module has (import *)": r"(?m)^\s*from\s+[\w.]+\s+import\s+\*",
    "compare with objects of the attempt's classes, whose __eq__ decides": r"==\s*\w+\.[A-Z]\w*\(|is_equal|\.equals\(",
}
# What works for nobody: tests of these forms reward no solution.
_REFUSED = {
    "load a library of the attempt's into their process (ctypes), which is refused": r"\bctypes\.\w*DLL\b"
}


def forgeable(task: TerminalTask) -> list[str]:
    """What in the tests of a task lets an attempt forge its reward, or what is refused, in words."""
    found = [SHARED] if task.is_shared else []
    for path in sorted((task.folder / "tests").rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        patterns = _SHELL if path.suffix in ("", ".sh", ".bash") else {}
        patterns = _PYTHON | _REFUSED if path.suffix == ".py" else patterns
        text = path.read_text("utf-8", errors="replace")
        name = path.relative_to(task.folder)
        found += [f"{name}: {what}" for what in _matches(patterns, text)]
    return found


def _matches(patterns: dict[str, str], text: str) -> list[str]:
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    text = "\n".join(lines)
    return [what for what, pattern in patterns.items() if re.search(pattern, text)]
