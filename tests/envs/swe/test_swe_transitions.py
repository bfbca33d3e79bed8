"""Classes of tests from three arms, and the validity of instances. The counts are those of real bug fixes."""

import random

import pytest

from glm5_jax.envs.swe.parsers import PARSERS, RunOutput, RunReport
from glm5_jax.envs.swe.resolution import resolve
from glm5_jax.envs.swe.transitions import Arms, attribute_crash, classify, has_load_failure


def report(*names: str, fail=(), skip=(), **more) -> RunReport:
    """Returns a report of passing tests, and of others."""
    statuses = (
        dict.fromkeys(names, "pass") | dict.fromkeys(fail, "fail") | dict.fromkeys(skip, "skip")
    )
    return RunReport(statuses=statuses, **more)


def arms_of(*groups: tuple[int, str, str, str], **more) -> Arms:
    """Returns arms from (number of tests, status in base, test and gold)."""
    runs: list[dict] = [{}, {}, {}]
    for i, (count, *statuses) in enumerate(groups):
        for run, status in zip(runs, statuses):
            if status != "none":
                run |= {f"suite::group{i}_{n}": status for n in range(count)}
    base, test, gold = (RunReport(statuses=run) for run in runs)
    return Arms(base=base, test=test, gold=[gold] * 3, **more)


# Number of tests by class, for fixes whose three arms were counted.
REAL_FIXES = {
    "cJSON": (
        [(25, "pass", "none", "pass"), (1, "pass", "fail", "pass"), (150, "pass", "pass", "pass")],
        {"F2P": 1, "LOST": 25, "P2P": 150},
        None,
    ),
    "GSL": (
        [
            (104, "pass", "none", "pass"),
            (1, "pass", "fail", "pass"),
            (1, "none", "none", "pass"),
            (1, "pass", "pass", "pass"),
        ],
        {"F2P": 1, "N2P": 1, "LOST": 104, "P2P": 1},
        None,
    ),
    "jackson-core": (
        [
            (592, "pass", "none", "pass"),
            (15, "none", "none", "pass"),
            (10, "pass", "none", "fail"),
            (9, "pass", "none", "none"),
        ],
        {"N2P": 15, "LOST": 592, "P2F": 10},
        "the gold patch breaks 10 tests, such as ",
    ),
    "node-tmp": (
        [(10, "none", "none", "pass"), (2, "none", "fail", "none"), (313, "pass", "pass", "pass")],
        {"N2P": 10, "P2P": 313},
        "all tests that the gold patch fixes are new",
    ),
    "pyasn1": (
        [
            (9, "none", "fail", "pass"),
            (4, "none", "pass", "pass"),
            (1147, "pass", "pass", "pass"),
        ],
        {"F2P": 9, "P2P": 1151},
        None,
    ),
    "tests that fail everywhere": (
        [(15, "fail", "fail", "fail"), (2, "none", "fail", "pass"), (100, "pass", "pass", "pass")],
        {"F2P": 2, "P2P": 100},
        None,
    ),
    "passes without the fix": (
        [(3, "none", "pass", "pass"), (339, "pass", "pass", "pass")],
        {"P2P": 342},
        "no test goes from fail to pass",
    ),
    "no environment": ([(5, "none", "none", "pass")], {"N2P": 5}, "the base arm has no result"),
}


@pytest.mark.parametrize("name", REAL_FIXES)
def test_counts_classes_of_real_fix(name):
    groups, counts, reason = REAL_FIXES[name]
    result = classify(arms_of(*groups))
    classes = list(result.classes.values())
    assert {kind: classes.count(kind) for kind in dict.fromkeys(classes)} == counts
    assert (result.invalid_reason or "").startswith(reason or "")
    assert (result.invalid_reason is None) == (reason is None)
    assert result.counts == {tuple(statuses): count for count, *statuses in groups}


def test_accepts_new_tests_if_test_arm_shows_error():
    groups = [(10, "none", "none", "pass"), (313, "pass", "pass", "pass")]
    assert classify(arms_of(*groups)).invalid_reason
    for log in (
        "a.ts(1,2): error TS2554: x",
        "ImportError: cannot import name",
        "# x [build failed]",
    ):
        assert classify(arms_of(*groups, test_log=log)).invalid_reason is None, log
    assert classify(arms_of(*groups, test_log="1 warning")).invalid_reason


def test_accepts_type_level_fix_by_pseudo_test_of_tsc():
    files = "/testbed/src/a.test.ts\n/testbed/src/b.test.ts\n"
    error = "src/a.test.ts(143,3): error TS2769: No overload matches this call.\n"
    base, test, gold = (
        PARSERS["tsc"](RunOutput(log=log, exit_code=code))
        for log, code in ((files, 0), (error + files, 2), (files, 0))
    )
    result = classify(Arms(base=base, test=test, gold=[gold] * 3))
    assert result.fail_to_pass == ["tsc::src/a.test.ts"]
    assert result.pass_to_pass == ["tsc::src/b.test.ts"]
    assert result.invalid_reason is None


def test_puts_new_and_lost_tests_into_lists_of_instance():
    result = classify(arms_of(*REAL_FIXES["GSL"][0]))
    assert len(result.fail_to_pass) == 2
    assert len(result.pass_to_pass) == 105
    assert set(result.tests("N2P")) < set(result.fail_to_pass)
    assert set(result.tests("LOST")) < set(result.pass_to_pass)


def test_counts_test_that_fails_in_base_and_vanishes_as_new():
    result = classify(
        arms_of((1, "fail", "none", "pass"), (9, "pass", "pass", "pass"), test_log="SegFault")
    )
    assert result.fail_to_pass == ["suite::group0_0"]
    assert result.invalid_reason is None


# -- gold runs ------------------------------------------------------------------------------------------


def test_drops_tests_on_which_gold_runs_disagree():
    names = [f"t{i}" for i in range(100)]
    gold = [report(*names, "new"), report(*names[1:], "new", fail=["t0"]), report(*names, "new")]
    arms = Arms(base=report(*names), test=report(*names, fail=["new"]), gold=gold)
    result = classify(arms)
    assert result.tests("FLAKY") == ["t0"]
    assert result.invalid_reason is None
    assert "t0" not in result.pass_to_pass


def test_rejects_instance_whose_only_fixed_test_is_flaky():
    names = [f"t{i}" for i in range(100)]
    gold = [report(*names, "new"), report(*names, fail=["new"])]
    arms = Arms(base=report(*names), test=report(*names, fail=["new"]), gold=gold)
    assert classify(arms).invalid_reason == "the only tests that the gold patch may fix are flaky"


def test_rejects_instance_with_many_flaky_tests():
    names = [f"t{i}" for i in range(20)]
    gold = [report(*names, "new"), report(*names[2:], "new", fail=names[:2])]
    arms = Arms(base=report(*names), test=report(*names, fail=["new"]), gold=gold)
    assert classify(arms).invalid_reason == "2 of 21 tests are flaky, such as t0"
    assert classify(arms, max_flaky_share=0.1).invalid_reason is None


def test_finds_test_that_fails_in_shuffled_run_only():
    rng, names = random.Random(0), [f"t{i}" for i in range(50)]

    def run(order) -> RunReport:
        # t7 passes only if t3 ran before it.
        fail = [] if order.index("t3") < order.index("t7") else ["t7"]
        return report(*[n for n in order if n not in fail], "new", fail=fail)

    orders = [names, names, names]
    while orders[-1].index("t3") < orders[-1].index("t7"):
        orders.append(rng.sample(names, len(names)))
    arms = Arms(base=report(*names), test=report(*names, fail=["new"]), gold=list(map(run, orders)))
    assert classify(arms).tests("FLAKY") == ["t7"]


def test_attempt_may_skip_test_that_gold_runs_skip():
    gold = [report("a", "b", "new"), report("b", "new", skip=["a"])]
    result = classify(Arms(base=report("a", "b"), test=report("a", "b", fail=["new"]), gold=gold))
    assert result.may_skip == {"a"}
    skipped = report("b", "new", skip=["a"])
    assert resolve(result.fail_to_pass, result.pass_to_pass, skipped, result.may_skip).is_resolved
    assert not resolve(result.fail_to_pass, result.pass_to_pass, skipped).is_resolved


def test_rejects_arms_without_gold_run():
    with pytest.raises(ValueError, match="there is no gold run"):
        classify(Arms(base=report("a"), test=report("a"), gold=[]))


def test_rejects_gold_run_without_result():
    arms = Arms(base=report("a"), test=report("a", fail=["n"]), gold=[report("a", "n"), report()])
    assert classify(arms).invalid_reason == "a gold run has no result"


# -- crashes --------------------------------------------------------------------------------------------


def test_names_first_test_without_result_as_crash_site():
    order = [f"a.c::t{i}" for i in range(4)] + [f"b.c::t{i}" for i in range(4)]
    crashed = report("ctest::b", *order[:6], is_crashed=True)
    assert attribute_crash(crashed, order)["b.c::t2"] == "fail"
    assert "b.c::t3" not in attribute_crash(crashed, order)
    assert attribute_crash(report(*order[:6]), order) == dict.fromkeys(order[:6], "pass")


def test_keeps_crash_site_that_runner_named():
    crashed = report("a::t0", fail=["a::t2"], is_crashed=True, crashed_test="a::t2")
    assert attribute_crash(crashed, ["a::t0", "a::t1", "a::t2"]) == {
        "a::t0": "pass",
        "a::t2": "fail",
    }


def test_counts_crash_of_unity_program_as_one_failure():
    tests = [f"tests/misc.c::t{i}" for i in range(30)]
    base = report("ctest::misc", *tests)
    test = report(*tests[:5], fail=["ctest::misc"], is_crashed=True)
    result = classify(Arms(base=base, test=test, gold=[base] * 3))
    assert result.tests("F2P") == ["ctest::misc", "tests/misc.c::t5"]
    assert len(result.tests("LOST")) == 24
    assert result.invalid_reason is None


def test_counts_crash_of_gtest_binary_as_one_failure():
    names = [f"s.t{i}" for i in range(10)]
    lines = "".join(f"[ RUN      ] {n}\n[       OK ] {n} (0 ms)\n" for n in names[:4])
    log = f"[==========] Running 10 tests from 1 test suite.\n{lines}[ RUN      ] {names[4]}\n"
    test = PARSERS["gtest"](RunOutput(log=log, exit_code=139))
    full = report(*[name.replace(".", "::") for name in names])
    result = classify(Arms(base=full, test=test, gold=[full] * 3))
    assert result.tests("F2P") == ["s::t4"]
    assert len(result.tests("LOST")) == 5
    assert len(result.tests("P2P")) == 4


def test_finds_load_failures():
    assert has_load_failure(report("a", load_errors=("hook",)), "")
    assert has_load_failure(report("a", is_crashed=True), "")
    assert not has_load_failure(report("a"), "2 errors in my notes")


# -- resolution -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statuses", "status", "credit"),
    [
        ({"f1": "pass", "f2": "pass", "p": "pass"}, "RESOLVED_FULL", 1.0),
        ({"f1": "pass", "f2": "fail", "p": "pass"}, "RESOLVED_PARTIAL", 0.75),
        ({"f1": "pass", "f2": "skip", "p": "pass"}, "RESOLVED_PARTIAL", 0.75),
        ({"f1": "pass", "p": "pass"}, "RESOLVED_PARTIAL", 0.75),
        ({"f1": "pass", "f2": "pass", "p": "fail"}, "RESOLVED_NO", 0.5),
        ({"f1": "pass", "f2": "pass"}, "RESOLVED_NO", 0.5),
        ({"f1": "pass", "f2": "pass", "p": "skip"}, "RESOLVED_NO", 0.5),
        ({"f1": "fail", "f2": "fail", "p": "pass"}, "RESOLVED_NO", 0.5),
        ({}, "RESOLVED_NO", 0.0),
    ],
)
def test_resolves_by_rule_of_swe_bench(statuses, status, credit):
    result = resolve(["f1", "f2"], ["p"], statuses)
    assert (result.status, result.partial_credit) == (status, credit)
    assert result.is_resolved == (status == "RESOLVED_FULL")


def test_rejects_resolution_without_fail_to_pass():
    with pytest.raises(ValueError, match="FAIL_TO_PASS is empty"):
        resolve([], ["p"], {"p": "pass"})
