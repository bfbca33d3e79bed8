"""The documentation names only what exists, and its figure shows what its script draws."""

import importlib.util
import re

import pytest

from tests.contracts import documentation, language
from tests.contracts.source_tree import ROOT, read

FIGURE = ROOT / "docs" / "figures" / "architecture.py"
WRONG = """# A page

`glm5_jax/model/nothing.py`, `experiments/pretrain.py:huge`, `rl.algorithm.losses.no_such_loss`, `rl.types.Reward.colour`,
`no_such_name_anywhere`, `--experiment.no_such_field_anywhere=1`, `python -m launch.nothing`,
`bash launch/nothing.sh`, `python -m launch.run --experiment=experiments/nothing.py:tiny`, `pip install '.[nothing]'`.
`Region` (`glm5_jax/model/mla.py`)
[gone](nothing.md) [no heading](index.md#nothing)

```bash
python -m launch.nothing_else
nothing --at=all
```
"""
RIGHT = """# A page

`glm5_jax/model/mla.py`, `model/mla`, `pallas_kernels/*/ref.py`, `experiments/pretrain.py:tiny`, `rl.types.Reward.value`,
`glm5_jax.parallel.mesh.Region`, `EngineConfig`, `index_topk`, `--experiment.train.steps=50`, `checkpoints/STEP`,
`{"path": "DIR"}`, `1e-6`, `python -m launch.run --experiment=experiments/sft.py:tiny,mixed --workdir=DIR`,
`Region.psum` in `glm5_jax/parallel/mesh.py`, `bash launch/test.sh slow -- tests/model -k rope`, `python -m pip install '.[cuda13]'`.
[a page](architecture.md) [a heading](rollout.md#failures) [elsewhere](https://example.org)

```bash
JAX_PLATFORMS=cpu python -m launch.compile --help  # a comment
```
"""


@pytest.fixture(scope="module", autouse=True)
def names():
    """Reads the source once, so that no test's call is charged with it."""
    documentation.source_names()


@pytest.mark.parametrize("path", documentation.pages(), ids=str)
def test_names_only_what_exists(path):
    problems = documentation.page_problems(path, read(path))
    assert not problems, "\n".join(problems)


def test_finds_names_that_do_not_exist():
    problems = documentation.page_problems(documentation.pages()[-1].with_name("page.md"), WRONG)
    assert len(problems) == 15, "\n".join(problems)


def test_accepts_names_that_exist():
    path = next(path for path in documentation.pages() if path.name == "index.md")
    assert documentation.page_problems(path, RIGHT) == []


def test_site_has_every_page():
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    written = [str(p.relative_to("docs")) for p in documentation.pages() if p.parts[0] == "docs"]
    assert sorted(listed) == sorted(written)


def test_draws_current_figure():
    spec = importlib.util.spec_from_file_location("architecture", FIGURE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.render() == module.FILE.read_text("utf-8"), f"run python {FIGURE}"


def test_glossary_explains_terms_with_their_places():
    entries = re.findall(
        r"(?ms)^- \*\*.*?(?=^- |^#|\Z)", (ROOT / "docs" / "glossary.md").read_text()
    )
    assert len(entries) >= 40
    assert not [entry for entry in entries if not documentation.spans(entry)]


def test_answers_where_things_are_in_three_hops():
    """README links the page, and the page names the file of each answer."""
    assert "docs/where.md" in read(documentation.pages()[0])
    answers = (ROOT / "docs" / "where.md").read_text().split("\n### ")[1:]
    assert len(answers) >= 10
    for answer in answers:
        paths = [
            span for span in documentation.spans(answer) if span in documentation.known_paths()
        ]
        assert paths, answer.splitlines()[0]


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert not [line for line in lines if len(line) > language.MAX_COLUMNS]
