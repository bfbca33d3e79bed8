"""The validator of SFT data: every wrong line is reported with its number, and nothing is dropped silently."""

import json

import pytest

from experiments import check_chats

QUESTION = {"role": "user", "content": "Q"}


def chat(*replies, **more):
    return {"messages": [QUESTION, *replies], **more}


def answer_with(content, **more):
    return {"role": "assistant", "content": content, **more}


GOOD, OTHER = chat(answer_with("A")), chat(answer_with("B"))
UNLEARNT = chat(answer_with("C", weight=0))
CALL = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}
MISTAKEN = chat(CALL, {"role": "tool", "content": "no"}, answer_with("D"))


@pytest.fixture
def run(capsys, tmp_path):
    """Returns run(lines, *options) -> (exit code, lines of output or of an error), without the file in places."""

    def run(lines, *options):
        path = tmp_path / "data.jsonl"
        path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
        code = check_chats.main([str(path), *options])
        printed = capsys.readouterr()
        text = printed.err if code == 2 else printed.out
        return code, [x.replace(f"{path}, ", "") for x in text.splitlines()]

    return run


def test_counts_good_data(run):
    code, out = run([GOOD, "", OTHER, MISTAKEN])
    assert code == 0
    assert out[0].startswith(
        "line 4: message 1 is not trained on: message 1 calls 'f' with arguments"
    )
    assert out[-1].startswith("3 lines, 0 of them left out; 3 samples of ")
    assert out[-1].endswith("1 mistakes that are not trained on")


def test_reports_every_wrong_line(run):
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


def test_reports_call_of_line_without_tools(run):
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    result = {"role": "tool", "content": "no"}
    code, out = run([chat(call, result, answer_with("D")), chat(call, result, call)])
    assert code == 1
    assert out[0] == "line 1: message 1 is not trained on: no tool is named 'f'; there are none"
    assert "masked: message 1, no tool is named 'f'; there are none (and 1 more); remove" in out[1]


def test_writes_good_lines_unchanged(run, tmp_path):
    new = tmp_path / "new.jsonl"
    code, out = run([GOOD, "{", MISTAKEN], f"--write={new}")
    assert code == 1 and out[-1] == f"2 lines written to {new}"
    assert [json.loads(line) for line in new.read_text().splitlines()] == [GOOD, MISTAKEN]
    assert run([OTHER], f"--write={new}") == (
        2,
        [f"error: {new} exists; give --write a new name, or remove it"],
    )
    assert len(new.read_text().splitlines()) == 2


def test_leaves_out_samples_that_are_too_long(run):
    code, out = run([GOOD, chat(answer_with("word " * 40))], "--max_tokens=20")
    assert code == 1
    assert "line 2: a sample of it has" in out[0] and "more than 20" in out[0]
    assert out[-1].startswith("2 lines, 1 of them left out")


@pytest.mark.parametrize(
    ("reply", "answer", "is_accepted"),
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
def test_rejection_sampling_keeps_right_answers(run, reply, answer, is_accepted):
    code, out = run([chat(answer_with(reply), answer=answer)], "--verify", "answer")
    assert code == (0 if is_accepted else 1)
    assert is_accepted or f"its answer is '{answer}'" in out[0]


def test_verifies_reply_of_assistant(run):
    conversation = chat(
        answer_with("I do not know"), {"role": "user", "content": "is it 42"}, answer=42
    )
    code, out = run([conversation], "--verify", "answer")
    assert code == 1 and "its reply ends in 'I do not know'" in out[0]


def test_keeps_right_answer_after_rejected_duplicate(run):
    """Only an accepted reply makes a later one a duplicate."""
    code, out = run(
        [chat(answer_with("42"), answer=41), chat(answer_with("42"), answer=42)],
        "--verify",
        "answer",
    )
    assert code == 1 and out[-1].startswith("2 lines, 1 of them left out; 1 samples")


def test_reports_messages_after_last_reply(run):
    code, out = run([chat(answer_with("A"), QUESTION)])
    assert code == 0 and out[0] == "line 1: 1 messages after the last reply are not trained on"


def test_lengths_depend_on_layout(run):
    """GLM-4.5's layout has additional line ends."""
    assert run([GOOD], "--max_tokens=8")[0] == 0
    assert run([GOOD], "--max_tokens=8", "--variant=glm4.5")[0] == 1


def test_reports_line_without_answer(run):
    code, out = run([GOOD], "--verify", "answer")
    assert code == 1 and "it has no answer to compare its reply with" in out[0]


def test_rejects_repetitive_replies(run):
    circle = chat(
        answer_with("A", reasoning_content="and then we go round the same block again " * 5)
    )
    assert run([circle])[0] == 0
    code, out = run([circle], "--verify", "repetition", "answer")
    assert code == 1 and "message 1 repeats 'andthenwegoroundthesameblockag' 5 times" in out[0]


def test_reports_wrong_arguments_in_one_line(run, capsys, tmp_path):
    for arguments, text in (
        ([str(tmp_path / "no.jsonl")], "error: no file"),
        ([], "required: FILE.jsonl"),
        (["--verify", "truth", "--", "x"], "invalid choice: 'truth'"),
        ([__file__, f"--write={tmp_path}/no/new"], f"no folder {tmp_path}/no for --write"),
        ([__file__, f"--tokenizer={tmp_path}/no"], "no tokenizer at"),
    ):
        assert check_chats.main(arguments) == 2
        err = capsys.readouterr().err
        assert text in err and err.count("\n") == 1


def test_reports_empty_file(run):
    code, out = run([])
    assert code == 1 and out[0].endswith("data.jsonl: has no line")


def test_refuses_folder(tmp_path, capsys):
    assert check_chats.main([str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder; give jsonl files" in capsys.readouterr().err


def test_tells_how_to_request_replies_of_chats_without_reasoning(run):
    note = 'no reply has reasoning; request replies without it: reasoning_effort="none"'
    assert note in run([GOOD])[1]
    assert note not in run([GOOD, chat(answer_with("B", reasoning_content="because"))])[1]
    assert note not in run(["{"])[1]


def test_reports_invalid_length_and_content(run):
    code, out = run([GOOD], "--max_tokens=0")
    assert code == 2 and "max_tokens is 0; it must be positive" in out[-1]
    code, out = run([{"messages": [{"role": "user"}, answer_with("A")]}])
    assert code == 1 and out[0] == "line 1: message 0 of role 'user' has no content"


def test_counts_fields_that_are_not_read(run):
    misspelt = [chat(answer_with(f"A{i}", reasonng_content="why"), id=i) for i in range(3)]
    code, out = run([GOOD, *misspelt, chat(answer_with("E"), toolz=[], answer="E")])
    assert code == 0
    reports = [line for line in out if "is not read" in line]
    assert reports == [
        "the field id is not read: 3 lines have it, the first is line 2",
        "the field messages.reasonng_content is not read: 3 lines have it, the first is line 2",
        "the field toolz is not read: 1 lines have it, the first is line 5",
    ]
