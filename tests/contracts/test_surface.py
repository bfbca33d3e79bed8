"""What users write: the public names, and that importing them costs little."""

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


def test_the_surface_is_frozen():
    names = list(glm5_jax.__all__)
    assert names == [name for name in SURFACE if name in names]


def test_every_public_name_is_there():
    assert all(getattr(glm5_jax, name) is not None for name in glm5_jax.__all__)
    assert set(glm5_jax.__all__) <= set(dir(glm5_jax))


def test_importing_it_loads_nothing_heavy(plain_env):
    """A launcher must be able to set flags for jax after `import glm5_jax`."""
    code = "import glm5_jax, sys; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.check_output([sys.executable, "-c", code], env=plain_env, text=True).split()
    heavy = {"jax", "flax", "orbax", "grain", "pyarrow", "matplotlib", "tokenizers"}
    assert not heavy & set(loaded)
