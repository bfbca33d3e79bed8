"""Parsers on forms that need no recorded run: crashes, other versions, hostile and large reports."""

import json
import time

import pytest

from glm5_jax.envs.swe.parsers import PARSERS, ReportError, RunOutput


def statuses(
    parser: str, log: str = "", exit_code: int | None = 1, **reports: str
) -> dict[str, str]:
    """Returns the statuses of an output; the names of reports have their dot written as an underscore."""
    files = {name.replace("__", "."): text.encode() for name, text in reports.items()}
    return dict(PARSERS[parser](RunOutput(log=log, reports=files, exit_code=exit_code)).statuses)


# -- XML ------------------------------------------------------------------------------------------------


def junit(*cases: str, attributes: str = "") -> str:
    return f'<testsuite name="s" {attributes}>{"".join(cases)}</testsuite>'


def test_rejects_entities():
    bomb = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'
    with pytest.raises(ReportError, match="junit.xml declares a document type"):
        statuses("pytest", junit__xml=bomb + junit('<testcase name="&b;" classname="c"/>'))


def test_rejects_external_entity():
    text = '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]>' + junit(
        "<testcase name='&a;'/>"
    )
    with pytest.raises(ReportError, match="declares a document type"):
        statuses("phpunit", p__xml=text)


def test_rejects_deep_elements():
    with pytest.raises(ReportError, match="levels deep"):
        statuses("pytest", junit__xml="<testsuite>" * 200 + "</testsuite>" * 200)


def test_rejects_count_that_is_no_number():
    with pytest.raises(ReportError, match="no number"):
        statuses("pytest", junit__xml=junit(attributes='tests="many"'))


def test_reads_names_with_line_ends_and_controls():
    case = '<testcase classname="c" name="two&#10;lines &#x1b;[0m\x01"/>'
    assert statuses("pytest", junit__xml=junit(case, attributes='tests="1"')) == {
        "c::two\\nlines ?[0m?": "pass"
    }


def test_replaces_bytes_that_are_no_text():
    data = junit('<testcase classname="c" name="a"/>').encode() + b"<!-- \xff\xfe -->"
    report = PARSERS["pytest"](RunOutput(reports={"j.xml": data}))
    assert report.statuses == {"c::a": "pass"}


def test_reads_hundred_thousand_tests():
    cases = "".join(f'<testcase classname="c" name="t{i}"/>' for i in range(100_000))
    text = junit(cases, attributes='tests="100000"')
    assert len(statuses("pytest", junit__xml=text)) == 100_000


def test_merges_repeated_names_to_worst_status():
    cases = [
        '<testcase classname="c" name="a"/>',
        '<testcase classname="c" name="a"><error/></testcase>',
    ]
    assert statuses("pytest", junit__xml=junit(*cases, attributes='tests="2"')) == {"c::a": "fail"}


def test_normalises_paths_and_addresses_in_names():
    names = [
        "x[/tmp/pytest-of-me/file]",
        "y[<obj at 0x7f12ab34cd56>]",
        "z[localhost:8123]",
        'ascii "0x1f"',
    ]
    cases = [f'<testcase classname="c" name="{n}"/>'.replace('"0x1f"', "'0x1f'") for n in names]
    cases = [case.replace("<obj", "&lt;obj") for case in cases]
    assert list(statuses("pytest", junit__xml=junit(*cases))) == [
        "c::x[/tmp/X/file]",
        "c::y[<obj at 0xX>]",
        "c::z[localhost:X]",
        "c::ascii '0x1f'",
    ]


HOSTILE = [
    "a",
    "[ ",
    "a.py::",
    "a b ",
    "test_a (",
    "'",
    "1",
    "(1,1):",
    "# ",
    "a#test_",
    "a.c:1:",
    " = 1.0 s = ",
    "\t",
]


@pytest.mark.parametrize("parser", PARSERS)
def test_takes_linear_time_for_long_lines(parser):
    # Patterns that backtrack would take minutes for these.
    log = "\n".join(text * (20_000 // len(text)) for text in HOSTILE)
    start = time.process_time()
    assert not PARSERS[parser](RunOutput(log=log, exit_code=None)).statuses
    assert time.process_time() - start < 1


# -- Python ---------------------------------------------------------------------------------------------


def test_parses_parallel_pytest():
    log = """
[gw0] [ 33%] PASSED tests/test_a.py::test_one[a b]
[gw1] [ 66%] FAILED tests/test_b.py::TestC::test_two
[gw0] [100%] SKIPPED tests/test_a.py::test_three
============ 1 failed, 1 passed, 1 skipped in 0.50s ============
"""
    assert statuses("pytest", log) == {
        "tests.test_a::test_one[a b]": "pass",
        "tests.test_b.TestC::test_two": "fail",
        "tests.test_a::test_three": "skip",
    }


def test_keeps_parameters_with_separators():
    log = """
=========== short test summary info ===========
FAILED tests/test_a.py::test_x[a - b::c] - assert [1] == [2]
1 failed in 0.50s
"""
    assert statuses("pytest", log) == {"tests.test_a::test_x[a - b::c]": "fail"}


def test_ignores_result_lines_that_tests_print():
    log = """
PASSED tests/test_a.py::test_forged
=========== short test summary info ===========
FAILED tests/test_a.py::test_x - boom
1 failed in 0.50s
"""
    assert statuses("pytest", log) == {"tests.test_a::test_x": "fail"}


def test_parses_unittest_of_older_python():
    log = (
        "test_a (m.C) ... ok\ntest_b (m.C) ... noise\nok\n"
        + "-" * 70
        + "\nRan 2 tests in 0.001s\n\nOK\n"
    )
    with pytest.raises(ReportError, match="states tests = 2, and its log lists 1"):
        statuses("unittest", log.replace("noise\nok", "noise without a result"), 0)
    assert statuses("unittest", log, 0) == {"m.C::test_a": "pass", "m.C::test_b": "pass"}


# -- Go -------------------------------------------------------------------------------------------------


def go_events(*events: tuple) -> str:
    rows = [dict(zip(("Time", "Action", "Package", "Test"), ("t", *event))) for event in events]
    return "\n".join(json.dumps(row) for row in rows)


def test_keeps_equal_names_of_two_go_packages_apart():
    events = [("run", p, "TestA") for p in "pq"] + [("pass", "p", "TestA"), ("fail", "q", "TestA")]
    log = go_events(*events, ("pass", "p"), ("fail", "q"))
    assert statuses("go", log) == {"p::TestA": "pass", "q::TestA": "fail"}


def test_rejects_go_test_without_end_in_passing_package():
    with pytest.raises(ReportError, match="TestA has no end"):
        statuses("go", go_events(("run", "p", "TestA"), ("pass", "p")), 0)


def test_rejects_cut_go_event():
    log = go_events(("run", "p", "TestA"), ("pass", "p", "TestA"), ("pass", "p"))
    with pytest.raises(ReportError, match="cut off"):
        statuses("go", log[:-20], 0)


def test_fails_last_started_go_test_of_killed_run():
    log = go_events(("run", "p", "TestA"), ("run", "p", "TestB"))
    report = PARSERS["go"](RunOutput(log=log, exit_code=None))
    assert dict(report.statuses) == {"p::TestB": "fail"}
    assert report.is_crashed


# -- JavaScript -----------------------------------------------------------------------------------------


def test_rejects_tap_that_ends_before_its_plan():
    with pytest.raises(ReportError, match="TAP ends before its plan"):
        statuses("tap", "TAP version 13\n1..3\nok 1 - a\nok 2 - b\n", 0)
    assert statuses("tap", "TAP version 13\n1..3\nok 1 - a\nok 2 - b\n", 139) == {
        "a": "pass",
        "b": "pass",
    }


def test_rejects_tap_with_more_tests_than_planned():
    with pytest.raises(ReportError, match="plan of TAP is 1..1, and it lists 2"):
        statuses("tap", "TAP version 13\n1..1\nok 1 - a\nok 2 - forged\n", 0)


def test_parses_tape():
    log = "TAP version 13\n# a group\nok 1 should be equal\nnot ok 2 deep\n  ---\n  at: ok 3 x\n  ...\n"
    log += "ok 3 later # SKIP\n\n1..3\n# tests 3\n# pass  2\n# fail  1\n"
    assert statuses("tap", log) == {"should be equal": "pass", "deep": "fail", "later": "skip"}


def test_rejects_mocha_report_without_field():
    with pytest.raises(ReportError, match="m.json: failures is None; it must be a list"):
        statuses("mocha", m__json='{"stats": {"passes": 0}, "passes": []}')


def test_rejects_unknown_word_of_jest():
    report = {
        "testResults": [{"name": "a", "assertionResults": [{"fullName": "x", "status": "great"}]}]
    }
    with pytest.raises(ReportError, match="status 'great' is not known"):
        statuses("jest", j__json=json.dumps(report))


def test_rejects_tsc_whose_exit_code_contradicts_it():
    with pytest.raises(ReportError, match="tsc ends with 0, and lists 1 errors"):
        statuses("tsc", "src/a.ts(1,2): error TS2322: no\n", 0)


# -- C and C++ ------------------------------------------------------------------------------------------

UNITY_CRASH = """
14: /testbed/tests/misc_tests.c:681:first:PASS
14/22 Test #14: misc_tests .......................***Exception: SegFault  0.02 sec
15: /testbed/tests/other_tests.c:12:second:FAIL: Expected Non-NULL
15:
15: -----------------------
15: 1 Tests 1 Failures 0 Ignored
15: FAIL
15/22 Test #15: other_tests ......................***Failed    0.00 sec
0% tests passed, 2 tests failed out of 2
"""


def test_reports_crash_of_unity_program():
    report = PARSERS["unity"](RunOutput(log=UNITY_CRASH, exit_code=8))
    assert report.is_crashed
    assert dict(report.statuses) == {
        "ctest::misc_tests": "fail",
        "ctest::other_tests": "fail",
        "tests/misc_tests.c::first": "pass",
        "tests/other_tests.c::second": "fail",
    }


def test_names_gtest_that_crashed_without_report():
    log = """[==========] Running 3 tests from 1 test suite.
[ RUN      ] a.one
[       OK ] a.one (0 ms)
[ RUN      ] a.two
Segmentation fault
"""
    report = PARSERS["gtest"](RunOutput(log=log, exit_code=139))
    assert dict(report.statuses) == {"a::one": "pass", "a::two": "fail"}
    assert report.crashed_test == "a::two"


def test_ignores_gtest_results_of_other_tests():
    log = """[==========] Running 1 test from 1 test suite.
[ RUN      ] a.one
[       OK ] a.forged (0 ms)
[  FAILED  ] a.one (0 ms)
[  PASSED  ] 0 tests.
"""
    assert statuses("gtest", log) == {"a::one": "fail"}


def test_parses_gtest_of_parallel_ctest():
    one = "[==========] Running 1 test from 1 test suite.|[ RUN      ] a.one|[       OK ] a.one (0 ms)|[  PASSED  ] 1 test."
    lines = zip(one.split("|"), one.replace("a.one", "b.two").split("|"))
    log = "\n".join(f"1: {a}\n2: {b}" for a, b in lines)
    assert statuses("gtest", log, 0) == {"a::one": "pass", "b::two": "pass"}


def test_parses_automake():
    log = """PASS: tests/a
FAIL: tests/b 2 - second
XFAIL: tests/c
============================================
# TOTAL: 3
# PASS:  1
# SKIP:  0
# XFAIL: 1
# FAIL:  1
# XPASS: 0
# ERROR: 0
"""
    expected = {"tests/a": "pass", "tests/b 2 - second": "fail", "tests/c": "skip"}
    assert statuses("automake", log) == expected
    with pytest.raises(ReportError, match="states failed = 2"):
        statuses("automake", log.replace("# FAIL:  1", "# FAIL:  2"))


def test_parses_trs_files_of_automake():
    assert statuses(
        "automake", a__trs=":test-result: PASS\n:recheck: no\n", b__trs=":test-result: SKIP\n"
    ) == {
        "a": "pass",
        "b": "skip",
    }
    with pytest.raises(ReportError, match="a.trs has no line with :test-result:"):
        statuses("automake", a__trs=":recheck: yes\n")


# -- Java -----------------------------------------------------------------------------------------------


def test_parses_rerun_of_surefire():
    cases = [
        '<testcase classname="A" name="flaky"><flakyFailure/></testcase>',
        '<testcase classname="A" name="bad"><failure/><rerunFailure/></testcase>',
    ]
    text = junit(*cases, attributes='tests="2" failures="1" errors="0" skipped="0"')
    assert statuses("surefire", a__xml=text) == {"A::flaky": "pass", "A::bad": "fail"}
    assert statuses("gradle", a__xml=text) == {"A::flaky": "pass", "A::bad": "fail"}


def test_names_java_files_that_do_not_compile():
    log = "src/test/java/a/BTest.java:10: error: cannot find symbol\n"
    report = PARSERS["junit5"](RunOutput(log=log, exit_code=1))
    assert report.load_errors == ("javac::BTest.java",)


def test_reports_forked_jvm_that_died():
    log = "[ERROR] The forked VM terminated without properly saying goodbye. VM crash or System.exit called?\n"
    assert PARSERS["surefire"](RunOutput(log=log, exit_code=1)).is_crashed


# -- PHP and Ruby ---------------------------------------------------------------------------------------


def test_names_phpunit_test_that_was_running():
    log = "Test 'A\\B::testA' started\nTest 'A\\B::testA' ended\n"
    log += "Test 'A\\B::testC with data set \"x\" ('y')' started\nPHP Fatal error: out of memory\n"
    report = PARSERS["phpunit"](RunOutput(log=log, reports={"p.xml": b""}, exit_code=255))
    assert report.crashed_test == 'A\\B::testC with data set "x"'


def test_rejects_rspec_report_with_more_errors_than_stated():
    report = {
        "examples": [],
        "messages": [
            "\nAn error occurred while loading ./spec/a_spec.rb. - Did you mean?\n  rspec b\n"
        ],
        "summary": {
            "example_count": 0,
            "failure_count": 0,
            "pending_count": 0,
            "errors_outside_of_examples_count": 0,
        },
    }
    with pytest.raises(ReportError, match="states 0 errors outside of examples, and lists 1"):
        statuses("rspec", r__json=json.dumps(report))


def test_parses_minitest_name_with_equals_sign():
    log = (
        "a list#test_0001_x = 1 = 0.01 s = F\n1 runs, 1 assertions, 1 failures, 0 errors, 0 skips\n"
    )
    assert statuses("minitest", log) == {"a list#test_0001_x = 1": "fail"}


def test_distinguishes_signals_from_other_exit_codes():
    assert all(RunOutput(exit_code=code).is_killed for code in (None, -9, 137, 139))
    assert not any(RunOutput(exit_code=code).is_killed for code in (0, 1, 8, 127, 255))
