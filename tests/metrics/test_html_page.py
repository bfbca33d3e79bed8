"""Tests of HTML pages, whose text is escaped and whose cells and parts are not."""

from glm5_jax.metrics import html_page


def test_escapes_text():
    assert (
        html_page.text_table([["a<b", "c"]]) == "<table><tr><td>a&lt;b</td><td>c</td></tr></table>"
    )
    assert html_page.section("a&b", "<p>") == "<section><h2>a&amp;b</h2><p></section>"
    assert html_page.figure("<svg/>", "a>b").endswith("<figcaption>a&gt;b</figcaption></figure>")
    page = html_page.render("<t>", "<s>", [])
    assert "<title>&lt;t&gt;</title>" in page and "<h1>&lt;t&gt;</h1><p>&lt;s&gt;</p>" in page


def test_writes_page_without_empty_parts(tmp_path):
    path = html_page.write(tmp_path / "report" / "index.html", "title", "", ["", "<i>1</i>", ""])
    assert "</header>\n<i>1</i>\n</body>" in path.read_text()


def test_opens_details_by_flag():
    assert html_page.details("more", "", is_open=True).startswith("<details open><summary>more<")
    assert html_page.details("more", "").startswith("<details><summary>")
