"""The terminal chat with a real server."""

import pytest

from launch import chat
from tests.inference.conftest import serving


def lines(*inputs):
    """Returns a fake keyboard: these lines, then the end of the input."""
    left = list(inputs)

    def read(prompt):
        if not left:
            raise EOFError
        return left.pop(0)

    return read


@pytest.fixture(scope="module")
def server():
    with serving(dict(page_size=64, max_num_seqs=1)) as running:  # few programs
        yield running


def talk(server, capsys, *inputs, **options):
    options = {"max_tokens": 4, "temperature": 0} | options
    flags = [f"--{name}={value}" for name, value in options.items()]
    code = chat.main(["chat", f"--url={server.url}", *flags], lines(*inputs))
    return code, capsys.readouterr()


def test_answers_and_remembers_questions(server, capsys):
    before = server.engine.stats.prompt_tokens
    code, shown = talk(server, capsys, "hi", "and?")
    assert code == 0 and shown.out.startswith("tiny: /new starts")
    assert shown.out.count("(cut off)") == 2
    both = server.engine.stats.prompt_tokens - before
    talk(server, capsys, "hi", "/new", "and?")
    apart = server.engine.stats.prompt_tokens - before - both
    assert both > apart  # the second question came with the first, or without


def test_turns_thinking_off(server, capsys):
    code, shown = talk(server, capsys, "/think", "hi", "/what", "/quit", "never asked")
    assert code == 0 and "thinking is off" in shown.out and shown.out.count("/new starts") == 2
    assert shown.out.count("(cut off)") == 1


def test_continues_after_refused_question(server, capsys):
    code, shown = talk(server, capsys, "word " * 100, "hi")
    assert code == 0 and "error: the prompt has" in shown.out and shown.out.count("(cut off)") == 1


def test_names_flag_of_missing_key(capsys, tmp_path):
    (tmp_path / "key").write_text("secret\n")
    with serving(api_key="secret") as running:
        assert chat.main(["chat", f"--url={running.url}"], lines()) == 2
        message = "error: the API key is missing or wrong; give its file as --api_key_file=FILE\n"
        assert capsys.readouterr().err == message
        key = f"--api_key_file={tmp_path / 'key'}"
        assert chat.main(["chat", f"--url={running.url}", key], lines()) == 0


def test_connects_to_address_of_serve_by_default(server, capsys, monkeypatch):
    monkeypatch.setattr(chat, "SERVER", server.url)
    assert chat.main(["chat", "--max_tokens=4"], lines()) == 0
    assert chat.main(["chat", server.url, "--max_tokens=4"], lines()) == 0
    assert capsys.readouterr().out.count("/new starts") == 2


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--checkpoint=x", "--url=y"], "give either --checkpoint=DIR or --url"),
        (["--url=http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["--checkpoint=/nowhere"], "checkpoint /nowhere does not exist"),
        (["/nowhere"], "checkpoint /nowhere does not exist"),
        (["http://127.0.0.1:9", "--checkpoint=x"], "give either --checkpoint=DIR or --url"),
        (["--colour=red"], "colour"),
        (["--url=x", "more"], "unexpected argument 'more'"),
    ],
)
def test_reports_wrong_command_in_one_line(capsys, flags, words):
    assert chat.main(["chat", *flags], lines()) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("error: ") and error.count("\n") == 1
