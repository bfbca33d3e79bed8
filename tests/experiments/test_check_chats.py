"""The validator of SFT data: every wrong line is told with its place, and nothing is left out in silence."""

import json

import pytest

from experiments import check_chats

ASKED = {"role": "user", "content": "Q"}


def chat(*replies, **more):
    return {"messages": [ASKED, *replies], **more}


def says(content, **more):
    return {"role": "assistant", "content": content, **more}


GOOD, OTHER = chat(says("A")), chat(says("B"))
UNLEARNT = chat(says("C", weight=0))
CALL = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}
MISTAKEN = chat(CALL, {"role": "tool", "content": "no"}, says("D"))


@pytest.fixture
def run(capsys, tmp_path):
    """run(lines, *options) -> (exit code, lines of output, or of an error), places without the file."""

    def run(lines, *options):
        path = tmp_path / "data.jsonl"
        path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
        code = check_chats.main([str(path), *options])
        printed = capsys.readouterr()
        said = printed.err if code == 2 else printed.out
        return code, [x.replace(f"{path}, ", "") for x in said.splitlines()]

    return run


def test_good_data_is_counted(run):
    code, out = run([GOOD, "", OTHER, MISTAKEN])
    assert code == 0
    assert out[0].startswith(
        "line 4: message 1 is not trained on: message 1 calls 'f' with arguments"
    )
    assert out[-1].startswith("3 lines, 0 of them left out; 3 samples of ")
    assert out[-1].endswith("1 mistakes that are not trained on")


def test_every_wrong_line_is_told(run):
    code, out = run(["{", GOOD, chat(), GOOD, UNLEARNT])
    assert code == 1
    assert out[0].startswith("line 1: the line is not JSON")
    assert "line 3: no message is an assistant's" in out[1]
    assert out[2].startswith("line 4: the same conversation is in") and "line 2;" in out[2]
    assert out[3] == (
        "line 5: it has no token to train on, because all its replies are masked: message 1, weight 0; remove it, "
        "or correct a reply"
    )
    assert out[-1].startswith("5 lines, 4 of them left out; 1 samples")


def test_a_call_of_a_line_without_tools_is_told(run):
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    result = {"role": "tool", "content": "no"}
    code, out = run([chat(call, result, says("D")), chat(call, result, call)])
    assert code == 1
    assert out[0] == "line 1: message 1 is not trained on: no tool is named 'f'; there are none"
    assert "masked: message 1, no tool is named 'f'; there are none (and 1 more); remove" in out[1]


def test_what_is_right_is_written_as_it_was(run, tmp_path):
    new = tmp_path / "new.jsonl"
    code, out = run([GOOD, "{", MISTAKEN], f"--write={new}")
    assert code == 1 and out[-1] == f"2 lines written to {new}"
    assert [json.loads(line) for line in new.read_text().splitlines()] == [GOOD, MISTAKEN]
    assert run([OTHER], f"--write={new}") == (
        2,
        [f"error: {new} exists; give --write a new name, or remove it"],
    )
    assert len(new.read_text().splitlines()) == 2


def test_samples_that_are_too_long_are_left_out(run):
    code, out = run([GOOD, chat(says("word " * 40))], "--max_tokens=20")
    assert code == 1
    assert "line 2: a sample of it has" in out[0] and "more than 20" in out[0]
    assert out[-1].startswith("2 lines, 1 of them left out")


@pytest.mark.parametrize(
    ("reply", "answer", "kept"),
    [
        ("It is 1,072.", 1072, True),
        ("From 3 to 72.0", "72", True),
        ("Paris", "Paris", True),
        ("The score was 5-3", 3, True),
        ("It fell by -3", -3, True),
        ("12345678901234567891", 12345678901234567890, False),
        ("<think>maybe 42</think>I do not know", 42, False),
        ("72 or 73", "72", False),
        ("I do not know.", "72", False),
        ("Rome", "Paris", False),
    ],
)
def test_rejection_sampling_keeps_right_answers(run, reply, answer, kept):
    code, out = run([chat(says(reply), answer=answer)], "--verify", "answer")
    assert code == (0 if kept else 1)
    assert kept or f"its answer is '{answer}'" in out[0]


def test_the_answer_is_the_assistants(run):
    asked = chat(says("I do not know"), {"role": "user", "content": "is it 42"}, answer=42)
    code, out = run([asked], "--verify", "answer")
    assert code == 1 and "its reply ends in 'I do not know'" in out[0]


def test_a_right_answer_is_kept_where_the_same_reply_was_rejected_before(run):
    """Only what was kept makes a second one the same."""
    code, out = run(
        [chat(says("42"), answer=41), chat(says("42"), answer=42)], "--verify", "answer"
    )
    assert code == 1 and out[-1].startswith("2 lines, 1 of them left out; 1 samples")


def test_messages_behind_the_last_reply_are_told(run):
    code, out = run([chat(says("A"), ASKED)])
    assert code == 0 and out[0] == "line 1: 1 messages after the last reply are not trained on"


def test_lengths_are_those_of_the_layout(run):
    """GLM-4.5's has line ends of its own."""
    assert run([GOOD], "--max_tokens=8")[0] == 0
    assert run([GOOD], "--max_tokens=8", "--variant=glm4.5")[0] == 1


def test_a_line_without_an_answer_is_told(run):
    code, out = run([GOOD], "--verify", "answer")
    assert code == 1 and "it has no answer to compare its reply with" in out[0]


def test_replies_in_circles_are_rejected(run):
    circle = chat(says("A", reasoning_content="and then we go round the same block again " * 5))
    assert run([circle])[0] == 0
    code, out = run([circle], "--verify", "repetition", "answer")
    assert code == 1 and "message 1 repeats 'andthenwegoroundthesameblockag' 5 times" in out[0]


def test_wrong_arguments_are_one_line(run, capsys, tmp_path):
    for arguments, said in (
        ([str(tmp_path / "no.jsonl")], "error: no file"),
        ([], "required: FILE.jsonl"),
        (["--verify", "truth", "--", "x"], "invalid choice: 'truth'"),
        ([__file__, f"--write={tmp_path}/no/new"], f"no folder {tmp_path}/no for --write"),
        ([__file__, f"--tokenizer={tmp_path}/no"], "no tokenizer at"),
    ):
        assert check_chats.main(arguments) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1


def test_an_empty_file_is_told(run):
    code, out = run([])
    assert code == 0 and out[0].endswith("data.jsonl: has no line")


def test_lengths_and_contents_that_cannot_be(run):
    code, out = run([GOOD], "--max_tokens=0")
    assert code == 2 and "max_tokens is 0; it must be positive" in out[-1]
    code, out = run([{"messages": [{"role": "user"}, says("A")]}])
    assert code == 1 and out[0] == "line 1: message 0 of role 'user' has no content"


def test_fields_that_nothing_reads_are_told_with_their_number(run):
    misspelt = [chat(says(f"A{i}", reasonng_content="why"), id=i) for i in range(3)]
    code, out = run([GOOD, *misspelt, chat(says("E"), toolz=[], answer="E")])
    assert code == 0
    told = [line for line in out if "is not read" in line]
    assert told == [
        "the field id is not read: 3 lines have it, the first is line 2",
        "the field messages.reasonng_content is not read: 3 lines have it, the first is line 2",
        "the field toolz is not read: 1 lines have it, the first is line 5",
    ]
