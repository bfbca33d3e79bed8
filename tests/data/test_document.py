"""Tests documents of several texts: nothing is lost, the order is fixed, and the split goes by part."""

import pytest

from glm5_jax.data.document import Books, Document, DocumentPart, Repositories, passages
from glm5_jax.data.sources import (
    SHAKESPEARE,
    SourceConfig,
    fingerprint,
    open_documents,
    open_source,
    stdlib_paths,
)

FILES = {
    "b/two.py": "2",
    "b/deep/three.py": "3\n",
    "a/one.py": "1",
    "alone.py": "0",
    "b.py": "b",
}


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_joins_files_of_repository_in_stable_order(tree):
    config = SourceConfig(kind="repositories", path=str(tree / "**" / "*.py"))
    texts = open_source(config)
    assert [texts[i] for i in range(len(texts))] == [
        "==> a/one.py <==\n1\n",
        "==> alone.py <==\n0\n",
        "==> b/deep/three.py <==\n3\n\n==> b/two.py <==\n2\n",
        "==> b.py <==\nb\n",
    ]
    paths = [tree / name for name in FILES]
    for order in (paths, paths[::-1]):
        source = Repositories(tree, order)
        assert [source[i] for i in range(4)] == [open_documents(config)[i] for i in range(4)]


def test_takes_repositories_from_fixed_folder_of_glob(tree):
    def names(*parts):
        documents = open_documents(
            SourceConfig(kind="repositories", path=str(tree.joinpath(*parts)))
        )
        return [[part.path for part in documents[i].threads[0]] for i in range(len(documents))]

    assert names("b", "**", "*.py") == [["deep/three.py"], ["two.py"]]
    assert names("*", "*.py") == [["a/one.py"], ["b/two.py"]]
    assert names("alone.py") == [["alone.py"]]


def test_divides_book_into_passages(tmp_path):
    text = "\n\n".join(f"{number} " + "x" * 3000 for number in range(5)) + "\n"
    (tmp_path / "book.txt").write_text(text)
    (tmp_path / "a.txt").write_text("short")
    assert [
        open_source(SourceConfig(kind="books", path=str(tmp_path / "*.txt")))[i] for i in (0, 1)
    ] == [
        "short",
        text,
    ]
    (thread,) = Books([tmp_path / "book.txt"])[0].threads
    assert [part.text for part in thread] == passages(text) and len(thread) == 5
    assert open_source(SourceConfig(kind="shakespeare_book"))[0] == SHAKESPEARE.read_text("utf-8")


def test_groups_every_standard_library_file_once():
    packages = open_documents(SourceConfig(kind="stdlib_packages"))
    files = open_source(SourceConfig(kind="stdlib"))
    parts = [part for i in range(len(packages)) for part in packages[i].threads[0]]
    assert sorted(part.text for part in parts) == sorted(files[i] for i in range(len(files)))
    assert len({part.path for part in parts}) == len(parts) == len(stdlib_paths())
    (json,) = [
        d for i in range(len(packages)) if (d := packages[i]).threads[0][0].path[:5] == "json/"
    ]
    assert [part.path for part in json.threads[0]] == [
        f"json/{name}.py" for name in ("__init__", "decoder", "encoder", "scanner", "tool")
    ]


def test_selects_parts_of_every_thread():
    document = Document(
        ((DocumentPart("a", "x"), DocumentPart("b")), (DocumentPart("c"), DocumentPart(""))),
        chunk=3,
    )
    assert document.num_characters == 3
    assert document.select(lambda text: text != "b") == Document(
        ((DocumentPart("a", "x"),), (DocumentPart("c"),)), 3
    )
    assert document.select(lambda text: text == "a").texts() == ("==> x <==\na\n",)
    assert document.select(lambda text: text == "") is None


def test_names_file_that_is_not_text(tree):
    (tree / "b" / "two.py").write_bytes(b"caf\xe9")
    for kind in ("books", "repositories"):
        source = open_source(SourceConfig(kind=kind, path=str(tree / "**" / "two.py")))
        with pytest.raises(
            ValueError, match=r"two.py is not UTF-8: byte 0xe9 at offset 3"
        ) as error:
            source[0]
        assert "\n" not in str(error.value)


def test_fingerprint_depends_on_texts_paths_and_interleaving():
    one = [Document.of("ab")]
    assert fingerprint(one) == fingerprint(["ab"])
    others = [
        [Document(((DocumentPart("a"), DocumentPart("b")),))],
        [Document(((DocumentPart("a"),), (DocumentPart("b"),)), 1)],
        [Document(((DocumentPart("a"),), (DocumentPart("b"),)), 2)],
        [Document(((DocumentPart("ab", "path"),),))],
    ]
    fingerprints = [fingerprint(source) for source in (one, *others)]
    assert len(set(fingerprints)) == len(fingerprints)
