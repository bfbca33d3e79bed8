"""Projects of the test runners of Go."""

from tests.envs.swe.runners.project import FAIL, PASS, SKIP, Project, make_project

GO_MOD = "module example.com/small\n\ngo 1.19\n"
GO_TESTS = """package small

import "testing"

func TestPasses(t *testing.T) {}

func TestSkipped(t *testing.T) { t.Skip("later") }

func TestTable(t *testing.T) {
	for _, name := range []string{"one two", "grün", "bad"} {
		t.Run(name, func(t *testing.T) {
			t.Log("--- PASS: TestForged (0.00s)")
			if name == "bad" {
				t.Fatal("bad")
			}
		})
	}
}
"""
GO_PARALLEL = """package small

import "testing"

func TestOne(t *testing.T)   { t.Parallel(); t.Log("one") }
func TestTwo(t *testing.T)   { t.Parallel(); t.Log("two") }
func TestThree(t *testing.T) { t.Parallel(); t.Error("three") }
"""
GO_CRASH = """package small

import "testing"

func TestA(t *testing.T) {}
func TestB(t *testing.T) { var p *int; *p = 1 }
func TestC(t *testing.T) {}
"""
GO_EXIT = GO_CRASH.replace("var p *int; *p = 1", "os.Exit(3)").replace(
    'import "testing"', 'import (\n\t"os"\n\t"testing"\n)'
)
GO = "GOFLAGS=-mod=mod GOPROXY=off GOTOOLCHAIN=local go test -json -count=1 ./..."
GO_TEXT = GO.replace("-json", "-v")
GO_EXPECTED = {
    "example.com/small::TestPasses": PASS,
    "example.com/small::TestSkipped": SKIP,
    "example.com/small::TestTable": FAIL,
    "example.com/small::TestTable/one_two": PASS,
    "example.com/small::TestTable/grün": PASS,
    "example.com/small::TestTable/bad": FAIL,
}
GO_FILES = {
    "go.mod": GO_MOD,
    "small_test.go": GO_TESTS,
    "empty/empty.go": "package empty\n",
    "other/other_test.go": 'package other\n\nimport "testing"\n\nfunc TestPasses(t *testing.T) {}\n',
}
GO_BROKEN = {
    "go.mod": GO_MOD,
    "small_test.go": "package small\n\nfunc TestX(t *testing.T) {}\n",
    "other/other_test.go": 'package other\n\nimport "testing"\n\nfunc TestPasses(t *testing.T) {}\n',
}
_GO_CRASHED = {"example.com/small::TestA": PASS, "example.com/small::TestB": FAIL}
PROJECTS: dict[str, Project] = {
    "go": make_project(
        "go", GO_FILES, GO, {**GO_EXPECTED, "example.com/small/other::TestPasses": PASS}
    ),
    "go-text": make_project(
        "go", GO_FILES, GO_TEXT, {**GO_EXPECTED, "example.com/small/other::TestPasses": PASS}
    ),
    "go-parallel": make_project(
        "go",
        {"go.mod": GO_MOD, "small_test.go": GO_PARALLEL},
        GO,
        {
            "example.com/small::TestOne": PASS,
            "example.com/small::TestTwo": PASS,
            "example.com/small::TestThree": FAIL,
        },
    ),
    "go-build": make_project(
        "go",
        GO_BROKEN,
        GO,
        {"example.com/small": FAIL, "example.com/small/other::TestPasses": PASS},
        load_errors=("example.com/small",),
    ),
    "go-panic": make_project(
        "go", {"go.mod": GO_MOD, "small_test.go": GO_CRASH}, GO, _GO_CRASHED, is_crashed=True
    ),
    "go-exit": make_project(
        "go", {"go.mod": GO_MOD, "small_test.go": GO_EXIT}, GO, _GO_CRASHED, is_crashed=True
    ),
    "go-exit-text": make_project(
        "go", {"go.mod": GO_MOD, "small_test.go": GO_EXIT}, GO_TEXT, _GO_CRASHED, is_crashed=True
    ),
    "go-none": make_project("go", {"go.mod": GO_MOD, "a.go": "package small\n"}, GO, {}),
}
