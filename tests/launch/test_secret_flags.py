"""Secrets are files and not flags, because every user of a machine sees flags in `ps`."""

import dataclasses
import pathlib
import re

import pytest

from launch import command_line

ROOT = pathlib.Path(__file__).parents[2]
SECRET = re.compile(r"key|token|secret|password", re.IGNORECASE)
# Fields with such a word in their names and no secret: counts, files, ids and kinds of tokens.
OPEN = re.compile(r"tokens|_file$|_id$|^tokenizer$|heads$|_chunk$")
PROGRAMS = {
    "serve.py:tiny": "server",
    "rl_agentic.py:tiny": "program.listen",
    "evaluate.py:harbor": "endpoint",
}


def secrets(config, path=""):
    """Yields (path, field) of the fields of a config that may hold a secret."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from secrets(value, f"{path}{field.name}.")
        elif SECRET.search(field.name) and not OPEN.search(field.name):
            yield f"{path}{field.name}", field


@pytest.mark.parametrize("name", PROGRAMS)
def test_has_no_flag_for_secret(name):
    config = command_line.parse(["run", f"--experiment={ROOT / 'experiments' / name}"]).config
    for path, field in secrets(config):
        assert not field.metadata.get("flag", True), path


@pytest.mark.parametrize(("name", "part"), PROGRAMS.items())
def test_refuses_key_as_flag(name, part):
    experiment = f"--experiment={ROOT / 'experiments' / name}"
    with pytest.raises(ValueError, match="no field 'api_key'"):
        command_line.parse(["run", experiment, f"--experiment.{part}.api_key=s3cret"])
    words = command_line.parse(["run", experiment, f"--experiment.{part}.api_key_file=/run/key"])
    assert "/run/key" in repr(words.config)
