"""Tests that saving a tokenizer keeps a checkpoint's chat templates and writes them to one place."""

import json

import pytest

from glm5_jax.text import layouts
from glm5_jax.text.tokenizer import DEFAULT_PATH, Tokenizer

DEFINITION = DEFAULT_PATH.read_text("utf-8")
LIST = [{"name": "default", "template": "mine"}, {"name": "tool_use", "template": "tools"}]


def checkpoint(folder, entry=None, **files):
    """Writes a tokenizer's folder; entry: chat_template of its config; files: others by name."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text(DEFINITION, "utf-8")
    config = {"eos_token": "<|endoftext|>", "padding_side": "left"}
    config |= {} if entry is None else {"chat_template": entry}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".jinja").write_text(text, "utf-8")
    return folder


def saved(folder):
    """Returns the templates of a folder by file, and its config."""
    templates = {
        str(path.relative_to(folder)): path.read_text("utf-8") for path in folder.rglob("*.jinja")
    }
    return templates, json.loads((folder / "tokenizer_config.json").read_text("utf-8"))


@pytest.mark.parametrize(
    ("entry", "files", "default", "more"),
    [
        ("mine", {}, "mine", {}),
        (LIST, {}, "mine", {"tool_use": "tools"}),
        (LIST[1:], {}, None, {"tool_use": "tools"}),
        # transformers reads the file, not the entry.
        ("old", {"chat_template": "new"}, "new", {}),
        (LIST, {"chat_template": "new"}, "new", {}),
        (
            None,
            {"chat_template": "a", "additional_chat_templates__rag": "b"},
            "a",
            {"rag": "b"},
        ),
        (None, {}, None, {}),
    ],
)
def test_keeps_templates_of_checkpoint(tmp_path, entry, files, default, more):
    tokenizer = Tokenizer.load(checkpoint(tmp_path / "in", entry, **files))
    assert (tokenizer.chat_template, tokenizer.more_templates) == (default, more)
    for folder in (tmp_path / "out", tmp_path / "in"):  # "in" has templates in their old places
        tokenizer.save(folder)
        templates, config = saved(folder)
        names = {f"additional_chat_templates/{name}.jinja": text for name, text in more.items()}
        assert templates == {"chat_template.jinja": default or layouts.template(), **names}
        assert config == {"eos_token": "<|endoftext|>", "padding_side": "left"}
        reloaded = Tokenizer.load(folder)
        assert (reloaded.chat_template or None, reloaded.more_templates) == (
            default or layouts.template(),
            more,
        )


def test_replaces_templates_by_trained_layout(tmp_path):
    tokenizer = Tokenizer.load(checkpoint(tmp_path / "in", LIST))
    tokenizer.with_chat_template("trained").save(tmp_path / "out")
    templates, config = saved(tmp_path / "out")
    assert templates == {"chat_template.jinja": "trained"} and "chat_template" not in config


@pytest.mark.parametrize(
    "entry", [7, {"name": "a"}, [{"name": "../../a", "template": "x"}], [{"template": "x"}]]
)
def test_rejects_invalid_templates(tmp_path, entry):
    folder = checkpoint(tmp_path / "in", entry)
    with pytest.raises(ValueError, match="chat_template of tokenizer_config.json has .*a template"):
        Tokenizer.load(folder)
