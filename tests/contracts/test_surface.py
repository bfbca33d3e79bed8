"""Freezes the public names of glm5_jax, and checks that importing it is cheap."""

import subprocess
import sys

import glm5_jax

SURFACE = (
    "ModelConfig",
    "presets",
    "make_mesh",
    "Glm5",
    "load_hf",
    "save_hf",
    "Tokenizer",
    "render_chat",
    "parse_reply",
    "Engine",
    "EngineConfig",
    "train",
    "evaluate",
)


def test_public_names_are_listed_in_order():
    names = list(glm5_jax.__all__)
    assert names == [name for name in SURFACE if name in names]


def test_every_public_name_exists():
    assert all(getattr(glm5_jax, name) is not None for name in glm5_jax.__all__)
    assert set(glm5_jax.__all__) <= set(dir(glm5_jax))


def test_import_loads_no_heavy_module(plain_env):
    """A launcher must be able to set flags for jax after `import glm5_jax`."""
    code = "import glm5_jax, sys; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.check_output([sys.executable, "-c", code], env=plain_env, text=True).split()
    heavy = {"jax", "flax", "orbax", "grain", "pyarrow", "matplotlib", "tokenizers"}
    assert not heavy & set(loaded)
