"""A model's file that is cut off, refilled, written to or grows while the model loads: the load is refused with the
file's name, in this process, and never ends it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ModelFileError
from engine.files.gguf.header import read_header
from engine.model.load import Loader
from testing.harness import Harness
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import save_hf, tiny_model
from tests.native.isas import ISAS

LAYERS = 3
FORMS = ["safetensors", "shards", "Q4_K", "TQ1_0"]  # the last has no packed form: blocks, and dequantised


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    model = tiny_model(5, num_hidden_layers=LAYERS, hidden_size=256, moe_intermediate_size=256)
    save_hf(model, folder / "safetensors")
    save_hf(model, folder / "shards", sharded=True)
    for kind in FORMS[2:]:
        (folder / kind).mkdir()
        save_gguf(model, folder / kind / "m.gguf", expert_type=kind, types={"token_embd.weight": kind})
    return {form: folder / form for form in FORMS}


def cut(file: Path, share: float) -> None:
    os.truncate(file, int(file.stat().st_size * share))


def refill(file: Path, share: float) -> None:
    """As long as it was, zeros at its end."""
    size = file.stat().st_size
    cut(file, share)
    os.truncate(file, size)


def grow(file: Path, share: float) -> None:
    with file.open("ab") as end:
        end.write(bytes(1 + int(1000 * share)))


def overwrite(file: Path, share: float) -> None:
    with file.open("r+b") as whole:
        whole.seek(int((file.stat().st_size - 1) * share))
        whole.write(b"x")


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    form=st.sampled_from(FORMS),
    rules=st.sampled_from(["reference", None] if ISAS else ["reference"]),
    damage=st.sampled_from([cut, cut, refill, grow, overwrite]),
    share=st.floats(0, 0.99),
    moment=st.integers(0, LAYERS),
)
def test_changed_while_loading(
    models: dict[str, Path],
    tmp_path: Path,
    form: str,
    rules: str | None,
    damage: Callable[[Path, float], None],
    share: float,
    moment: int,
) -> None:
    """`moment`: the layer before which it happens; the last: the head."""
    folder = tmp_path / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(models[form], folder)
    file = sorted(folder.glob("*.gguf")) + sorted(folder.glob("*.safetensors"))
    begun, layer, head = 0, Loader.layer, Loader.head

    def now() -> None:
        nonlocal begun
        if begun == moment:
            damage(file[-1], share)
            stat = file[-1].stat()
            os.utime(file[-1], ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))  # clocks of file systems are coarse
        begun += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "layer", lambda self, index: (now(), layer(self, index))[1])
        patch.setattr(Loader, "head", lambda self: (now(), head(self))[1])
        with pytest.raises(ModelFileError) as caught:
            Harness(folder, rules=rules, pack_cache="off").close()
    assert begun > moment
    message = str(caught.value)
    if "not finite" not in message or damage not in (refill, overwrite):
        assert file[-1].name in message and ("became shorter" in message or "was changed" in message)


def test_header_cut_at_every_read(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GGUF's, read a few bytes at a time."""
    import engine.files.gguf.header as header
    import engine.files.regular as regular

    monkeypatch.setattr(header, "_READ_BYTES", 64)
    file, whole = tmp_path / "m.gguf", (models["Q4_K"] / "m.gguf").read_bytes()
    preadv, reads, at = os.preadv, 0, 0

    def cut_first(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal reads
        reads += 1
        if reads == at:
            os.truncate(file, offset + 1)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(regular.os, "preadv", cut_first)
    while reads >= at:
        at, reads = at + 1, 0
        file.write_bytes(whole)
        try:
            read_header(file)
        except ModelFileError as error:
            assert "m.gguf: became shorter" in str(error)
    assert at > 5
