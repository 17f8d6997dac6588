"""Installed for real, and typed in a folder whose own modules have the names of ours.

With KTSERVE_TEST_WHEEL (`make test-wheel`) into an empty environment, for which pip fetches what the wheel asks for and
in which it finds no compiler; else beside the packages that are here already.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from ktserve.__main__ import _PACKAGES
from testing.waiting import PATIENCE_S, eventually

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
OFFLINE = ("-q", "--no-deps", "--no-build-isolation")
SMALL = ("--cpu-threads", "1", "--pack-cache", "off")
BUILD_S = 1200  # the kernels may have to be compiled
FETCHES = bool(os.environ.get("KTSERVE_TEST_WHEEL"))
DECOY = "raise SystemExit('a module of the working directory was imported')\n"


pytestmark = pytest.mark.timeout(2 * BUILD_S)


def run(
    command: list[str], folder: Path, stdin: str = "", *, seconds: float = PATIENCE_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=folder, env=clean(**environment), input=stdin, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def clean(**more: str) -> dict[str, str]:
    """No settings of this shell, no path to the source tree; cmake and ninja of this environment."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("KTSERVE_")}
    return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}", **more}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of this source tree, with what its build folder has compiled already."""
    folder = tmp_path_factory.mktemp("wheel")
    run([*PIP, "wheel", *OFFLINE, "--wheel-dir", str(folder), str(ROOT)], folder, seconds=BUILD_S)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment into which pip installed ktserve."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    python = folder / "bin" / "python"
    pip = [*PIP, "--python", str(python)]
    if FETCHES:
        flags = ["-q", "--only-binary=:all:", "--constraint", str(ROOT / "constraints.txt")]
        run([*pip, "install", *flags, str(wheel)], folder, seconds=BUILD_S, PATH=str(folder / "bin"))
        run([*pip, "check"], folder)
    else:
        (site / "shared.pth").write_text("\n".join(p for p in sys.path if p.endswith("-packages")) + "\n")
        run([*pip, "install", *OFFLINE, str(wheel)], folder)
    assert (site / "ktserve").is_dir() and not list(site.glob("*editable*"))
    return python.parent


def decoys(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(DECOY)


def test_every_command_runs_our_code_wherever_it_is_typed(installed: Path, tmp_path: Path) -> None:
    decoys(tmp_path, *_PACKAGES, "torch", "yaml", "random", "importlib")
    ktserve = str(installed / "ktserve")
    (adapter,) = installed.parent.glob("lib/*/site-packages/demo/adapters/json")
    with ThreadPoolExecutor() as side_by_side:
        planned = side_by_side.submit(run, [ktserve, "plan", *SMALL], tmp_path)
        inspected = side_by_side.submit(run, [ktserve, "adapters", "inspect", str(adapter)], tmp_path)
        answered = side_by_side.submit(run, [ktserve, "chat", *SMALL], tmp_path, "What is 2 + 3?\n")
        serve(ktserve, tmp_path)
    assert "memory plan" in planned.result().stdout
    assert "json" in inspected.result().stdout
    assert answered.result().stdout.strip() == "2 + 3 = 5."


def test_the_python_path_does_not_replace_our_code(installed: Path, tmp_path: Path) -> None:
    decoys(tmp_path, *_PACKAGES - {"ktserve"})
    path = f"{os.pathsep}{tmp_path}"  # its empty part is the working directory
    assert "memory plan" in run([str(installed / "ktserve"), "plan", *SMALL], tmp_path, PYTHONPATH=path).stdout


def serve(ktserve: str, folder: Path) -> None:
    """One answer from `ktserve serve`, and its end."""
    log = folder / "log.txt"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [ktserve, "serve", "--port", "0", *SMALL], cwd=folder, env=clean(), stdout=sink, stderr=sink
        )
    try:
        eventually(lambda: "\nat  " in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        url = next(line.split()[1] for line in log.read_text().splitlines() if line.startswith("at  "))
        eventually(lambda: is_ready(url))
        body = {"model": "demo", "prompt": "Once", "max_tokens": 4}
        answer = httpx.post(f"{url}/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url.replace("/v1", "/health")).status_code == 200
    return False


def test_the_load_test_starts_our_server(installed: Path, tmp_path: Path) -> None:
    decoys(tmp_path, "api", "engine", "rules")
    flags = ["--users", "1", "--duration", "1", "--max-tokens", "8", "--", *SMALL]
    command = [str(installed / "python"), "-m", "ktserve", "loadtests", *flags]
    if not FETCHES:
        assert "TTFT" in run(command, tmp_path).stdout
        return
    done = subprocess.run(command, cwd=tmp_path, env=clean(), capture_output=True, text=True)  # locust is an extra
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith("pip install 'ktserve[loadtests]'")


def test_a_wheel_holds_what_runs(wheel: Path) -> None:
    """All Python of our packages, the kernels, the rules and the demo model; no sources of C++ kernels, no tests."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    kernels = {name for name in names if name.startswith("native/_native.") and name.endswith(".so")}
    kept = (
        "*.py",
        "*.pyi",
        "*.yaml",
        "*.cu",
        "*.gguf",
        "planning/*.json",
        "adapters/*/*.json",
        "adapters/*/*.safetensors",
        "static/*",
    )
    wanted = {
        str(path.relative_to(ROOT))
        for package in _PACKAGES
        for pattern in kept
        for path in (ROOT / package).rglob(pattern)
    }
    assert len(kernels) == 1
    assert names - kernels == wanted
