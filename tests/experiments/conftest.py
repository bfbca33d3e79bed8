import pytest

from glm5_jax.metrics import charts


@pytest.fixture
def without_pictures(monkeypatch):
    """Draws no charts of findings, because each takes a third of a second; test_charts and test_findings draw some."""
    monkeypatch.setattr(charts, "line_chart", lambda *args, **options: "")
