"""Mutations of sources: the edits of each kind and language, draws, statements, and the counts of a campaign."""

import pytest

from glm5_jax.envs.swe.file_tree import text_file
from glm5_jax.envs.swe.mutations.campaign import count_candidates, summarise
from glm5_jax.envs.swe.mutations.draw import draw_mutation, find_mutations, mutable_files
from glm5_jax.envs.swe.mutations.edits import Edit, Mutation, apply_mutations
from glm5_jax.envs.swe.mutations.maker import MutationResult
from glm5_jax.envs.swe.mutations.statement import write_statement
from glm5_jax.envs.swe.mutations.tokens import split_tokens


def mutants(source: str, language: str) -> dict[str, set[str]]:
    """Returns the mutated sources by operator."""
    texts: dict[str, set[str]] = {}
    for mutation in find_mutations(source.encode(), language):
        text = apply_mutations(source.encode(), [mutation]).decode()
        texts.setdefault(mutation.operator, set()).add(text)
    return texts


def test_mutates_python_at_its_syntax_tree():
    source = "def f(a, b):\n    if a is None:\n        return b\n    return g(a, b) + 1 if a < b and b else [True, 7]\n"

    texts = mutants(source, "python")

    head = "def f(a, b):\n    if a is None:\n        return b\n    return "
    assert texts["comparison"] == {
        source.replace("a is None", "a is not None"),
        source.replace("a < b", "a <= b"),
    }
    assert texts["off_by_one"] == {f"{head}g(a, b) if a < b and b else [True, 7]\n"}
    assert texts["wrong_constant"] == {
        source.replace("+ 1", "+ 2"),
        source.replace("True", "False"),
        source.replace("7", "8"),
    }
    assert texts["dropped_condition"] == {
        source.replace("a < b and b", "a < b"),
        source.replace("a < b and b", "b"),
    }
    assert texts["swapped_arguments"] == {source.replace("g(a, b)", "g(b, a)")}
    assert texts["removed_guard"] == {
        source.replace("if a is None:\n        return b", "pass"),
    }


def test_keeps_positions_after_text_that_is_not_ascii():
    assert mutants("x = 'é' if a < 3 else 'ü'\n", "python")["comparison"] == {
        "x = 'é' if a <= 3 else 'ü'\n"
    }


def test_finds_no_mutation_in_broken_python():
    assert find_mutations(b"def f(:\n", "python") == ()


C_LIKE = {
    "c": ("int f(int a, int b) {{\n{}\n}}\n", "if (!a) {{ return 1; }}"),
    "cpp": ("int f(int a, int b) {{\n{}\n}}\n", "if (!a) {{ return 1; }}"),
    "java": ("class X {{ int f(int a, int b) {{\n{}\n}} }}\n", "if (!a) {{ return 1; }}"),
    "javascript": ("function f(a, b) {{\n{}\n}}\n", "if (!a) {{ return 1; }}"),
    "typescript": ("function f(a: number, b: number) {{\n{}\n}}\n", "if (!a) {{ return 1; }}"),
    "php": ("<?php\nfunction f($a, $b) {{\n{}\n}}\n", "if (!a) {{ return 1; }}"),
    "go": ("func f(a int, b int) int {{\n{}\n}}\n", "if !a {{\nreturn 1\n}}"),
}


@pytest.mark.parametrize("language", C_LIKE)
def test_mutates_languages_of_cs_family_at_tokens(language):
    frame, guard = (text.replace("{{", "{").replace("}}", "}") for text in C_LIKE[language])
    body = f"{guard}\nx = g(a, b) + 1;\nif (a < b && h(b) || c == 3) {{ k(); }}"
    source = frame.replace("{}", body)

    texts = mutants(source, language)

    assert source.replace("a < b", "a <= b") in texts["comparison"]
    assert source.replace("c == 3", "c != 3") in texts["comparison"]
    assert source.replace("g(a, b) + 1", "g(a, b)") in texts["off_by_one"]
    assert source.replace("+ 1;", "+ 2;") in texts["wrong_constant"]
    assert source.replace("a < b && ", "") in texts["dropped_condition"]
    assert source.replace(" && h(b)", "") in texts["dropped_condition"]
    assert source.replace(" || c == 3", "") in texts["dropped_condition"]
    assert texts["swapped_arguments"] == {source.replace("g(a, b)", "g(b, a)")}
    assert texts["removed_guard"] == {source.replace(f"{guard}\n", "")}


def test_mutates_ruby_at_tokens():
    source = (
        "class A < B\n  def f(a, b)\n    return a unless b\n    x = g(a, b) + 1\n"
        "    if a < b && b.any? { |v| v }\n      <<~TEXT\n        a < b && true\n      TEXT\n    end\n  end\nend\n"
    )

    texts = mutants(source, "ruby")

    assert texts["comparison"] == {source.replace("if a < b", "if a <= b")}
    assert texts["removed_guard"] == {source.replace("    return a unless b\n", "")}
    assert texts["swapped_arguments"] == {source.replace("g(a, b)", "g(b, a)")}
    assert texts["dropped_condition"] == {
        source.replace("if a < b && b.any?", "if b.any?"),
        source.replace(" && b.any? { |v| v }", ""),
    }
    assert texts["off_by_one"] == {source.replace(" + 1", "")}


@pytest.mark.parametrize(
    ("language", "source"),
    [
        ("c", "// a < 1\n/* b == 2 */\n#define N 3 \\\n  + 4\n#if A > 5\n#endif\n"),
        ("cpp", 'auto s = R"(a < 1 && 2)";\ntemplate <typename T> void f(T&& x);\n'),
        ("java", 'String s = "a < 1" + """\n b == 2 """;\nList<Map<String, X>> m;\n'),
        ("go", "s := `a < 1 && 2`\n// true\n"),
        ("javascript", "const s = `a < ${b}`, r = /a == 1/g;\n"),
        ("typescript", "type A<T extends B> = C<T>;\n// 1\n"),
        ("php", "a < 1 <?php # b == 2\n$s = <<<END\n a < 1\n END;\n?> c == 3"),
        ("ruby", "# 1 < 2\n=begin\n a == 3\n=end\nS = %w[a < b]\n__END__\n1 < 2\n"),
    ],
)
def test_finds_no_mutation_in_comments_texts_and_types(language, source):
    assert find_mutations(source.encode(), language) == ()


def test_splits_tokens_with_their_lines():
    tokens = split_tokens(b"a = /x y/ / 2 // c\n", "javascript")

    assert [(t.kind, t.text) for t in tokens] == [
        ("word", b"a"),
        ("op", b"="),
        ("text", b"/x y/"),
        ("op", b"/"),
        ("number", b"2"),
    ]


def test_rejects_edits_that_overlap():
    one = Mutation("comparison", (Edit(0, 2, b"x"),))
    two = Mutation("comparison", (Edit(1, 3, b"y"),))

    with pytest.raises(ValueError, match="overlap"):
        apply_mutations(b"abcd", [one, two])


TREE = {
    "lib/deep_merge.py": text_file("def merge(a, b):\n    return a + 1 if a < b else b\n"),
    "lib/other.py": text_file("X = 1\n"),
    "tests/test_merge.py": text_file("from lib.deep_merge import merge\n"),
    "docs/conf.py": text_file("x = 1\n"),
}


def test_mutates_files_that_tests_name():
    assert mutable_files(TREE, "python", ["tests/test_merge.py"]) == ["lib/deep_merge.py"]
    assert mutable_files(TREE, "python", []) == ["lib/deep_merge.py", "lib/other.py"]


def test_draws_equal_mutations_for_equal_seeds():
    drawn = [draw_mutation(TREE, ["lib/deep_merge.py"], "python", f"s{n}") for n in range(20)]
    again = [draw_mutation(TREE, ["lib/deep_merge.py"], "python", f"s{n}") for n in range(20)]

    assert drawn == again
    assert len({d.digest for d in drawn if d}) > 3
    assert all(d and d.content != TREE["lib/deep_merge.py"].content for d in drawn)


def test_draws_nothing_from_source_without_sites():
    assert draw_mutation({"a.py": text_file("pass\n")}, ["a.py"], "python", "s") is None


def test_writes_statement_without_places():
    log = "E   AssertionError: 3 != 4\nlib/x.py:12: AssertionError\n  File 'lib/x.py', line 3\nexpected 5\n"

    text = write_statement("calc", ["tests.test_x::A::test_add", "test_sub"], log)

    assert "test_add" in text and "test_sub" in text
    assert "AssertionError: 3 != 4" in text and "expected 5" in text
    assert "x.py" not in text and "line 3" not in text


def test_counts_candidates_by_language():
    def candidate(number, status, language="python"):
        return MutationResult(
            project="p", language=language, number=number, status=status, duration_s=30.0
        )

    statuses = ("kept", "kept", "not built", "breaks no test", "flaky", "duplicate")
    candidates = [candidate(number, status) for number, status in enumerate(statuses)]
    candidates.append(candidate(9, "breaks too many", "go"))

    rows = summarise(candidates)

    assert rows["python"] == {
        "candidates": 5,
        "instances": 2,
        "built": 0.8,
        "valid": 0.4,
        "flaky": 0.333,
        "minutes_per_instance": 1.25,
    }
    assert rows["go"]["instances"] == 0
    stages = count_candidates(candidates).stages
    assert (stages[0].num_in, stages[-1].num_out) == (7, 2)
    assert sum(sum(stage.dropped_by_reason.values()) for stage in stages) == 5
