"""Filters before anything runs: links, sizes, licences, statements, requirements, votes and funnels."""

import asyncio
import json

import pytest

from glm5_jax.agents.writers import RuleWriter, WriterError
from glm5_jax.envs.funnel import Funnel, FunnelStage, check_funnel, read_funnel
from glm5_jax.envs.swe.filters import (
    Candidate,
    FilterConfig,
    Repository,
    dep3_links,
    filter_candidates,
    is_free_license,
    linked_issues,
    main_language_of,
    patch_problem,
    read_dep3,
    repository_problem,
)
from glm5_jax.envs.swe.statements import (
    CLEAR,
    LEAKED,
    RULES,
    UNASKED,
    VAGUE,
    count_votes,
    find_task_type,
    judge_clarity,
    requirements_problem,
    task_type_by_rule,
    write_requirements,
)

CODE = """diff --git a/src/calc.py b/src/calc.py
--- a/src/calc.py
+++ b/src/calc.py
@@ -1,2 +1,4 @@
 def add(a, b):
-    return a - b
+    checked = _check_operands(a, b)
+    total_value = compute_exact_sum(checked)
+    return total_value
"""
TESTS = """diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -1 +1,3 @@
 from calc import add
+from calc import to_exact
+def test_add(): assert to_exact(add(1, 2)) == 3
"""
REPOSITORY = Repository(
    name="someone/calc",
    license="MIT",
    languages={"python": 900, "c": 100},
    num_stars=50,
    num_forks=300,
    num_issues=150,
    num_pulls=60,
)


def candidate(**changes) -> Candidate:
    fields = {
        "repository": REPOSITORY,
        "name": "someone__calc-12",
        "title": "Repair add",
        "body": "Fixes #11",
        "diff": CODE + TESTS,
        "problem_statement": "add(1, 2) gives -1, but it should give the sum of both numbers.",
    }
    return Candidate(**(fields | changes))


def repository(**changes) -> Repository:
    return Repository(
        **({f: getattr(REPOSITORY, f) for f in REPOSITORY.__dataclass_fields__} | changes)
    )


# -- funnel ---------------------------------------------------------------------------------------------


def test_filters_candidates_and_adds_up(tmp_path):
    many = "diff --git a/s{0}.py b/s{0}.py\n--- a/s{0}.py\n+++ b/s{0}.py\n@@ -1 +1 @@\n-a\n+b\n"
    candidates = [
        candidate(),
        candidate(repository=repository(license="GPL-3.0")),
        candidate(is_merged=False),
        candidate(problem_statement=" "),
        candidate(body="see #11"),
        candidate(diff=CODE),
        candidate(diff=TESTS),
        candidate(diff=TESTS + "".join(many.format(i) for i in range(11))),
    ]
    funnel = Funnel()
    assert filter_candidates(candidates, FilterConfig(), funnel) == candidates[:1]
    funnel.write(tmp_path / "funnel.jsonl")
    stages = read_funnel(tmp_path / "funnel.jsonl")
    assert stages == funnel.stages
    assert [(s.stage, s.num_in, s.num_out) for s in stages] == [
        ("repository", 8, 7),
        ("pull_request", 7, 5),
        ("issue_link", 5, 4),
        ("patch", 4, 1),
    ]
    assert stages[1].dropped_by_reason == {"not merged": 1, "problem statement is empty": 1}
    line = json.loads((tmp_path / "funnel.jsonl").read_text().splitlines()[0])
    assert line == {
        "stage": "repository",
        "in": 8,
        "out": 7,
        "dropped_by_reason": {"licence is not free, or unknown": 1},
    }


def test_rejects_funnel_that_does_not_add_up():
    def stage(num_in, num_out, **dropped) -> FunnelStage:
        return FunnelStage(stage="a", num_in=num_in, num_out=num_out, dropped_by_reason=dropped)

    check_funnel([stage(5, 3, x=1, y=1), stage(3, 3)])
    with pytest.raises(ValueError, match="5 in is not 3 out and 1 dropped"):
        check_funnel([stage(5, 3, x=1)])
    with pytest.raises(ValueError, match="has 4 in, and a has 3 out"):
        check_funnel([stage(5, 3, x=2), stage(4, 4)])
    with pytest.raises(ValueError, match="1 in is not 2 out"):
        Funnel().add("a", 1, 2, {"x": -1})


# -- repositories, links and sizes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"num_forks": 199}, "too few forks"),
        ({"num_issues": 100}, "too few issues and pull requests"),
        ({"num_forks": None, "num_issues": None}, None),
        ({"languages": {"python": 50, "go": 50}}, "no language has the minimum share"),
        ({"languages": {"haskell": 50}}, "language is not supported"),
        ({"languages": {}}, "no language has the minimum share"),
        ({"license": ""}, "licence is not free, or unknown"),
    ],
)
def test_filters_repositories(changes, problem):
    assert repository_problem(repository(**changes), FilterConfig()) == problem


def test_counts_headers_for_cpp():
    assert main_language_of(repository(languages={"cpp": 55, "c": 30, "python": 15}), 0.6) == "cpp"
    assert main_language_of(repository(languages={"cpp": 5, "c": 80, "python": 15}), 0.6) == "c"


def test_recognises_free_licences():
    for name in (
        "MIT",
        "BSD-3-Clause",
        "Apache-2.0",
        "Apache License 2.0",
        "ISC",
        "LGPL-2.1-or-later",
        "Zlib",
    ):
        assert is_free_license(name), name
    for name in ("GPL-3.0-only", "AGPL-3.0", "proprietary", "", "MIT AND GPL-2.0"):
        assert not is_free_license(name), name


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("Fixes #11 and closes: #12", [11, 12]),
        ("resolved https://github.com/Someone/Calc/issues/7", [7]),
        ("fix someone/calc#3", [3]),
        ("fixes other/calc#3, see #4", []),
        ("<!-- fixes #1 -->", []),
        ("prefixes #2", []),
        ("fixes https://github.com/other/calc/issues/7", []),
    ],
)
def test_finds_linked_issues(text, numbers):
    assert linked_issues(text, "someone/calc") == numbers


HEADER = """From: A Person
Date: Thu, 1 Jan 2026
Subject: Reject malformed hosts
 in headers
Bug-Debian: https://bugs.example.org/1
Origin: backport, https://example.org/commit/2.
Description: first
 .
 second
---
 Bug: https://example.org/not-a-field
"""


def test_reads_header_of_debian_patch():
    fields = read_dep3(HEADER)
    assert fields["subject"] == "Reject malformed hosts\nin headers"
    assert fields["description"] == "first\n\nsecond"
    assert dep3_links(HEADER) == ["https://bugs.example.org/1", "https://example.org/commit/2"]


def test_accepts_header_in_place_of_issue():
    funnel = Funnel()
    candidates = [candidate(body=HEADER, has_header_links=True), candidate(body=HEADER)]
    assert filter_candidates(candidates, FilterConfig(), funnel) == candidates[:1]


@pytest.mark.parametrize(
    ("diff", "problem"),
    [
        (CODE + TESTS, None),
        (CODE, "no test is changed"),
        (TESTS, "no code is changed"),
        ("nothing", "diff is malformed"),
        (
            CODE + TESTS + "diff --git a/x.png b/x.png\nBinary files a/x.png and b/x.png differ\n",
            "binary hunk",
        ),
        (
            CODE.replace("+1,4", "+1,405").rstrip() + "\n" + "+x\n" * 401 + TESTS,
            "too many lines are added",
        ),
        (
            CODE + TESTS.replace("+1,3", "+1,4") + "+" + "x" * 300_001 + "\n",
            "test patch is too large",
        ),
    ],
)
def test_filters_by_size(diff, problem):
    assert patch_problem(diff, FilterConfig()) == problem


def test_rejects_config_out_of_range():
    with pytest.raises(ValueError, match="min_language_share is 60"):
        FilterConfig(min_language_share=60)
    with pytest.raises(ValueError, match="max_code_files is 0"):
        FilterConfig(max_code_files=0)


# -- statements -----------------------------------------------------------------------------------------

STATEMENT = "The function add gives wrong results: add(1, 2) gives -1, but it should give the sum."


@pytest.mark.parametrize(
    ("votes", "reason", "needs"),
    [
        ([CLEAR, CLEAR, CLEAR], None, False),
        ([CLEAR, CLEAR, VAGUE], None, False),
        ([CLEAR, UNASKED, UNASKED], None, True),
        ([UNASKED, UNASKED, UNASKED], None, True),
        ([CLEAR, VAGUE, VAGUE], "too vague", False),
        ([CLEAR, LEAKED, LEAKED], "already gives the solution", False),
        ([CLEAR, VAGUE, LEAKED], "already gives the solution", False),
    ],
)
def test_counts_votes(votes, reason, needs):
    clarity = count_votes(votes)
    assert (clarity.drop_reason or "").find(reason or "") >= 0
    assert (clarity.drop_reason is None) == (reason is None)
    assert clarity.needs_requirements == needs
    assert clarity.label == ("B2" if needs else "A")


def test_rejects_empty_votes():
    with pytest.raises(ValueError, match="there is no vote"):
        count_votes([])


def ask(function, *arguments):
    return asyncio.run(function(RuleWriter(RULES), *arguments))


def test_judges_clarity_by_rule():
    assert ask(judge_clarity, STATEMENT, TESTS, CODE).votes == (UNASKED,) * 3
    assert ask(judge_clarity, f"{STATEMENT} It has to_exact.", TESTS, CODE).votes == (CLEAR,) * 3
    assert ask(judge_clarity, "It is broken.", TESTS, CODE).votes == (VAGUE,) * 3
    leak = f"{STATEMENT}\n    total_value = compute_exact_sum(checked)\n    checked = _check_operands(a, b)"
    assert ask(judge_clarity, leak, TESTS, CODE).votes == (LEAKED,) * 3


def test_writes_requirements_by_rule():
    assert ask(write_requirements, STATEMENT, TESTS, CODE) == ("The tests use `to_exact`.",)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("add returns a value with to_exact().", None),
        ("The result checked by the tests is a sum.", None),  # a plain word of the patch
        ("Call compute_exact_sum in add.", "'compute_exact_sum' is in the gold patch only"),
        ("Store it in total_value.", "'total_value' is in the gold patch only"),
        ("Use:\n```\nx\n```", "a code block"),
        ("    return a + b", "a code block"),
    ],
)
def test_finds_requirements_that_leak(line, problem):
    leak = requirements_problem([line], STATEMENT, TESTS, CODE)
    assert (leak is None) if problem is None else leak.startswith(problem)


def test_rejects_writer_that_leaks():
    rules = {"requirements": lambda data: {"requirements": ["Call compute_exact_sum."]}}
    with pytest.raises(WriterError, match="is in the gold patch only"):
        asyncio.run(write_requirements(RuleWriter(rules), STATEMENT, TESTS, CODE))


@pytest.mark.parametrize(
    ("title", "body", "kind"),
    [
        ("Fix crash in add", "", "bug_fix"),
        ("CVE-2025-1234", "", "bug_fix"),
        ("Add support for floats", "Fixes #3", "feature"),
        ("Rename sum to plus", "", "refactor"),
        ("Version 2", "Fixes #3", None),
        ("Version 2", "Repairs a regression", "bug_fix"),
    ],
)
def test_finds_task_type_by_rule(title, body, kind):
    if kind == "refactor":
        assert task_type_by_rule(title, body, has_changed_behaviour=True) is None
    assert task_type_by_rule(title, body) == kind
    assert ask(find_task_type, title, body) == (kind or "other")
