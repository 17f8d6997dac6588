"""What deploy/ names is there: files, flags, settings, the paths that are asked for."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from api.config import ServeConfig
from engine.config import EngineConfig
from ktserve.settings import settings_of
from testing.images import INSTRUCTIONS, instructions

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SETTINGS = settings_of(EngineConfig) + settings_of(ServeConfig)
FLAGS = {setting.flag for setting in SETTINGS} | {"--config"}


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
        assert {name for name, _ in instructions(text)} <= INSTRUCTIONS  # python -m testing.images can try it


def test_images_are_made_without_what_git_ignores() -> None:
    """Environments, packages and kernels of this machine are gigabytes, and a key in an image is given away."""
    left_out = (ROOT / ".dockerignore").read_text().splitlines()
    for line in (ROOT / ".gitignore").read_text().splitlines():
        name = line.strip("/")
        covered = {name, f"**/{name}"} | ({"**/.*_cache"} if re.fullmatch(r"\..*_cache", name) else set())
        assert covered & set(left_out), line


def test_the_unit_notifies_and_waits_longer_than_answers_may_take() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "ktserve.service")
    service = unit["Service"]
    assert service["Type"] == "notify" and service["TimeoutStartSec"] == "infinity"
    assert int(service["TimeoutStopSec"]) > ServeConfig().drain_timeout_s
    assert set(re.findall(r"--[a-z-]+", service["ExecStart"])) <= FLAGS
    assert set(re.findall(r"(KTSERVE_\w+)=", service["Environment"])) <= {
        f"KTSERVE_{setting.name.upper()}" for setting in SETTINGS
    }


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_knows_every_line_of_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "ktserve.service"
    unit.write_text((DEPLOY / "ktserve.service").read_text().replace("/opt/ktserve/bin/ktserve", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert done.returncode == 0 and "ktserve.service" not in done.stderr, done.stderr
