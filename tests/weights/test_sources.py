"""Every form a model may have on disk gives the same tensors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.architectures.registry import config_from_hf
from engine.errors import ModelFileError, UserError
from engine.files.gguf.file import GGUFArray, open_gguf
from engine.files.model_file import FileBytes
from engine.weights.layout import gguf_expert_name, tensors
from engine.weights.open import open_model
from testing.models.block_types import encode
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import save_hf, tiny_model
from tests.weights.states import assert_same

SHAPES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True},
    "some dense": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "every second": {"num_hidden_layers": 4, "decoder_sparse_step": 2},
    "all dense": {"mlp_only_layers": [0, 1]},
    "odd": {"num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 24, "vocab_size": 99},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_huggingface(tmp_path: Path, shape: str, sharded: bool, fused: bool) -> None:
    model = tiny_model(1, **SHAPES[shape])
    save_hf(model, tmp_path, sharded, fused)
    source = open_model(str(tmp_path))
    assert_same(source, model)
    assert source.num_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert source.config.sparse_layers == [
        i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")
    ]


@pytest.mark.parametrize("shape", [s for s in SHAPES if s not in ("all dense", "odd")])
@pytest.mark.parametrize("split", [None, 5])
def test_gguf(tmp_path: Path, shape: str, split: int | None) -> None:
    model = tiny_model(2, **SHAPES[shape])
    held = save_gguf(model, tmp_path / "m.gguf", expert_type="Q8_0", dense_type="BF16", split=split)
    source = open_model(str(tmp_path))
    assert_same(source, held)
    assert source.num_bytes == sum(t.n_bytes for f in tmp_path.iterdir() for t in gguf.GGUFReader(f).tensors)


def test_odd_sizes_as_float_gguf(tmp_path: Path) -> None:
    held = save_gguf(tiny_model(2, **SHAPES["odd"]), tmp_path / "m.gguf", expert_type="F32", dense_type="F32")
    source = open_model(str(tmp_path / "m.gguf"))
    assert_same(source, held)
    assert source.config.dtype == "float32"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_safetensors_types(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_model(3, dtype)
    save_hf(model, tmp_path)
    source = open_model(str(tmp_path))
    tensor = source.tensor("model.layers.1.self_attn.q_proj.weight")
    assert tensor.type == {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype]
    assert torch.equal(tensor.dequantise(dtype), model.model.layers[1].self_attn.q_proj.weight)
    assert source.config.dtype == str(dtype).removeprefix("torch.")
    assert_same(source, model)


def test_experts_are_read_from_the_file(tmp_path: Path) -> None:
    model = tiny_model(4)
    for fused in (False, True):
        folder = tmp_path / str(fused)
        save_hf(model, folder, fused=fused)
        store = open_model(str(folder)).experts(1)
        for projection, _ in store.projections():
            weight = store.expert(projection, 5)
            assert isinstance(weight.data, FileBytes) and weight.data.nbytes == 64 * 64 * 4
        gate_up = model.model.layers[1].mlp.experts.gate_up_proj[5]
        assert torch.equal(store.expert("gate", 5).dequantise(), gate_up[:64])
        assert torch.equal(store.expert("up", 5).dequantise(), gate_up[64:])
        assert store.num_experts == 8
        assert store.num_bytes == 8 * 3 * 64 * 64 * 4


def test_gguf_with_fused_gate_and_up(tmp_path: Path) -> None:
    """Converters may store gate and up as one tensor, gate's rows first."""
    model = tiny_model(5)
    save_gguf(model, tmp_path / "m.gguf", "F32", "F32", fused=True)
    assert_same(open_model(str(tmp_path / "m.gguf")), model)


def test_gguf_beside_a_folder(tmp_path: Path) -> None:
    """The folder gives configuration (here: unnormalised top-k, which GGUF does not say), the file the weights."""
    model = tiny_model(6, norm_topk_prob=False, eos_token_id=[1, 2])
    folder, weights = tmp_path / "hf", tmp_path / "gguf"
    save_hf(tiny_model(7, norm_topk_prob=False, eos_token_id=[1, 2]), folder)
    weights.mkdir()
    held = save_gguf(model, weights / "m.gguf", split=9)
    for source in (open_model(str(folder), str(weights)), open_model(str(folder), str(next(weights.iterdir())))):
        assert_same(source, held)
        assert source.config.experts.router.normalise is None
        assert source.config.eos_token_ids == (1, 2)
    assert open_model(str(weights)).config.experts.router.normalise == 0.0
    for file in folder.glob("*.safetensors"):
        file.unlink()
    for file in weights.iterdir():
        shutil.copy(file, folder)
    assert_same(open_model(str(folder)), held)
    assert open_model(str(folder)).config.experts.router.normalise is None


def test_the_folder_and_the_gguf_file_must_be_one_model(tmp_path: Path) -> None:
    save_hf(tiny_model(0, rope_theta=1e6), tmp_path / "hf")
    save_gguf(tiny_model(0), tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match=r"rope_theta is 10000.0 in the GGUF file and 1000000.0"):
        open_model(str(tmp_path / "hf"), str(tmp_path / "m.gguf"))


def test_stored_head_goes_before_tied(tmp_path: Path) -> None:
    """As in transformers: a config that says tied does not throw away a head that is in the file."""
    model = tiny_model(8)
    save_hf(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    source = open_model(str(tmp_path))
    assert source.config.tie_word_embeddings is False
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(source.tensor("lm_head.weight").dequantise(), loaded.lm_head.weight)
    assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)


def test_tied_head_has_no_tensor(tmp_path: Path) -> None:
    save_gguf(tiny_model(8, tie_word_embeddings=True), tmp_path / "m.gguf")
    source = open_model(str(tmp_path / "m.gguf"))
    assert not source.has("lm_head.weight")
    with pytest.raises(KeyError):
        source.tensor("lm_head.weight")
    with pytest.raises(KeyError):
        source.experts(99)


def test_derived_tensors_are_ignored(tmp_path: Path) -> None:
    model = tiny_model(9)
    save_hf(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same(open_model(str(tmp_path)), model)


def test_any_part_opens_the_whole(tmp_path: Path) -> None:
    held = save_gguf(tiny_model(10), tmp_path / "m.gguf", split=4)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) > 3
    assert_same(open_model(str(parts[2])), held)
    assert [f.path.name for f in open_gguf(parts[2]).files] == [p.name for p in parts]


@pytest.mark.parametrize("model", ["", "no/such/place", "x" * 5000, "Qwen/Qwen3-30B-A3B", "nul\0"])
def test_a_path_that_leads_nowhere_is_named(model: str) -> None:
    with pytest.raises(UserError) as caught:
        open_model(model)
    assert repr(model[:200]) in str(caught.value) and caught.value.field == "model"


def test_missing_gguf_is_named(tmp_path: Path) -> None:
    save_hf(tiny_model(0), tmp_path)
    with pytest.raises(UserError, match=r"absent\.gguf") as caught:
        open_model(str(tmp_path), str(tmp_path / "absent.gguf"))
    assert caught.value.field == "gguf"


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"pytorch_model\.bin"):
        open_model(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        save_gguf(tiny_model(0), tmp_path / name)
    with pytest.raises(UserError, match=r"several GGUF models.*a\.gguf, b\.gguf"):
        open_model(str(tmp_path))
    with pytest.raises(UserError, match=r"must be a folder with config\.json"):
        open_model(str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf"))


def test_metadata_arrays(tmp_path: Path) -> None:
    tokens = [f"tök{i}" for i in range(128)]
    extra = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.5, 1.5],
        "tokenizer.ggml.token_type": [1] * 128,
        "tokenizer.chat_template": "{{ messages }}",
        "some.flag": True,
    }
    save_gguf(tiny_model(0), tmp_path / "m.gguf", metadata=extra)
    metadata = open_gguf(tmp_path).metadata
    held = metadata["tokenizer.ggml.tokens"]
    assert isinstance(held, GGUFArray) and held.holds_strings
    assert list(held) == tokens and held[3] == "tök3" and held[-1] == "tök127" and held[1:3] == ["tök1", "tök2"]
    scores = metadata["tokenizer.ggml.scores"]
    assert isinstance(scores, GGUFArray) and scores.numpy().tolist() == [0.5, 1.5]
    assert metadata["some.flag"] is True and metadata["tokenizer.chat_template"] == "{{ messages }}"
    with pytest.raises(IndexError):
        held[128]


def test_reading_headers_needs_no_torch(tmp_path: Path) -> None:
    save_gguf(tiny_model(0), tmp_path / "m.gguf")
    code = (
        "import sys, pathlib; from engine.files.gguf.file import open_gguf;"
        "from engine.architectures.registry import config_from_gguf, config_from_hf;"
        "f = open_gguf(pathlib.Path(sys.argv[1])); shapes = {n: t.shape for n, t in f.tensors.items()};"
        "print(config_from_gguf(f.metadata, shapes).num_experts);"
        "config_from_hf({'model_type': 'qwen3_moe'}); import engine.memory.plan;"
        "assert not {'torch', 'transformers', 'gguf'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr


def test_tiny_blocks_stand_for_their_values() -> None:
    """The helper's promise: the returned values are those of the blocks."""
    data, values = encode(torch.randn(2, 3, 256), "Q4_K")
    again = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.Q4_K)
    assert np.array_equal(again, values.numpy()) and 0.5 < values.std() < 2


def test_names_are_those_of_the_gguf_package() -> None:
    """The map that llama.cpp's converter uses."""
    model = tiny_model(0, attention_bias=True, num_hidden_layers=3, mlp_only_layers=[1])
    config = config_from_hf(model.config.to_dict())
    sparse, dense = (gguf.get_tensor_name_map(arch, 3) for arch in (gguf.MODEL_ARCH.QWEN3MOE, gguf.MODEL_ARCH.QWEN3))
    for name, tensor in tensors(config).items():
        mapped = sparse.get_name(name, (".weight", ".bias")) or dense.get_name(name, (".weight", ".bias"))
        assert tensor.gguf == mapped, name
    for projection in ("gate", "up", "down"):
        name = f"model.layers.2.mlp.experts.{projection}_proj.weight"
        assert gguf_expert_name(2, projection) == sparse.get_name(name, (".weight",))
