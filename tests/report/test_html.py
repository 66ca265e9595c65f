"""The page: one file without scripts or addresses, in which nothing that came from a run is alive."""

import getpass
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nestling.report.compare import compare
from nestling.report.html import render, write_report
from nestling.report.plots import accuracy_against_bytes, figure_files
from nestling.runs.files import printable

HOSTILE = [
    "<script>alert(1)</script>",
    '"onload="alert(1)',
    "</pre></td></style><img src=x onerror=alert(1)>",
    "{{7*7}}",
    "{% raw %}",
    "\u202egnp.exe",
    "\x1b[31mred",
    "$\\frac{$",
    "javascript:alert(1)",
    "</script><script>alert(1)</script>",
    "=cmd|' /C calc'!A0",
    "' onmouseover='alert(1)",
    "</title><base href=//evil.example>",
]
ELEMENTS = (
    "html head meta title style body header h1 h2 h3 p ul li div table thead tbody tr th td figure figcaption "
    "dl dt dd pre details summary svg g defs path use clippath rect"
)


class Page(HTMLParser):
    """Collects the elements, the attributes and the text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def hostile_page(result, run_of, text):
    made = result(text, codec=text, task=text, name=text, base_hash=text, rejected={text: 2})
    config = f"x = 1 # {text}"
    return render(compare([run_of(made, config=config, reason=text), run_of(made, config=config, reason=text)]))


@pytest.mark.parametrize("text", HOSTILE)
def test_cat_091_what_came_from_a_run_is_text(result, run_of, text):
    html = hostile_page(result, run_of, text)
    page = Page(html)
    assert set(page.tags) <= set(ELEMENTS.split())
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "action", "srcdoc")]
    assert all(value.startswith("#") for name, value in page.attributes if name.endswith("href"))
    assert not any(character in html for character in ("\x1b", "\u202e"))
    assert page.text.count(printable(text)) > 10  # shown as it is, and in every place


def test_cat_091_the_page_stands_alone(result, run_of, tmp_path):
    found = write_report([run_of(result()), run_of(result("fedavg"))], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert len(found.runs) == 2
    assert "default-src 'none'" in html
    assert "://" not in html
    assert "<script" not in html
    assert "@import" not in html
    assert "url(" not in re.sub(r"url\(#\w+\)", "", html)
    for part in (
        "Results",
        "Accuracy against bytes",
        "What was run",
        "Bytes of each kind",
        "without a usable reply",
        "Environment",
    ):
        assert part in html


def test_the_numbers_are_in_it(result, run_of):
    text = text_of(run_of(result(rejected={"not_finite": 3})))
    for part in ("flite, int4-message", "90.0", "648 B", "5,120 B", "35,376 B", "712 B", "3 × not_finite", "CPython"):
        assert part in text


def text_of(path):
    return " ".join(Page(render(compare([path]))).text.split())


def test_who_sent_nothing_is_kept_apart_from_what_was_rejected(result, run_of):
    text = text_of(run_of(result(rejected={"not_finite": 3, "no_data": 2, "loss_not_finite": 1})))
    assert "Declined, nothing was sent: 1 × loss_not_finite, 2 × no_data Rejected: 3 × not_finite round" in text
    assert "Rejected:" not in text_of(run_of(result(rejected={"no_data": 2}), reason=""))
    assert "Declined" not in text_of(run_of(result(rejected={"not_finite": 3})))


def test_a_run_without_rejections_or_environment(result, run_of):
    path = run_of(result(), reason="")
    (path / "env.json").unlink()
    assert "None." in render(compare([path]))


def test_cat_090_092_homes_and_secrets_stay_out(result, run_of):
    config = f'path = "{Path.home()}/x"\nother = "/home/somebody/y"\ntoken = "abcdef"\nurl = "https://me:pw@host/"\n'
    html = render(compare([run_of(result(), config=config)]))
    assert "~/x" in html
    for secret in (str(Path.home()) + "/", "somebody", "abcdef", "pw@"):
        assert secret not in html
    if len(getpass.getuser()) > 4:
        assert getpass.getuser() not in html


def test_a_client_that_is_a_secret_is_called_so(result, run_of):
    folder = run_of(result(), reason="late")
    rows = (folder / "bytes.jsonl").read_text()
    (folder / "bytes.jsonl").write_text(rows.replace('"client": 0', '"client": null'))
    assert "<td>1</td><td>secret</td><td>" in render(compare([folder]))


def test_many_rejections_are_cut_with_their_number(result, run_of):
    html = render(compare([run_of(result(rounds=30))]))
    assert "and 10 more" in html


def test_cat_092_neither_page_nor_figures_name_a_home_or_a_user(result, run_of, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/annemarie")
    monkeypatch.setenv("USER", "annemarie")
    monkeypatch.setenv("LOGNAME", "annemarie")
    place = "/home/annemarie/runs/demo"
    path = run_of(result(run_dir=place, task=f"text of {place}"), config=f'out = "{place}"\n')
    (path / "command.txt").write_text(f"nestling run {place}/x.toml\n")
    comparison = write_report([path], tmp_path / "report.html")
    run = comparison.runs[0]
    files = accuracy_against_bytes([run.result], [run.metrics], path / "a")
    assert {file.suffix for file in files} == {".png", ".svg", ".csv"}
    for file in (tmp_path / "report.html", *files):
        data = file.read_bytes()
        for trace in (b"annemarie", str(tmp_path).encode(), b"file://", str(Path(__file__).parents[2]).encode()):
            assert trace not in data, (file.name, trace)
    assert "~/runs/demo" in (tmp_path / "report.html").read_text()


def test_cat_091_the_figure_and_its_numbers_are_inert(result, run_of):
    for text in (HOSTILE[0], HOSTILE[-4], HOSTILE[-3]):  # a script, one that ends another, a formula
        run = compare([run_of(result(text, codec=text, name=text, task=text))]).runs[0]
        files = figure_files([run.result], [run.metrics])
        page = Page(files["svg"].decode())
        assert not {"script", "foreignobject", "image", "a", "iframe"} & set(page.tags)
        assert not [name for name, _ in page.attributes if name.startswith("on")]
        assert all(line.lstrip('"')[:1] not in "=+-@" for line in files["csv"].decode().splitlines() if line)
