"""What deploy/ names is there: files, flags, settings, the paths that are asked for."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import yaml

from api.config import ServeConfig
from engine.config import EngineConfig
from ktserve.settings import settings_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FLAGS = {setting.flag for setting in settings_of(EngineConfig) + settings_of(ServeConfig)} | {"--config"}


def test_compose_names_files_and_flags_that_are_there() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    assert (DEPLOY / services["ktserve"]["build"]["context"] / services["ktserve"]["build"]["dockerfile"]).is_file()
    assert {word for word in services["ktserve"]["command"] if word.startswith("--")} <= FLAGS
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith(".") else source in compose["volumes"], volume
        assert set(service.get("secrets", ())) <= set(compose["secrets"])
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"][0].partition(":")[0] in services
    for path in (DEPLOY / "grafana").iterdir():
        assert yaml.safe_load(path.read_text())["apiVersion"] == 1


def test_images_run_as_nobody_s_root_and_ask_for_health() -> None:
    for path in DEPLOY.glob("Dockerfile.*"):
        text = path.read_text()
        assert (
            text.rindex("USER ktserve") < text.index("ENTRYPOINT") and "/health'" in text and "VOLUME /models" in text
        )
        assert set(re.findall(r'"(--[a-z-]+)"', text)) <= FLAGS


def test_the_unit_notifies_and_waits_longer_than_answers_may_take() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "ktserve.service")
    service = unit["Service"]
    assert service["Type"] == "notify" and service["TimeoutStartSec"] == "infinity"
    assert int(service["TimeoutStopSec"]) > ServeConfig().drain_timeout_s
    assert set(re.findall(r"--[a-z-]+", service["ExecStart"])) <= FLAGS
