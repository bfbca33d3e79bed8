"""Projects of the test runners of C and C++."""

from tests.envs.swe.runners.project import FAIL, PASS, SKIP, Project, make_project

GTEST_TEST = """
#include <gtest/gtest.h>
#include <cstdlib>
#include <cstdio>
TEST(list, passes) { printf("[       OK ] list.forged (0 ms)"); }
TEST(list, fails) { EXPECT_EQ(1, 2); }
TEST(list, skipped) { GTEST_SKIP() << "later"; }
TEST(list, DISABLED_off) { FAIL(); }
class Words : public testing::TestWithParam<int> {};
TEST_P(Words, below) { EXPECT_LT(GetParam(), 2); }
INSTANTIATE_TEST_SUITE_P(some, Words, testing::Values(1, 2));
TEST(other, runs) { if (getenv("CRASH")) abort(); }
"""
GTEST_EXPECTED = {
    "list::passes": PASS,
    "list::fails": FAIL,
    "list::skipped": SKIP,
    "list::DISABLED_off": SKIP,
    "some/Words::below/0": PASS,
    "some/Words::below/1": FAIL,
    "other::runs": PASS,
}
GTEST_BUILD = "g++ -O0 t.cpp -lgtest -lgtest_main -lpthread -o t && "
CTEST_FILES = {
    "CMakeLists.txt": """cmake_minimum_required(VERSION 3.20)
project(small C)
enable_testing()
add_executable(unity_like unity_like.c)
add_test(NAME unity_like COMMAND unity_like)
add_test(NAME crashes COMMAND unity_like crash)
add_test(NAME passes COMMAND unity_like ok)
add_test(NAME absent COMMAND not_there)
add_test(NAME skips COMMAND unity_like skip)
set_tests_properties(skips PROPERTIES SKIP_RETURN_CODE 77)
add_test(NAME off COMMAND unity_like ok)
set_tests_properties(off PROPERTIES DISABLED TRUE)
""",
    "unity_like.c": """#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(int n, char **v) {
  if (n > 1 && !strcmp(v[1], "skip")) return 77;
  if (n > 1 && !strcmp(v[1], "ok")) { puts("fine"); return 0; }
  if (n > 1) { puts("/testbed/tests/crash_tests.c:5:first_works:PASS"); fflush(stdout); abort(); }
  puts("/testbed/tests/list_tests.c:12:adds_an_item:PASS");
  puts("/testbed/tests/list_tests.c:15:removes_an_item:FAIL: Expected 1 Was 2");
  puts("/testbed/tests/list_tests.c:19:sorts:IGNORE: later");
  puts("\\n-----------------------\\n3 Tests 1 Failures 1 Ignored \\nFAIL");
  return 1;
}
""",
}
CTEST_EXPECTED = {
    "ctest::unity_like": FAIL,
    "ctest::crashes": FAIL,
    "ctest::passes": PASS,
    "ctest::absent": FAIL,
    "ctest::skips": SKIP,
    "ctest::off": SKIP,
}
UNITY_EXPECTED = {
    **CTEST_EXPECTED,
    "tests/crash_tests.c::first_works": PASS,
    "tests/list_tests.c::adds_an_item": PASS,
    "tests/list_tests.c::removes_an_item": FAIL,
    "tests/list_tests.c::sorts": SKIP,
}
CTEST = (
    "cmake -S . -B build > /dev/null && cmake --build build > /dev/null && cd build && "
    "ctest -V --timeout 60 --output-junit $OUT/ctest.xml"
)
CHECK_TEST = """#include <check.h>
START_TEST(passes) {} END_TEST
START_TEST(fails) { ck_assert_int_eq(1, 2); } END_TEST
START_TEST(crashes) { *(volatile int *)0 = 1; } END_TEST
START_TEST(loops) { ck_assert_int_lt(_i, 1); } END_TEST
int main(void) {
  Suite *s = suite_create("list");
  TCase *c = tcase_create("core");
  tcase_add_test(c, passes);
  tcase_add_test(c, fails);
  tcase_add_test(c, crashes);
  tcase_add_loop_test(c, loops, 0, 2);
  suite_add_tcase(s, c);
  SRunner *r = srunner_create(s);
  srunner_run_all(r, CK_NORMAL);
  int failed = srunner_ntests_failed(r);
  srunner_free(r);
  return failed != 0;
}
"""
CMOCKA_TEST = """#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
static void passes(void **s) { (void)s; }
static void fails(void **s) { (void)s; assert_int_equal(1, 2); }
static void skipped(void **s) { (void)s; skip(); }
int main(void) {
  const struct CMUnitTest list[] = {cmocka_unit_test(passes), cmocka_unit_test(fails), cmocka_unit_test(skipped)};
  return cmocka_run_group_tests(list, NULL, NULL);
}
"""
DOCTEST_TEST = """#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
TEST_CASE("passes grün") { CHECK(1 == 1); CHECK(2 == 2); }
TEST_CASE("fails") { SUBCASE("a") { CHECK(1 == 2); } SUBCASE("b") { CHECK(1 == 3); } }
TEST_CASE("throws") { throw 1; }
TEST_CASE("skipped" * doctest::skip()) { CHECK(false); }
"""
CATCH2_TEST = """#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
TEST_CASE("passes grün") { CHECK(1 == 1); CHECK(2 == 2); }
TEST_CASE("fails") { SECTION("a") { CHECK(1 == 2); } SECTION("b") { CHECK(1 == 1); } }
TEST_CASE("throws") { throw 1; }
"""
PROJECTS: dict[str, Project] = {
    "gtest": make_project(
        "gtest",
        {"t.cpp": GTEST_TEST},
        f"{GTEST_BUILD}./t --gtest_output=xml:$OUT/t.xml",
        GTEST_EXPECTED,
    ),
    "gtest-json": make_project(
        "gtest",
        {"t.cpp": GTEST_TEST},
        f"{GTEST_BUILD}./t --gtest_output=json:$OUT/t.json",
        GTEST_EXPECTED,
    ),
    "gtest-text": make_project(
        "gtest",
        {"t.cpp": GTEST_TEST},
        f"{GTEST_BUILD}./t",
        {name: status for name, status in GTEST_EXPECTED.items() if "DISABLED" not in name},
    ),
    "gtest-crash": make_project(
        "gtest",
        {"t.cpp": GTEST_TEST},
        f"{GTEST_BUILD}CRASH=1 ./t --gtest_output=xml:$OUT/t.xml",
        {
            "list::passes": PASS,
            "list::fails": FAIL,
            "list::skipped": SKIP,
            "other::runs": FAIL,
        },
        is_crashed=True,
    ),
    "ctest": make_project("ctest", CTEST_FILES, CTEST, CTEST_EXPECTED),
    "unity": make_project("unity", CTEST_FILES, CTEST, UNITY_EXPECTED, is_crashed=True),
    "check": make_project(
        "check",
        {"t.c": CHECK_TEST},
        "gcc t.c -lcheck -lsubunit -lrt -lm -lpthread -o t && CK_XML_LOG_FILE_NAME=$OUT/check.xml ./t",
        {
            "list::passes": PASS,
            "list::fails": FAIL,
            "list::crashes": FAIL,
            "list::loops": PASS,
            "list::loops[1]": FAIL,
        },
    ),
    "cmocka": make_project(
        "cmocka",
        {"t.c": CMOCKA_TEST},
        "gcc t.c -lcmocka -o t && CMOCKA_MESSAGE_OUTPUT=XML CMOCKA_XML_FILE=$OUT/cmocka.xml ./t",
        {"list::passes": PASS, "list::fails": FAIL, "list::skipped": SKIP},
    ),
    "doctest": make_project(
        "doctest",
        {"t.cpp": DOCTEST_TEST},
        "g++ -O0 t.cpp -o t && ./t -r=junit -o=$OUT/doctest.xml",
        {
            "t.cpp::passes grün": PASS,
            "t.cpp::fails/a": FAIL,
            "t.cpp::fails/b": FAIL,
            "t.cpp::throws": FAIL,
        },
    ),
    "catch2": make_project(
        "catch2",
        {"t.cpp": CATCH2_TEST},
        "g++ -O0 t.cpp -o t && ./t -r junit -o $OUT/catch2.xml",
        {"t::passes grün": PASS, "t::fails/a": FAIL, "t::fails/b": PASS, "t::throws": FAIL},
    ),
    "gtest-none": make_project(
        "gtest",
        {
            "t.cpp": "#include <gtest/gtest.h>\n"
            "int main(int n, char **v) { testing::InitGoogleTest(&n, v); return RUN_ALL_TESTS(); }\n"
        },
        f"{GTEST_BUILD}./t --gtest_output=xml:$OUT/t.xml",
        {},
    ),
}
