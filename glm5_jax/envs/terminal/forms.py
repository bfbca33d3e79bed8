"""Detects forms of test scripts in which an attempt can still forge its reward, by the text of the tests.

The grader decides on the rights of programs by the files that they come from. That does not help if the
tests evaluate an attempt's text, leave the verdict to the attempt's program, or compare with something that
the attempt can change. This is a text search: it also reports some safe tasks, and misses forms that are
written in another way.

It cannot detect tests that only ask the attempt's classes for a positive answer (`8 in box`, `assert
is_prime(7)`) and never for a negative one, tests that only need a program to end without an error, nor assertions in a
function that only the attempt's code calls.
"""

import ast
import re

from glm5_jax.envs.terminal.task import TerminalTask
from glm5_jax.runtime.files import read_start

SHARED = 'environment_mode = "shared": tests run in the sandbox that the attempt has changed'
_AT_COMMAND = r"(?m)(?:^|[;&|{!]|(?<!\$)\(|\b(?:if|then|do|while|else)\b)\s*"
_MAX_TEST_BYTES = 1 << 20  # read of a file of tests
_PROGRAM = r"(?:timeout\s+\S+\s+)?(?:\./|/(?!usr/|bin/|tests/|grader/)\w+/)\S+[^\n;&|]*"
_CHECKS = r"(?:cmp|diff|e?grep|\[|test|pytest|python3?|uvx?)\b"
_OF_WORK = r"/(?!tests\b|tmp\b|logs\b)\w+"
# A command substitution, except those that give a number or a path of the tests' own.
_SUBSTITUTION = r"\$\((?!\(|(?:date|nproc|mktemp|pwd|basename|dirname)\b|[^()\n]*\|\s*wc\b|\s*(?:wc|grep\s+-\w*c)\b)"
# Programs that print or compare what is in files.
_READERS = r"\b(?:cat|cmp|comm|cp|diff|head|jq|paste|sort|tail|uniq)"
_OUTSIDE = r">\s*[\"']?/(?!tests\b|logs\b|dev\b|root\b)"
# What the tests do -> its pattern in shell scripts, and in Python.
_SHELL = {
    "evaluate a text that may be the attempt's (eval)": r"\beval\s",
    "run a file in their own shell (source)": (
        _AT_COMMAND + r"(?:source|\.)\s+(?!.*(?:\.local/bin/env|/tests/|/etc/))\S"
    ),
    "set variables by a file (export with a substitution)": r"\bexport\s+[\"']?(?:\$\(|`)",
    "look for programs in a folder of the attempt's first (PATH)": (
        r"\bPATH=[\"']?(?:/(?!usr/|opt/|root/|home/|grader/|s?bin\b)\w+|\.|\$\(|\$\{?PWD)[^\n]*:\$"
    ),
    "run the attempt's own tests (pytest, unittest or doctest outside of /tests)": (
        r"(?m)^(?!.*\b(?:install|add)\b).*(?:\bdoctest\b|\bpytest\b(?!\.\w|[^\n;|&]*/tests\b)|\bunittest\b(?!.*/tests\b))"
    ),
    "give the attempt's programs the answers as their standard input (done < /tests/...)": r"\bdone\s*<\s*/tests/",
    "believe the exit code of the attempt's program": (
        _AT_COMMAND
        + rf"(?:cd\s+\S+\s*&&\s*)?{_PROGRAM}(?:;\s*then|&&(?!\s*{_CHECKS})|\n\s*(?:if\s+\[+\s+\$\?|\w+=\$\?))"
    ),
    "believe what the attempt's own files tell a builder to run (make test, npm test, cargo test)": (
        _AT_COMMAND
        + r"(?:cd\s+\S+\s*&&\s*)?(?:(?:make|npm|yarn|pnpm|cargo|go|mvn|gradle|\./gradlew|dotnet|rake|swift)\s"
        r"[^\n;&|]*\b(?:test|check|verify)\b|(?:ctest|tox|nox|jest|vitest|mocha|rspec|phpunit)\b)"
    ),
    "run tests in an interpreter that loads the attempt's code (node, perl, ruby, php)": (
        r"(?m)^\s*(?:if\s+)?(?:node|perl|ruby|php|npx|npm)\s+[^\n]*(?:/tests|test)\b"
    ),
    "believe what a test program prints, among which are the attempt's words (grep for passed or failed)": (
        r"\bgrep\b[^\n|]*\b(?i:passed|failed|failures?|ok)\b"
    ),
    "take the reward from what a program prints that runs the attempt's code, which can print more": (
        r"\b(\w+)=[\"']?\$\([^)\n]*\bpython3?\b[^)\n]*/tests/[\s\S]*?\becho\s+[\"']?\$\{?\1\b[^\n]*/logs/verifier/reward"
        r"|\bpython3?\b[^\n;&]*/tests/[^\n;&]*\|[^\n]*/logs/verifier/reward"
    ),
    "write answers where the attempt's programs can read them (> /tmp/...)": (
        r"\b(?:cat|sort|uniq|head|tail|cut|tr|sed|grep|jq|zcat|base64)\b[^\n;&]*\s/tests/[^\n;&]*"
        + _OUTSIDE
        + r"\w"
        r"|\b(?:python3?|node|perl|ruby|php)\b[^\n;&|]*\s/tests/[^\n;&]*" + _OUTSIDE + r"\w"
        r"|/tests/[^\n;&]*" + _OUTSIDE + r"\S*(?i:expected|want|golden|reference|answer)"
    ),
    "copy the attempt's files to where the reward is (/logs/verifier)": (
        rf"\b(?:cp|mv|rsync|install)\b[^\n;&|]*\s{_OF_WORK}\S*\s+/logs/verifier/?\s*(?:$|[;&|\n])"
        rf"|\bcat\s+{_OF_WORK}\S*\s*>\s*/logs/verifier/reward"
    ),
    "split file names of the attempt's at blanks, so that a part may be the path of the answers (find | xargs, $(ls))": (
        rf"\b(?:find|ls)\b[^\n]*\|\s*xargs\s+(?!-0\b|--null\b)(?:-\S+\s+)*{_READERS}\b"
        rf"|{_READERS}\s[^\n;&|\"]*(?:\$\(|`)\s*(?:find|ls)\b|\bfor\s+\w+\s+in\s+(?:\$\(|`)\s*(?:find|ls)\b"
    ),
    "compare with a file that the attempt may have changed": (
        rf"\b(?:cmp|diff)\b(?![^\n;&|]*/tests/)[^\n;&|]*\s{_OF_WORK}/\S*(?i:expected|golden|reference|answer)"
    ),
}
_PYTHON = {
    "execute a text that may be the attempt's (exec or eval)": r"(?<![\w.])(?:exec|eval|sympify|parse_expr)\s*\(",
    "load objects that execute code (pickle and the like)": (
        r"\b(?:pickle|dill|cloudpickle|joblib|marshal|shelve|torch)\.(?:load|loads|open|Unpickler)\s*\("
        r"|\b(?:read_pickle|load_model|fileConfig)\s*\(|\bjsonpickle\.decode\s*\(|yaml\.(?:unsafe_)?load\s*\("
        r"|allow_pickle\s*=\s*True|\bmultiprocessing\.connection\b|\bdictConfig\s*\("
    ),
    "render a template that may be the attempt's, which executes code (jinja2)": (
        r"\bjinja2\b[\s\S]*\b(?:Template|from_string|FileSystemLoader)\s*\("
    ),
    "load a library of the attempt's into their process (cffi)": r"\bcffi\b[\s\S]*\bdlopen\s*\(",
    "read XML whose entities can be the answers (lxml)": r"\blxml\b[\s\S]*\b(?:parse|fromstring)\s*\(",
    "open a path that the attempt chooses, which may be that of the answers": (
        r"\b(?:open|Path)\(\s*\w+(?:\[[\"']\w+[\"']\]|\.get\([\"']\w+[\"']\))\s*[,)]"
    ),
    "take all names that the attempt's module has (import *)": r"(?m)^\s*from\s+[\w.]+\s+import\s+\*",
    "compare with objects of the attempt's classes, whose __eq__ decides": r"==\s*\w+\.[A-Z]\w*\(|is_equal|\.equals\(",
    "believe a Python of the user that the attempt's programs have, in whose folder it starts": (
        r"(?:\bsys\.executable|[\"']python3?[\"'])\s*,\s*[\"']-[cm][\"']"
    ),
    "write what they expect where the attempt's programs can read it": (
        r"\b(?:expected|want|golden|reference|answer)\w*\.write_(?:text|bytes)\("
    ),
    "look in the answers for a text that the attempt chooses, such as an empty one": (
        r"\bassert\s+\w+(?:\.\w+\(\))*\s+in\s+(?:[^\n#]*(?:\bopen\(|\.read_text\()|\(?(?:expected|want|golden|reference|answer)\w*\b)"
    ),
    "compare as many results as the attempt returns, such as none (zip without strict)": (
        r"\bfor\s[^\n]*\sin\s+(?:enumerate\()?zip\((?![^\n]*\bstrict\s*=\s*True)(?![\s\S]*\blen\()"
    ),
    "pass a number that is none (NaN), which is neither more nor less than any": (
        r"\bmax\(\s*\w+\s*,\s*abs\(|\bassert\s+not\b[^=\n]*[<>]"
    ),
}
_CHANGED_ARGUMENT = (
    "compare with what is computed from an argument that the attempt's function may have changed"
)
_SPLICED = "put a text that may be the attempt's into a program (awk, python -c, bc, an open here-document)"
_CALCULATED = "calculate with a text that may be the attempt's in Bash, which runs commands in it ([[ -eq ]], (( )), ${a[i]}, ${t:i})"
_UNQUOTED = "compare with a text of the attempt's without quotes, which Bash takes for a pattern or for several words"
_SEARCHED = "look in the answers for a pattern that the attempt chooses (grep, case, =~, expr)"
_CHOSEN = "read a path that the attempt chooses, which may be that of the answers (cat, xargs)"
_HOME = (
    "use root's home folder, which is the one that is worked in, and another in grading (~, $HOME)"
)
# Forms that fail for every solution.
_REFUSED = {
    "load a library of the attempt's into their process (ctypes), which is refused": r"\bctypes\.\w*DLL\b"
}
_REFUSED_IN_SHELL = {
    "compile their own files (/tests), which compilers cannot read: they have no rights": (
        _AT_COMMAND
        + r"(?:gcc|g\+\+|cc|c\+\+|clang|clang\+\+|rustc|javac|nvcc|go\s+(?:run|build)|gfortran|ghc)\s(?:[^\n;&|]*\s)?/tests/"
    ),
    "give their own files (/tests) to a program that has no right to read them (awk, sed, the attempt's)": (
        r"(?m)(?:^|[;&|{!(`]|\b(?:if|then|do|while|else)\b)\s*(?:timeout\s+\S+\s+)?"
        r"(?:[gm]?awk|bc|git|openssl|sed|sqlite3|(?:\./|/(?!usr/|bin/|tests/|grader/|logs/)\w+/)[^\s)]+)[ \t](?:[^\n;&|<>)]*[ \t=])?/tests/"
    ),
}


def forgeable_forms(task: TerminalTask) -> list[str]:
    """Returns descriptions of what lets an attempt forge its reward in the tests of a task, or what is refused
    there.
    """
    forms = [SHARED] if task.is_shared else []
    for path in sorted((task.folder / "tests").rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        name = path.relative_to(task.folder)
        text = read_start(path, _MAX_TEST_BYTES).decode("utf-8", errors="replace")
        if path.suffix in ("", ".sh", ".bash"):
            forms += [f"{name}: {what}" for what in _in_shell(_without_comments(text), task)]
        elif path.suffix == ".py":
            forms += [f"{name}: {what}" for what in _in_python(text)]
    return forms


def _in_shell(text: str, task: TerminalTask) -> list[str]:
    forms = _matches(_SHELL | _REFUSED_IN_SHELL, text)
    names = _names_of_attempt(text)
    forms += [_SPLICED] if _splices(text, names) else []
    forms += [_CALCULATED] if _calculates(text, names) else []
    forms += [_UNQUOTED] if _compares_unquoted(text, names) else []
    forms += [_SEARCHED] if _searches_pattern(text, names) else []
    forms += [_CHOSEN] if _reads_chosen_path(text, names) else []
    if _works_at_home(task) and re.search(r"(?<![\w/])~/|\$\{?HOME\}?(?!/\.local/bin)", text):
        forms.append(_HOME)
    return forms


def _in_python(text: str) -> list[str]:
    forms = _matches(_PYTHON | _REFUSED, _without_comments(text))
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return forms
    compares = (node for node in ast.walk(tree) if isinstance(node, ast.Compare))
    return forms + [_CHANGED_ARGUMENT] if any(map(_shares_argument, compares)) else forms


def _without_comments(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def _matches(patterns: dict[str, str], text: str) -> list[str]:
    return [what for what, pattern in patterns.items() if re.search(pattern, text)]


def _names_of_attempt(text: str) -> str:
    """Returns a pattern of the variables that a script sets by output of programs, or by input that it reads."""
    names = {match[1] for match in re.finditer(rf"\b(\w+)=[\"']?(?:{_SUBSTITUTION}|`)", text)}
    names |= {
        name
        for match in re.finditer(r"\bread\s+(?:-\w+\s+)*([\w ]+)", text)
        for name in match[1].split()
    }
    return "|".join(map(re.escape, sorted(names))) or r"(?!)"


def _splices(text: str, names: str) -> bool:
    value = rf"(?:\$\(|`|\$\{{?(?:{names})\b)"
    programs = r"\b(?:[gm]?awk|(?:python3?|perl|node|ruby|php|(?:ba|da)?sh)\b[^\n\"']*\s-\w*[cer])\b[^\n\"']*"
    here_document = rf"\b(?:python3?|perl|node|ruby|php|bash|sh|sqlite3)\b[^\n<]*<<-?\s*(\w+)\b(?:(?!\n\1\b).)*?{value}"
    is_program = re.search(rf"{programs}\"[^\"]*{value}", text)
    is_sum = re.search(rf"{value}[^\n]*\|\s*bc\b|\bbc\b[^\n]*<<<[^\n]*{value}", text)
    return bool(is_program or is_sum or re.search(here_document, text, re.DOTALL))


def _calculates(text: str, names: str) -> bool:
    value = rf"(?:\$\((?!\()|`|\$?\{{?\b(?:{names})\b)"
    compared = rf"\[\[[^\]\n]*{value}[^\]\n]*\]\]"
    tests = (match[0] for match in re.finditer(compared, text))
    if any(re.search(r"\s-(?:eq|ne|lt|le|gt|ge)\s", test) for test in tests):
        return True
    patterns = [rf"\(\([^()\n]*{value}", rf"\blet\s[^\n]*{value}"]
    patterns.append(rf"\$\{{\w+:(?![-=+?])[^}}\n]*{value}")
    patterns.append(rf"(?:\[|\btest)\s+-v\s+[^\]\n]*{value}|\$\{{!(?:{names})\b")
    patterns.append(
        rf"\b(?:printf\s+-v|declare|typeset|readonly|unset)\s[^\n=]*\$\{{?(?:{names})\b"
    )
    if not re.search(
        r"\b(?:declare|local|typeset)\s+-\w*A", text
    ):  # subscripts of such arrays are texts
        patterns.append(rf"\$\{{#?\w+\[[^\]\n]*{value}|(?m:^)\s*\w+\[[^\]\n]*{value}[^\]\n]*\]\+?=")
    return any(re.search(pattern, text) for pattern in patterns)


def _compares_unquoted(text: str, names: str) -> bool:
    value = rf"(?:\$\{{?(?:{names})\b\}}?|{_SUBSTITUTION}|`)"
    in_double = rf"\[\[[^\]\n]*\s[!=]?=\s+{value}"
    in_single = rf"(?<!\[)\[\s+(?:[^\]\n]*\s)?{value}"
    return re.search(rf"{in_double}|{in_single}", text) is not None


def _searches_pattern(text: str, names: str) -> bool:
    value = rf"(?:\$\((?!\()|`|\$\{{?(?:{names})\b)"
    patterns = (
        rf"\bgrep\s+(?:-\w+\s+)*[\"']?{value}[^\n|;&]*\s/tests/",
        rf"(?m)^[^\n#]*\bcase\b[^\n]*/tests/[\s\S]*?(?:^|\bin\b|\||;;)\s*\(?\$\{{?(?:{names})\b\}}?[^\n\"]*\)",
        rf"\[\[[^\]\n]*\s=~\s+\S*{value}",
        rf"\[\[[^\]\n]*\s==?\s+\*\"?{value}",
        rf"\bexpr\b[^\n]*\s:\s+\"?{value}",
    )
    return any(re.search(pattern, text) for pattern in patterns)


def _reads_chosen_path(text: str, names: str) -> bool:
    readers = (
        r"\b(?:cat|cmp|diff|cp|mv|head|tail|sort|uniq|cut|wc|jq|base64|od|xxd|md5sum|sha\d+sum)"
    )
    patterns = (
        rf"{readers}\s(?:[^\n;&|<\"']*\s)?\"?\$\{{?(?:{names})\b\}}?\"?(?:[\s;)|]|$)",
        rf"{readers}\s(?:[^\n;&|<\"']*\s)?\"?(?:\$\((?:cat\s+)?{_PROGRAM}|`)",
        rf"{_PROGRAM}\|\s*xargs\s+(?:-\S+\s+)*{readers}\b|\bcat\s+{_OF_WORK}[^\n|]*\|\s*xargs\s+(?:-\S+\s+)*{readers}\b",
    )
    return any(re.search(pattern, text, re.MULTILINE) for pattern in patterns)


def _works_at_home(task: TerminalTask) -> bool:
    if task.workdir is not None:
        return task.workdir == "/root"
    recipe = task.dockerfile
    text = recipe.read_text("utf-8", errors="replace") if recipe.is_file() else ""
    folders = re.findall(r"(?im)^\s*WORKDIR\s+(\S+)", text)
    return bool(folders) and folders[-1].rstrip("/") == "/root"


def _shares_argument(node: ast.Compare) -> bool:
    """Returns whether both sides of a comparison call something with the same variable, as in f(data) ==
    sorted(data), or one calls its methods, as in f(data) == data.total().
    """
    sides = (node.left, *node.comparators)
    names = [(_called_with(side), _called_with(side) | _methods_of(side)) for side in sides]
    return any(a & any_b or any_a & b for (a, any_a), (b, any_b) in zip(names, names[1:]))


def _methods_of(side: ast.expr) -> set[str]:
    """Returns the variables whose methods an expression calls."""
    called = [node.func for node in ast.walk(side) if isinstance(node, ast.Call)]
    owners = [function.value for function in called if isinstance(function, ast.Attribute)]
    return {owner.id for owner in owners if isinstance(owner, ast.Name)}


def _called_with(side: ast.expr) -> set[str]:
    if not isinstance(side, ast.Call):
        return set()
    return {argument.id for argument in side.args if isinstance(argument, ast.Name)}
