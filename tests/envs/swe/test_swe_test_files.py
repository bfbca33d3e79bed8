"""The files of tests, by the identifiers that each runner gives them."""

import pytest

from glm5_jax.envs.swe.file_tree import text_file
from glm5_jax.envs.swe.test_files import find_test_files

TREE = {
    "tests/test_calc.py": text_file("class A:\n    def test_add(self): pass\n"),
    "spec/a/mash_spec.rb": text_file("it('is a mash') {}\n"),
    "tests/UriTest.php": text_file("class UriTest { function testHost() {} }\n"),
    "src/test/java/org/x/RangeTest.java": text_file("public void contains() {}\n"),
    "pkg/mux_test.go": text_file("func TestRoute(t *testing.T) {}\n"),
    "test/name-test.js": text_file("describe('tmp', () => { it('has a name', f); });\n"),
    "src/a/codec.test.ts": text_file("test('round trip', () => {});\n"),
    "tests/parse_tests.c": text_file("RUN_TEST(parse_number);\n"),
    "tests/gsl/span_tests.cpp": text_file("TEST(span_test, first_view) {}\n"),
    "lib/calc.py": text_file("def test_add(): pass\n"),
}


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("tests.test_calc.A::test_add", "tests/test_calc.py"),
        ("spec/a/mash_spec.rb::Mash is a mash", "spec/a/mash_spec.rb"),
        ("X\\Tests\\UriTest::testHost", "tests/UriTest.php"),
        ("org.x.RangeTest::contains()", "src/test/java/org/x/RangeTest.java"),
        ("github.com/x/mux::TestRoute/with_host", "pkg/mux_test.go"),
        ("tmp sync has a name", "test/name-test.js"),
        ("src/a/codec.test.ts::round trip", "src/a/codec.test.ts"),
        ("parse_tests.c::parse_number", "tests/parse_tests.c"),
        ("span_test::first_view", "tests/gsl/span_tests.cpp"),
    ],
)
def test_finds_file_of_test(name, path):
    assert find_test_files(TREE, [name]) == [path]


def test_leaves_out_test_without_file():
    assert find_test_files(TREE, ["nothing::like_this"]) == []
