"""Projects of the test runners of Python."""

from tests.envs.swe.runners.project import FAIL, PASS, SKIP, Project, make_project

PYTEST = "python3 -m pytest -p no:cacheprovider -o addopts= --junitxml=$OUT/junit.xml"
PY_MIXED = """
import pytest, unittest

def test_passes():
    print("FAILED tests/test_mixed.py::test_passes - not really")

def test_fails():
    assert 1 == 2, "a - b"

@pytest.fixture
def broken():
    raise RuntimeError("no set-up")

@pytest.fixture
def untidy():
    yield
    raise RuntimeError("no tear-down")

def test_errors(broken):
    pass

def test_tears_down(untidy):
    pass

def test_fails_twice(untidy):
    assert False

@pytest.mark.skip(reason="later")
def test_skipped():
    pass

@pytest.mark.xfail
def test_expected_failure():
    assert False

@pytest.mark.parametrize("word", ["a b", "x::y", "p - q", "grün", "two\\nlines", "[in]"])
def test_words(word):
    assert word != "x::y"

class TestGroup:
    def test_inside(self):
        pass

class OldStyle(unittest.TestCase):
    def test_old(self):
        self.assertEqual(1, 1)
"""
PY_EXPECTED = {
    "tests.test_mixed::test_passes": PASS,
    "tests.test_mixed::test_fails": FAIL,
    "tests.test_mixed::test_errors": FAIL,
    "tests.test_mixed::test_tears_down": FAIL,
    "tests.test_mixed::test_fails_twice": FAIL,
    "tests.test_mixed::test_skipped": SKIP,
    "tests.test_mixed::test_expected_failure": SKIP,
    "tests.test_mixed::test_words[a b]": PASS,
    "tests.test_mixed::test_words[x::y]": FAIL,
    "tests.test_mixed::test_words[p - q]": PASS,
    "tests.test_mixed::test_words[gr\\xfcn]": PASS,
    "tests.test_mixed::test_words[two\\nlines]": PASS,
    "tests.test_mixed::test_words[[in]]": PASS,
    "tests.test_mixed.TestGroup::test_inside": PASS,
    "tests.test_mixed.OldStyle::test_old": PASS,
}
PY_ALL_PASS = {"tests/test_ok.py": "def test_a():\n    pass\n\ndef test_b():\n    pass\n"}
PY_CRASH = {
    "tests/test_crash.py": "import os, signal\n\ndef test_a():\n    pass\n\ndef test_b():\n"
    "    os.kill(os.getpid(), signal.SIGSEGV)\n\ndef test_c():\n    pass\n"
}
PY_UNITTEST = '''
import unittest

class Mixed(unittest.TestCase):
    def test_passes(self):
        print("noise without end", end="")

    def test_fails(self):
        """Fails, and says so.

        More."""
        self.assertEqual(1, 2)

    def test_errors(self):
        raise RuntimeError("x")

    @unittest.skip("later")
    def test_skipped(self):
        pass

    @unittest.expectedFailure
    def test_expected(self):
        self.fail()

    @unittest.expectedFailure
    def test_unexpected(self):
        pass

    def test_loop(self):
        for i in range(3):
            with self.subTest(i=i):
                self.assertNotEqual(i, 1)

class Broken(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise RuntimeError("no")

    def test_never(self):
        pass
'''
PY_UNITTEST_CRASH = """
import os, signal, unittest

class Crash(unittest.TestCase):
    def test_a(self):
        pass

    def test_b(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def test_c(self):
        pass
"""
_CRASHED = {"tests.test_crash::test_a": PASS, "tests.test_crash::test_b": FAIL}
PROJECTS: dict[str, Project] = {
    "pytest": make_project(
        "pytest", {"tests/test_mixed.py": PY_MIXED}, f"{PYTEST} -q tests", PY_EXPECTED
    ),
    "pytest-all-pass": make_project(
        "pytest",
        PY_ALL_PASS,
        f"{PYTEST} -q tests",
        {"tests.test_ok::test_a": PASS, "tests.test_ok::test_b": PASS},
    ),
    "pytest-verbose": make_project(
        "pytest",
        {"tests/test_mixed.py": PY_MIXED},
        "python3 -m pytest -p no:cacheprovider -v tests",
        PY_EXPECTED,
    ),
    "pytest-summary": make_project(
        "pytest",
        {"tests/test_mixed.py": PY_MIXED},
        "python3 -m pytest -p no:cacheprovider -q -rA tests",
        {name: status for name, status in PY_EXPECTED.items() if not name.endswith("test_skipped")},
    ),
    "pytest-collect": make_project(
        "pytest",
        {"tests/test_bad.py": "import nothing_of_this_name\n", **PY_ALL_PASS},
        f"{PYTEST} -q tests",
        {"tests.test_bad": FAIL},
        load_errors=("tests.test_bad",),
    ),
    "pytest-none": make_project(
        "pytest", {"tests/test_none.py": "x = 1\n"}, f"{PYTEST} -q tests", {}
    ),
    "pytest-crash": make_project(
        "pytest", PY_CRASH, f"{PYTEST} -v tests", _CRASHED, is_crashed=True
    ),
    "unittest": make_project(
        "unittest",
        {"test_mixed.py": PY_UNITTEST},
        "python3 -m unittest -v",
        {
            "test_mixed.Mixed::test_passes": PASS,
            "test_mixed.Mixed::test_fails": FAIL,
            "test_mixed.Mixed::test_errors": FAIL,
            "test_mixed.Mixed::test_skipped": SKIP,
            "test_mixed.Mixed::test_expected": SKIP,
            "test_mixed.Mixed::test_unexpected": FAIL,
            "test_mixed.Mixed::test_loop": FAIL,
            "setUpClass (test_mixed.Broken)": FAIL,
        },
        load_errors=("setUpClass (test_mixed.Broken)",),
    ),
    "unittest-crash": make_project(
        "unittest",
        {"test_crash.py": PY_UNITTEST_CRASH},
        "python3 -m unittest -v",
        {"test_crash.Crash::test_a": PASS, "test_crash.Crash::test_b": FAIL},
        is_crashed=True,
    ),
    "unittest-none": make_project("unittest", {"x.py": ""}, "python3 -m unittest -v", {}),
}
