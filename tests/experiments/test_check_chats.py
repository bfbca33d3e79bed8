"""The validator of SFT data: every wrong line is told with its place, and nothing is left out in silence."""

import json

from experiments import check_chats

ASKED = {"role": "user", "content": "Q"}
GOOD = {"messages": [ASKED, {"role": "assistant", "content": "A"}]}
OTHER = {"messages": [ASKED, {"role": "assistant", "content": "B"}]}
UNLEARNT = {"messages": [ASKED, {"role": "assistant", "content": "C", "weight": 0}]}
CALL = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}
MISTAKEN = {
    "messages": [
        ASKED,
        CALL,
        {"role": "tool", "content": "no"},
        {"role": "assistant", "content": "D"},
    ]
}


def run(capsys, tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    code = check_chats.main([str(path)])
    return code, [x.replace(f"{path}, ", "") for x in capsys.readouterr().out.splitlines()]


def test_good_data_is_counted(capsys, tmp_path):
    code, out = run(capsys, tmp_path, GOOD, "", OTHER, MISTAKEN)
    assert code == 0
    assert out[0].startswith("line 4: message 1 is not learnt: message 1 calls 'f' with arguments")
    assert out[-1].startswith("3 lines, 0 with errors; 3 samples of ")
    assert "1 mistakes that are not learnt; 0 samples longer" in out[-1]


def test_every_wrong_line_is_told(capsys, tmp_path):
    code, out = run(capsys, tmp_path, "{", GOOD, {"messages": [ASKED]}, GOOD, UNLEARNT)
    assert code == 1
    assert out[0].startswith("line 1: the line is not JSON")
    assert "line 3: no message is an assistant's" in out[1]
    assert out[2].startswith("line 4: the same conversation stands in line 2")
    assert out[3].startswith("line 5: no token of it is learnt")
    assert out[-1].startswith("5 lines, 4 with errors; 1 samples")


def test_the_longest_samples_are_told(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(check_chats, "LENGTH", 5)
    code, out = run(capsys, tmp_path, GOOD)
    assert code == 0 and out[0] == "line 1: 1 samples are longer than 5 tokens"
    assert out[-1].endswith("1 samples longer than 5 tokens")


def test_a_missing_file_is_named(capsys, tmp_path):
    assert check_chats.main([str(tmp_path / "no.jsonl")]) == 2
    assert "error: no file" in capsys.readouterr().err
    assert check_chats.main([]) == 2
    assert "no file given" in capsys.readouterr().err
