"""Images built from Dockerfiles, each once, and errors with the line and the reason."""

import asyncio

import pytest

from glm5_jax.envs.sandbox import Sandbox, SandboxConfig
from glm5_jax.envs.terminal import TaskError, load_task
from glm5_jax.envs.terminal.dockerfile import DockerfileError, pairs, parse, substitute
from glm5_jax.envs.terminal.image import ImageError, Images
from tests.envs.leftovers import run
from tests.envs.terminal.folders import TOML, make_task

sandboxed = pytest.mark.usefixtures("isolation", "nothing_left")


def test_parses_instructions_over_several_lines():
    text = "# syntax=docker/dockerfile:1\n# x\nARG A=1\nfrom debian:$A AS base\n\nRUN a && \\\n# no\n\n  b \\\n  c\n"
    text += 'COPY --chown=a:b --chmod=755 ["x y", "/z"]\n# end\n'
    a, b, c, d = parse(text)
    assert (a.name, a.line, a.text) == ("ARG", 3, "A=1")
    assert (b.name, b.text, b.arguments) == ("FROM", "debian:$A AS base", None)
    assert (c.line, c.text) == (6, "a &&   b   c")
    assert (d.flags, d.arguments) == ({"chown": "a:b", "chmod": "755"}, ("x y", "/z"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has no FROM"),
        ("RUN x\nFROM a", "line 1: RUN must come after FROM"),
        ("FROM a\nFROM b", "line 2: FROM: several stages are not supported"),
        ("FROM a\nCOPY --from=b x y", "line 2: COPY --from is not supported"),
        ("FROM a\nRUN --mount=type=cache,target=/x y", "line 2: RUN --mount is not supported"),
        ("FROM a\nCOPY <<EOF x\nb\n", "line 2: COPY <<EOF has no end"),
        ("FROM a\nRUN", "line 2: RUN has no argument"),
        ("FROM a\nRUN [1]", "line 2: RUN [1]: a list must be of texts"),
        ("# escape=`\nFROM a", "line 1: escape=` is not supported"),
        *(
            (f"FROM a\n{name} x", f"line 2: {name} is not supported; known are FROM, WORKDIR")
            for name in ("ADD", "SHELL", "ONBUILD")
        ),
    ],
)  # fmt: skip
def test_rejects_invalid_dockerfile(text, message):
    with pytest.raises(DockerfileError) as error:
        parse(text)
    assert message in str(error.value)


def test_reads_documents_of_copy():
    text = "FROM a\nCOPY --chmod=755 <<A <<-'B' /x/\na $V \"q\" 'r' \\$V\nA\n\t$V\n\tB\nRUN x\n"
    _, copy, after = parse(text)
    assert copy.files({"V": "1"}) == {"A": "a 1 \"q\" 'r' \\$V\n", "B": "$V\n"}
    assert (copy.flags, after.text) == ({"chmod": "755"}, "x")


def test_substitutes_variables():
    known = {"A": "1", "E": ""}
    text = r"$A ${A} ${A}b $B. ${B:-2} ${E:-3} ${E-4} ${B-5} ${A:+6} ${E:+7} ${E+8} \$A"
    assert substitute(text, known) == "1 1 1b . 2 3  5 6  8 $A"
    items = parse("FROM a\nENV A=1 B='x y' C=$D\nENV E f g\nENV H=\\$A")[1:]
    assert [pairs(item, {"D": "d"}) for item in items] == [
        {"A": "1", "B": "x y", "C": "d"},
        {"E": "f g"},
        {"H": "$A"},
    ]
    with pytest.raises(DockerfileError, match="line 2: ENV A: no name and value"):
        pairs(parse("FROM a\nENV A")[1], {})


BUILT = r"""ARG TAG=bookworm-slim
FROM debian:${TAG}
ARG SIZE=3
ENV A=1 B=${SIZE}
ENV A=2 C=$A
WORKDIR /srv/x
WORKDIR y
COPY one.txt .
COPY sub/ /data/
COPY --chmod=750 --chown=1234:5 one.txt sub/*.sh /in/
COPY ["one.txt", "/as"]
RUN apt-get update && apt-get install -y --no-install-recommends curl bash=5.2 && \
    echo "$A $B $C $SIZE $PWD" > env.txt && [ ! -e /sys/class/net/eth0 ]
RUN ["/bin/sh", "-c", "echo list > list.txt"]
RUN useradd -m -d /srv/me me && chmod 777 /srv/x/y
USER me
RUN id -un > who.txt && echo $HOME >> who.txt
"""
LOOK = """
cat one.txt env.txt list.txt who.txt /data/deep/two.txt /as
stat -c '%a %u %g %n' /in/one.txt /in/run.sh /data/run.sh who.txt
readlink /data/link; [ -e /grader/bin/python3 ] && echo tools
"""


@sandboxed
def test_builds_dockerfile(tmp_path):
    folder = make_task(tmp_path, dockerfile=BUILT, **{"environment/one.txt": "one\n"})
    for path, text in {"sub/deep/two.txt": "two\n", "sub/run.sh": "true\n"}.items():
        (folder / "environment" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "environment" / path).write_text(text)
    (folder / "environment/sub/link").symlink_to("/nowhere")

    async def work():
        async with Images() as images:
            task = load_task(folder)
            image, again = await asyncio.gather(images.of(task), images.of(task))
            assert image is again
            assert (
                await images.of(load_task(make_task(tmp_path, "bare", dockerfile="FROM debian")))
            ) is not image
            async with Sandbox(SandboxConfig(base=image.layer, workdir=image.workdir)) as box:
                return image, (await box.exec(LOOK, user="root")).stdout.decode().splitlines()

    image, seen = run(work())
    assert (image.workdir, image.user) == ("/srv/x/y", "me")
    assert {name: image.env[name] for name in "ABC"} == {"A": "2", "B": "3", "C": "1"}
    assert "SIZE" not in image.env
    assert seen[:7] == ["one", "2 3 1 3 /srv/x/y", "list", "me", "/srv/me", "two", "one"]
    modes = ["750 1234 5 /in/one.txt", "750 1234 5 /in/run.sh", "644 0 0 /data/run.sh"]
    assert seen[7:10] == modes and seen[10].startswith("644 ") and " 0 " not in seen[10]
    assert seen[11:] == ["/nowhere", "tools"]


REFUSED = {
    "FROM nginx:1.25": "image nginx:1.25 is not on this machine; known are debian, ubuntu",
    "FROM --platform=linux/riscv64 debian": "line 1: FROM debian: this machine is linux/",
    "FROM debian\nRUN echo said; exit 3": "line 2: RUN echo said; exit 3: exit code 3: said",
    "FROM debian\nRUN apt-get install -y no-such": "package no-such is not on this machine",
    "FROM debian\nRUN exec 3<>/dev/tcp/192.0.2.1/80": "line 2: RUN exec",
    "FROM debian\nRUN sleep 60": "line 2: RUN sleep 60: no end within 1 s",
    "FROM debian\nUSER nobody-here\nRUN true": "line 3: RUN true: exit code 126",
    "FROM debian\nCOPY task.toml /usr/bin/x": "(this machine's programs cannot be changed; ",
    "FROM debian\nCOPY ../task.toml /app/": "leads out of environment/",
    "FROM debian\nCOPY none /app/": "line 2: no none in environment/ to COPY",
    "FROM debian\nADD task.toml /app/": "environment/Dockerfile: line 2: ADD is not supported",
}


@sandboxed
def test_reports_why_image_cannot_be_built(tmp_path):
    async def work():
        async with Images() as images:
            for i, text in enumerate(REFUSED):
                toml = TOML + "build_timeout_sec = 1\n"
                folder = make_task(
                    tmp_path, f"t{i}", dockerfile=text, toml=toml, **{"environment/task.toml": ""}
                )
                with pytest.raises((ImageError, TaskError)) as error:
                    await images.of(load_task(folder))
                errors[text] = str(error.value)

    errors = {}
    run(work())
    assert {text: message for text, message in errors.items() if REFUSED[text] not in message} == {}
