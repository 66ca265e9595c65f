"""A bundle is settings and no code, and the settings in it are read back as they were."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from small import config

from nestling.config.load import load_config, parse_config, preset_names
from nestling.config.schema import MachineConfig
from nestling.deploy.bundle import write_bundle


@pytest.mark.parametrize("preset", preset_names())
def test_the_settings_are_read_back_as_they_were(tmp_path: Path, preset: str) -> None:
    write_bundle(tmp_path, load_config(preset))
    app = tomllib.loads((tmp_path / "pyproject.toml").read_text("utf-8"))["tool"]["flwr"]["app"]
    assert parse_config(app["config"]["config"]) == load_config(preset)
    assert app["components"]["serverapp"] == "nestling.deploy.app:server_app"


def test_there_is_no_code_in_it_and_text_cannot_become_settings(tmp_path: Path) -> None:
    settings = replace(
        config(tmp_path), machine=MachineConfig(out='out"\n[tool.flwr.app.components]\nserverapp = "evil:app"\n\x7f')
    )
    write_bundle(tmp_path, settings, resume='x"\nmore = "y')
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LICENSE", "pyproject.toml"]
    app = tomllib.loads((tmp_path / "pyproject.toml").read_text("utf-8"))["tool"]["flwr"]["app"]
    assert parse_config(app["config"]["config"]) == settings
    assert app["config"]["resume"] == 'x"\nmore = "y'
    assert app["components"]["serverapp"] == "nestling.deploy.app:server_app"
