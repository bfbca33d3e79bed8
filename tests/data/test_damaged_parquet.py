"""Parquet files that are damaged or have other columns raise one error that names the file."""

import pyarrow
import pyarrow.parquet
import pytest

from glm5_jax.data.sources import SourceConfig, open_source


def _written(path, table) -> SourceConfig:
    pyarrow.parquet.write_table(table, path)
    return SourceConfig(kind="parquet", path=str(path))


def test_rejects_file_that_is_cut_off(tmp_path):
    config = _written(tmp_path / "a.parquet", pyarrow.table({"text": ["x" * 100] * 100}))
    assert len(open_source(config)) == 100
    content = (tmp_path / "a.parquet").read_bytes()

    for damaged in (content[:-20], content[:4] + bytes(40) + content[44:], b"", b"PAR1"):
        (tmp_path / "a.parquet").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.parquet is no complete parquet file"):
            open_source(config)[0]


@pytest.mark.parametrize(
    ("names", "columns", "message"),
    [
        (["text", "text"], [["a"], ["b"]], "has 2 columns 'text'"),
        (["other"], [["a"]], "has 0 columns 'text'"),
        (["text"], [[b"a"]], "is binary; it must be string"),
        (["text"], [[["a"]]], "it must be string"),
        (["text"], [[None]], "it must be string|empty entries"),
    ],
)
def test_rejects_columns_that_hold_no_texts(tmp_path, names, columns, message):
    table = pyarrow.Table.from_arrays([pyarrow.array(column) for column in columns], names)
    config = _written(tmp_path / "a.parquet", table)

    with pytest.raises(ValueError, match=message):
        open_source(config)
