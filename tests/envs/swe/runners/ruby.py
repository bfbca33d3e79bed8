"""Projects of the test runners of Ruby."""

from tests.envs.swe.runners.project import FAIL, PASS, SKIP, Project, make_project

RSPEC_FILE = """
RSpec.describe "list" do
  it("passes") { puts "1 example, 9 failures" }
  it("fails") { expect(1).to eq 2 }
  it("errors") { raise "x" }
  xit("is skipped") { }
  it "is pending" do
    pending "later"
    expect(1).to eq 2
  end
  context("grün") { it("works \\n twice") { } ; it("works \\n twice") { raise "again" } }
end
"""
RSPEC_EXPECTED = {
    "spec/list_spec.rb::list passes": PASS,
    "spec/list_spec.rb::list fails": FAIL,
    "spec/list_spec.rb::list errors": FAIL,
    "spec/list_spec.rb::list is skipped": SKIP,
    "spec/list_spec.rb::list is pending": SKIP,
    "spec/list_spec.rb::list grün works \\n twice": FAIL,
}
RSPEC = "rspec --format json --out $OUT/rspec.json --pattern 'spec/**/*_spec.rb'"
MINITEST = """
require "minitest/autorun"
class TestList < Minitest::Test
  def test_passes; puts "F"; assert true; end
  def test_fails; assert_equal 1, 2; end
  def test_errors; raise "x"; end
  def test_skipped; skip "later"; end
end
describe "a list" do
  it("does grün = 1") { _(1).must_equal 1 }
end
"""
MINITEST_EXPECTED = {
    "TestList#test_passes": PASS,
    "TestList#test_fails": FAIL,
    "TestList#test_errors": FAIL,
    "TestList#test_skipped": SKIP,
    "a list#test_0001_does grün = 1": PASS,
}
MINITEST_CRASH = """
require "minitest/autorun"
class TestCrash < Minitest::Test
  i_suck_and_my_tests_are_order_dependent!
  def test_a; assert true; end
  def test_b; Process.kill("KILL", Process.pid); sleep 5; end
  def test_c; assert true; end
end
"""
TEST_UNIT = """
require "test/unit"
class TestList < Test::Unit::TestCase
  def test_passes; puts "noise"; assert true; end
  def test_fails; assert_equal 1, 2; end
  def test_errors; raise "x"; end
  def test_omitted; omit "later"; end
  def test_pending; pend "later"; end
  test("grün words") { assert true }
  sub_test_case("inner") { test("deep") { assert true } }
end
"""
TEST_UNIT_EXPECTED = {
    "TestList#test_passes": PASS,
    "TestList#test_fails": FAIL,
    "TestList#test_errors": FAIL,
    "TestList#test_omitted": SKIP,
    "TestList#test_pending": SKIP,
    "TestList#test: grün words": PASS,
    "TestList::inner#test: deep": PASS,
}
PROJECTS: dict[str, Project] = {
    "rspec": make_project("rspec", {"spec/list_spec.rb": RSPEC_FILE}, RSPEC, RSPEC_EXPECTED),
    "rspec-outside": make_project(
        "rspec",
        {"spec/list_spec.rb": "require 'absent_gem'\n"},
        RSPEC,
        {"spec/list_spec.rb": FAIL},
        load_errors=("spec/list_spec.rb",),
    ),
    "minitest": make_project(
        "minitest", {"test_list.rb": MINITEST}, "ruby test_list.rb -v --seed=7", MINITEST_EXPECTED
    ),
    "minitest-crash": make_project(
        "minitest",
        {"test_crash.rb": MINITEST_CRASH},
        "ruby -e '$stdout.sync = true; load \"./test_crash.rb\"' -- -v",
        {"TestCrash#test_a": PASS, "TestCrash#test_b": FAIL},
        is_crashed=True,
    ),
    "test_unit": make_project(
        "test_unit",
        {"test_list.rb": TEST_UNIT},
        "ruby test_list.rb -v --no-use-color",
        TEST_UNIT_EXPECTED,
    ),
    "rspec-crash": make_project(
        "rspec",
        {
            "spec/a_spec.rb": 'RSpec.describe("a") { it("dies") { Process.kill("KILL", Process.pid); sleep 5 } }\n'
        },
        RSPEC,
        {},
        is_crashed=True,
    ),
    "rspec-none": make_project("rspec", {"spec/a_spec.rb": ""}, RSPEC, {}),
    "minitest-none": make_project(
        "minitest", {"a.rb": 'require "minitest/autorun"\n'}, "ruby a.rb -v", {}
    ),
    "test_unit-none": make_project(
        "test_unit", {"a.rb": 'require "test/unit"\n'}, "ruby a.rb -v", {}
    ),
}
