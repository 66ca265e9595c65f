"""The examples are what the package makes, and their pages lead somewhere."""

import re
from dataclasses import replace
from pathlib import Path

from nestling.config.load import load_config
from nestling.deploy.bundle import write_bundle

FLOWER = Path(__file__).parents[1] / "examples" / "flower"


def test_the_app_for_flower_is_what_write_bundle_makes(tmp_path: Path) -> None:
    """If it differs: make it anew, by these two lines."""
    config = load_config("flite-digits")
    write_bundle(tmp_path, replace(config, task=replace(config.task, clients=3)))
    made, kept = ({p.name: p.read_bytes() for p in folder.iterdir()} for folder in (tmp_path, FLOWER / "flite-digits"))
    assert kept == made


def test_links_lead_somewhere() -> None:
    page = FLOWER / "README.md"
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target
