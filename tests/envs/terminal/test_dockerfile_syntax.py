"""Words, quotes, variables and here-documents of Dockerfiles, read as Docker reads them."""

import pytest

from glm5_jax.envs.terminal import load_task
from glm5_jax.envs.terminal.dockerfile import DockerfileError, pairs, parse, substitute, words
from glm5_jax.envs.terminal.image import Images
from tests.envs.leftovers import run
from tests.envs.terminal.folders import make_task

KNOWN = {"A": "a b", "E": ""}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('MSG "hello world"', {"MSG": "hello world"}),
        ('ONE One "two two" three', {"ONE": "One two two three"}),
        ("LIT='$A is it'", {"LIT": "$A is it"}),
        ('X="$A is it" Y=$A', {"X": "a b is it", "Y": "a b"}),
        (r"X=a\ b Y=\$A", {"X": "a b", "Y": "$A"}),
        ("X\tone  two", {"X": "one  two"}),
        ("X=\"it's\" Y='\"'", {"X": "it's", "Y": '"'}),
        ("X=${N:-${A:+yes}} Y=${E-no}${E:-no}", {"X": "yes", "Y": "no"}),
    ],
)
def test_reads_env_like_docker(text, values):
    assert pairs(parse(f"FROM a\nENV {text}")[1], KNOWN) == values


@pytest.mark.parametrize(
    "text", ["X", "X=1 Y", "X='1", 'X="1', "X=${A", "X=${A:?}${N:?not set}", "X=${}"]
)
def test_refuses_env_that_cannot_be_read(text):
    with pytest.raises(DockerfileError, match="^line 2: ENV "):
        pairs(parse(f"FROM a\nENV {text}")[1], KNOWN)


def test_splits_words_outside_of_quotes():
    assert words("'a b' \"$A\" c$E\t$A", KNOWN) == ["a b", "a b", "c", "a b"]
    assert substitute("\"$A\" '$A' $", KNOWN) == "a b $A $"


def test_reads_byte_order_mark_and_tabs():
    items = parse("\ufeffFROM\tdebian\nRUN\techo hi\nCOPY\t--chown=a\tx\ty\n")
    assert [(item.name, item.text) for item in items] == [
        ("FROM", "debian"), ("RUN", "echo hi"), ("COPY", "x\ty"),
    ]  # fmt: skip
    with pytest.raises(DockerfileError, match=r"line 1: 'FR\\u200bOM' is not supported"):
        parse("FR\u200bOM debian")


def test_ignores_instructions_without_effect_on_image():
    names = (
        "CMD",
        "ENTRYPOINT",
        "EXPOSE",
        "HEALTHCHECK --interval=5s",
        "LABEL",
        "MAINTAINER",
        "STOPSIGNAL",
        "VOLUME",
    )
    text = "FROM a\n" + "".join(f"{name} x\n" for name in names) + "RUN y"
    assert [item.name for item in parse(text)] == ["FROM", "RUN"]


def test_reads_here_documents():
    text = "FROM a\nRUN <<EOF\necho 1\n# kept\nEOF\nRUN cat <<-'END' > x && cat <<B\n\ta\n\tEND\nb\nB\nRUN echo $((1 <<x))\nUSER u"
    run_, two, three, user = parse(text)[1:]
    assert run_.script == "echo 1\n# kept\n"
    assert two.script == "cat <<-'END' > x && cat <<B\n\ta\n\tEND\nb\nB\n"
    assert (three.script, user.line) == ("echo $((1 <<x))", 12)


@pytest.mark.usefixtures("isolation")
def test_builds_arguments_and_here_documents(tmp_path):
    text = (
        'ARG V=3\nFROM debian\nARG V\nARG W=$V\nENV MSG "hello $W"\nWORKDIR /app\n'
        'RUN [ "$V" = 3 ] && [ "$MSG" = \'hello 3\' ]\nRUN <<EOF\n[ "$V" = 3 ]\necho $V > v\nEOF\n'
        "RUN <<EOF\n#!/usr/bin/env python3\nopen('w', 'w').write('4')\nEOF\nRUN [ $(cat v w | tr -d '\\n') = 34 ]\nCMD x\n"
    )

    async def work():
        async with Images() as images:
            return await images.of(load_task(make_task(tmp_path, dockerfile=text)))

    assert run(work()).env["MSG"] == "hello 3"
