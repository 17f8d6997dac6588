"""Models by their names, from a hub of our own on loopback: what is fetched, resumed, refused; headers for a plan."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.hub.listing import SAFETENSORS, HubFile, Listing, choose, options
from api.hub.names import HubName, parse_name
from engine.errors import UserError
from testing import forked
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import save_hf, tiny_model
from testing.waiting import PATIENCE_S
from tests.api.conftest import environment
from tests.hub.server import COMMIT, TOKEN, Hub, serving

PLAIN, SPLIT, FOLDER, ADAPTER = "org/plain", "org/split-GGUF", "org/folder", "org/adapter"
SNAPSHOT = f"snapshots/{COMMIT}"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    root = tmp_path_factory.mktemp("repos")
    model = tiny_model()
    for name in ("plain", "split/Q8_0", "folder"):
        (root / name).mkdir(parents=True)
    save_gguf(model, root / "plain/tiny-Q8_0.gguf")
    save_gguf(model, root / "split/Q8_0/tiny-Q8_0.gguf", split=9)
    save_gguf(model, root / "split/tiny-Q4_0.gguf", expert_type="Q4_0")
    save_hf(model, root / "folder", sharded=True)
    found = {f"org/{name}": contents(root / name) for name in ("plain", "folder")}
    found[SPLIT] = contents(root / "split") | {"mmproj-F16.gguf": b"?" * 100, "README.md": b"a model"}
    found["org/folder"] |= {"original.bin": b"?" * 5000, "other/model.safetensors": b"?" * 5000}
    found[ADAPTER] = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x" * 300, "optimizer.pt": b"y" * 999}
    return found


@pytest.fixture
def hub(repos: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    with serving(Hub({name: dict(files) for name, files in repos.items()})) as hub:
        yield hub


class Here:
    """This machine, with an empty cache."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        self.hub, self.folder = hub, folder

    def ktserve(
        self, *argv: str, engine: bool = False, program: str = "api.cli.main", **more: str
    ) -> subprocess.CompletedProcess[str]:
        variables = environment()
        if engine:
            del variables["KTSERVE_ENGINE_COMMAND"]
        variables = {key: value for key, value in variables.items() if not key.startswith("HF_")}
        variables |= {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.folder / "hf"), **more}
        return forked.run(program, argv, variables, timeout=PATIENCE_S)

    def pulled(self, *argv: str, **more: str) -> Path:
        done = self.ktserve("pull", *argv, **more)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())

    def refused(self, *argv: str, program: str = "api.cli.main", **more: str) -> str:
        """The one line that it says."""
        done = self.ktserve(*argv, program=program, **more)
        assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("error: "), done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr.splitlines()[-1]

    def cached(self, repo: str) -> set[str]:
        at = self.folder / "hf/hub" / f"models--{repo.replace('/', '--')}" / SNAPSHOT
        return {str(p.relative_to(at)) for p in at.rglob("*") if p.is_file()}


@pytest.fixture
def here(hub: Hub, tmp_path: Path) -> Here:
    return Here(hub, tmp_path)


def test_only_what_is_needed_is_fetched_and_once(here: Here) -> None:
    path = here.pulled(f"hf:{PLAIN}")
    assert path.read_bytes() == here.hub.repos[PLAIN]["tiny-Q8_0.gguf"]
    sent = dict(here.hub.sent)
    assert here.pulled(f"hf:{PLAIN}") == path and here.hub.sent == sent

    path = here.pulled(f"hf:{SPLIT}:q8_0")
    assert path.name == f"tiny-Q8_0-00001-of-{len(here.cached(SPLIT)):05d}.gguf"
    assert here.cached(SPLIT) == {name for name in here.hub.repos[SPLIT] if name.startswith("Q8_0/")}

    folder = here.pulled(f"hf:{FOLDER}@main")
    wanted = {n for n in here.hub.repos[FOLDER] if n.startswith("model") or n.endswith("config.json")}
    assert here.cached(FOLDER) == wanted and (folder / "config.json").is_file()

    assert (here.pulled(f"hf:{ADAPTER}") / "adapter_config.json").is_file()
    assert here.cached(ADAPTER) == {"adapter_config.json", "adapter_model.safetensors"}


def test_settings_may_be_names_on_the_hub(here: Here) -> None:
    done = here.ktserve("check", f"hf:{PLAIN}", "--skip-tokenizer", "--adapters", f"law=hf:{ADAPTER}")
    assert done.returncode == 0, done.stderr
    config = json.loads(done.stdout)["config"]
    assert Path(config["model"]).name == "tiny-Q8_0.gguf" and config["served_model_name"] == "plain"
    name, _, path = config["adapters"][0].partition("=")
    assert name == "law" and (Path(path) / "adapter_config.json").is_file()


@pytest.mark.parametrize("command", ["check", "plan"])
def test_with_weights_of_another_name_only_what_lies_beside_them_is_fetched(here: Here, command: str) -> None:
    plans = ("--max-model-len", "64") if command == "plan" else ("--skip-tokenizer",)
    done = here.ktserve(command, f"hf:{FOLDER}", "--gguf", f"hf:{PLAIN}", *plans, engine=command == "plan")
    assert done.returncode == 0, done.stderr
    wanted = {name for name in here.hub.repos[FOLDER] if name.endswith("config.json")}
    assert here.cached(FOLDER) == (wanted if command == "check" else set())
    assert not any(name.startswith("model") for name in map(str, here.hub.sent))


def test_with_a_name_for_several_forms_of_weights_a_plan_is_a_table(here: Here) -> None:
    table = here.ktserve("plan", f"hf:{FOLDER}", "--gguf", f"hf:{SPLIT}", "--max-model-len", "64", engine=True)
    assert [line.split()[0] for line in table.stdout.splitlines()[:3]] == ["form", "Q4_0", "Q8_0"], table.stderr


def test_a_plan_reads_headers_and_nothing_else(here: Here) -> None:
    for name, repo in ((f"hf:{PLAIN}", PLAIN), (f"hf:{SPLIT}:Q8_0", SPLIT), (f"hf:{FOLDER}", FOLDER)):
        here.hub.sent.clear()
        done = here.ktserve("plan", name, "--max-model-len", "64", engine=True)
        assert done.returncode == 0, done.stderr
        assert "KV cache" in done.stdout and "dense weights" in done.stdout
        assert not here.cached(repo)
    assert all(span for method, path, span, _ in here.hub.asked if path.startswith("/blob/") and method == "GET")


def test_a_plan_of_a_large_file_fetches_its_beginning(here: Here) -> None:
    whole = here.hub.repos[PLAIN]["tiny-Q8_0.gguf"]
    here.hub.repos[PLAIN]["tiny-Q8_0.gguf"] = whole + bytes(64 << 20)
    assert here.ktserve("plan", f"hf:{PLAIN}", "--max-model-len", "64", engine=True).returncode == 0
    assert here.hub.sent["tiny-Q8_0.gguf"] <= 2 << 20


def test_a_hub_without_ranges_is_not_read_whole(here: Here) -> None:
    here.hub.ranges = False
    here.hub.repos[PLAIN]["tiny-Q8_0.gguf"] += bytes(8 << 20)
    assert "cannot send parts of files: type: ktserve pull" in here.refused("plan", f"hf:{PLAIN}")


def test_a_broken_transfer_goes_on_where_it_ended(here: Here) -> None:
    size = len(here.hub.repos[PLAIN]["tiny-Q8_0.gguf"])
    here.hub.cut = [size // 2, size // 4]
    path = here.pulled(f"hf:{PLAIN}")
    assert path.read_bytes() == here.hub.repos[PLAIN]["tiny-Q8_0.gguf"]
    assert here.hub.sent["tiny-Q8_0.gguf"] == size  # no byte twice


def test_a_run_that_was_ended_is_resumed_by_the_next(here: Here) -> None:
    whole = here.hub.repos[PLAIN]["tiny-Q8_0.gguf"]
    blobs = here.folder / "hf/hub" / f"models--{PLAIN.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(whole).hexdigest()}.ktserve-part").write_bytes(whole[:1000])
    assert here.pulled(f"hf:{PLAIN}").read_bytes() == whole
    assert here.hub.sent["tiny-Q8_0.gguf"] == len(whole) - 1000


def test_without_ranges_a_file_is_fetched_from_its_start_again(here: Here) -> None:
    whole = here.hub.repos[PLAIN]["tiny-Q8_0.gguf"]
    here.hub.ranges, here.hub.cut = False, [len(whole) // 2]
    assert here.pulled(f"hf:{PLAIN}").read_bytes() == whole


def test_a_hub_that_always_breaks_off_is_one_line(here: Here) -> None:
    here.hub.cut = [0] * 99
    said = here.refused("pull", f"hf:{PLAIN}", program="tests.hub.hurried")
    assert "did not come" in said or "run the same command again" in said


def test_damaged_content_is_refused_and_fetched_again(here: Here) -> None:
    whole = here.hub.repos[PLAIN]["tiny-Q8_0.gguf"]
    here.hub.damage["tiny-Q8_0.gguf"] = whole[:-1] + bytes([whole[-1] ^ 1])
    assert "another SHA-256" in here.refused("pull", f"hf:{PLAIN}")
    here.hub.damage.clear()
    assert here.pulled(f"hf:{PLAIN}").read_bytes() == whole


def test_private_and_gated_repositories_need_the_token_which_other_hosts_never_see(here: Here) -> None:
    here.hub.private, here.hub.gated = {PLAIN}, {FOLDER}
    assert "type: hf auth login" in here.refused("pull", f"hf:{PLAIN}")
    assert "accept its terms at" in here.refused("pull", f"hf:{FOLDER}")
    assert here.pulled(f"hf:{PLAIN}", HF_TOKEN=TOKEN).is_file()
    assert here.ktserve("plan", f"hf:{FOLDER}", "--max-model-len", "64", engine=True, HF_TOKEN=TOKEN).returncode == 0
    assert not any(key for _, path, _, key in here.hub.asked if path.startswith("/blob/"))


def test_what_cannot_be_fetched_is_one_line(here: Here) -> None:
    for name, part in (
        ("hf:org/nothing", "no such repository"),
        (f"hf:{PLAIN}@v9", "has no branch, tag or commit v9"),
        (f"hf:{SPLIT}", f"name one: hf:{SPLIT}:Q"),
        (f"hf:{SPLIT}:Q2_K", f"there is no Q2_K; name one of: hf:{SPLIT}:Q"),
        ("hf:plain", "write hf:ORG/REPO"),
    ):
        assert part in here.refused("pull", name), name
    assert "it holds an adapter: --adapters NAME=" in here.refused("serve", f"hf:{ADAPTER}")
    assert "adapter_config.json is missing: no adapter" in here.refused(
        "serve", f"hf:{PLAIN}", "--adapters", f"a=hf:{PLAIN}"
    )
    here.hub.fault = 403
    assert "answered 403: type: hf auth login" in here.refused("pull", f"hf:{PLAIN}")


def test_a_cached_model_is_served_without_the_hub(here: Here) -> None:
    path = here.pulled(f"hf:{PLAIN}")
    asked = len(here.hub.asked)
    flags = ("check", f"hf:{PLAIN}", "--skip-tokenizer")
    done = here.ktserve(*flags, HF_HUB_OFFLINE="1")
    assert json.loads(done.stdout)["config"]["model"] == str(path) and len(here.hub.asked) == asked
    done = here.ktserve(*flags, HF_ENDPOINT="http://127.0.0.1:9")
    assert json.loads(done.stdout)["config"]["model"] == str(path)
    assert "note: hf:org/plain" in done.stderr and "the cache's" in done.stderr
    for there in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        assert here.pulled(f"hf:{PLAIN}", **there) == path
        plan = here.ktserve("plan", f"hf:{PLAIN}", "--max-model-len", "64", engine=True, **there)
        assert plan.returncode == 0 and "KV cache" in plan.stdout, plan.stderr
    assert "HF_HUB_OFFLINE is set" in here.refused("pull", f"hf:{FOLDER}", HF_HUB_OFFLINE="1")


def test_models_lists_the_cache(here: Here) -> None:
    assert "holds no models" in here.ktserve("models", engine=True).stdout
    for name in (f"hf:{PLAIN}", f"hf:{SPLIT}:Q4_0", f"hf:{FOLDER}", f"hf:{ADAPTER}"):
        here.pulled(name)
    refs = here.folder / f"hf/hub/models--{ADAPTER.replace('/', '--')}/refs/main"
    refs.unlink()  # as of a revision that was given by its commit
    said = here.ktserve("models", engine=True).stdout
    lines = {line.split()[0]: line for line in said.splitlines()}
    assert "qwen3_moe" in lines[f"hf:{PLAIN}"] and f"ktserve serve hf:{FOLDER}" in lines[f"hf:{FOLDER}"]
    assert "--adapters NAME=" in lines[f"hf:{ADAPTER}@{COMMIT}"] and f"hf:{SPLIT}" in lines


def test_a_disk_without_room_is_refused_before_a_byte_comes(
    here: Here, monkeypatch: pytest.MonkeyPatch, repos: dict[str, dict[str, bytes]]
) -> None:
    from api.hub import fetch

    class Full:
        free = 10

    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda at: Full)
    listing = Listing(HubName(PLAIN), COMMIT, {"a-Q8_0.gguf": HubFile("a-Q8_0.gguf", 11, "0" * 64)})
    with pytest.raises(UserError, match="set HF_HOME"):
        fetch._check_disk(listing, list(listing.files.values()))
    fetch._check_disk(listing, [])


QUANTS = ("Q4_K_M", "IQ2_XXS", "UD-Q3_K_XL", "BF16", "MXFP4_MOE", "q8_0", "Q4_0")


@given(
    quants=st.sets(st.sampled_from(QUANTS), min_size=1),
    parts=st.integers(1, 4),
    folders=st.booleans(),
    more=st.booleans(),
)
def test_options_hold_every_split_and_no_other_file(quants: set[str], parts: int, folders: bool, more: bool) -> None:
    names: dict[str, set[str]] = {}
    for quant in quants:
        at = f"{quant}/" if folders else ""
        ends = [""] if parts == 1 else [f"-{i:05d}-of-{parts:05d}" for i in range(1, parts + 1)]
        names[quant] = {f"{at}Model-30B-A3B-{quant}{end}.gguf" for end in ends}
    files = {name: HubFile(name, 7) for group in names.values() for name in group}
    if more:
        files |= {name: HubFile(name, 1) for name in ("mmproj-BF16.gguf", "model-imatrix.gguf", "README.md")}
    listing = Listing(HubName("a/b"), COMMIT, files)
    assert {o.label: {f.name for f in o.files} for o in options(listing)} == names
    for quant in quants:
        chosen = choose(Listing(HubName("a/b", quant.lower()), COMMIT, files))
        assert {f.name for f in chosen.files} == names[quant] and chosen.main == min(names[quant])
    if parts > 1:
        lost = dict(files)
        del lost[min(names[min(quants)])]
        with pytest.raises(UserError, match="parts are missing"):
            choose(Listing(HubName("a/b", min(quants)), COMMIT, lost))


def test_safetensors_and_gguf_side_by_side_are_two_forms() -> None:
    names = ("model.safetensors", "config.json", "tokenizer.json", "x-Q4_0.gguf", "training_args.bin")
    listing = Listing(HubName("a/b"), COMMIT, {name: HubFile(name, 5) for name in names})
    assert [o.label for o in options(listing)] == ["Q4_0", SAFETENSORS]
    with pytest.raises(UserError, match="several forms"):
        choose(listing)


@given(
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,20}/[A-Za-z0-9][A-Za-z0-9_-]{0,20}", fullmatch=True),
    st.none() | st.sampled_from(QUANTS),
    st.just("main") | st.from_regex(r"[A-Za-z0-9]{1,12}", fullmatch=True),
)
def test_names_are_read_as_they_are_written(repo: str, quant: str | None, revision: str) -> None:
    name = HubName(repo, quant, revision)
    assert parse_name(str(name), "model") == name


@given(st.text(st.sampled_from("ab/:@.-\\\0 ~"), max_size=12))
def test_other_names_are_refused(text: str) -> None:
    try:
        name = parse_name(f"hf:{text}", "model")
    except UserError as error:
        assert "write hf:ORG/REPO" in str(error)
    else:
        assert ".." not in str(name) and not os.path.isabs(name.repo) and name.repo.count("/") == 1


@pytest.mark.parametrize("name", ["../x.gguf", "/etc/x.gguf", "a/../../x.gguf", "a\\b.gguf"])
def test_file_names_that_lead_elsewhere_are_refused(here: Here, name: str) -> None:
    here.hub.repos[PLAIN][name] = b"?"
    assert "names must lie below" in here.refused("plan", f"hf:{PLAIN}")


def test_a_plan_without_a_quantisation_is_a_table_of_all(here: Here) -> None:
    done = here.ktserve("plan", f"hf:{SPLIT}", "--max-model-len", "64", engine=True)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:3]] == ["form", "Q4_0", "Q8_0"]
    assert not here.cached(SPLIT)
