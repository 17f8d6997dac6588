"""A stock model around our experts computes what transformers' own does, and PEFT trains both kinds of LoRA."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file, save_file

from engine.errors import UserError
from engine.lora.files.parse import parse_adapter
from engine.weights.open import open_model
from testing.models.gguf_writer import save_gguf
from testing.models.mxfp4 import save_mxfp4
from testing.models.tiny import STATEFUL, TRAINED, save_hf, tiny_model
from tests.training.models import copy_lora, draw_b, ours, plain, reference, within_kimi
from training.config import TrainConfig
from training.data.build import Item
from training.data.collate import PackingCollator, PaddingCollator
from training.layer import lora_config
from training.loop.save import save_adapter
from training.memory.plan import plan_training
from training.model import checkpoint_layers, load_model

EACH_FAMILY = pytest.mark.parametrize("family", TRAINED)
IDS = torch.randint(2, 128, (2, 19), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, 11:] = 0
SEEN = MASK.bool()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for family in TRAINED:
        save_hf(tiny_model(family=family), root / family)
    return root


@EACH_FAMILY
@torch.no_grad()
def test_the_base_equals_transformers(folders, tmp_path, family):
    model = tiny_model(family=family)
    want = model(IDS, attention_mask=MASK).logits
    got = load_model(str(folders / family), reference)(IDS, attention_mask=MASK).logits
    torch.testing.assert_close(got[SEEN], want[SEEN], rtol=1e-5, atol=1e-5)
    save_gguf(model, tmp_path / "m.gguf", "F32", "F32")
    if family in STATEFUL:
        with pytest.raises(UserError, match="the rows of linear attention in another order"):
            load_model(str(tmp_path / "m.gguf"), reference)
        return
    stored = load_model(str(tmp_path / "m.gguf"), reference)(IDS, attention_mask=MASK).logits
    torch.testing.assert_close(stored[SEEN], want[SEEN], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_family_by_another_name(tmp_path):
    """Kimi K2 is a DeepSeek V3; so is the language model in K2.5."""
    model = tiny_model(family="deepseek_v3")
    save_hf(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    got = load_model(str(tmp_path), reference)(IDS, attention_mask=MASK).logits
    want = model(IDS, attention_mask=MASK).logits
    torch.testing.assert_close(got[SEEN], want[SEEN], rtol=1e-5, atol=1e-5)
    within_kimi(tmp_path)
    got = load_model(str(tmp_path), reference)(IDS, attention_mask=MASK).logits
    torch.testing.assert_close(got[SEEN], want[SEEN], rtol=1e-5, atol=1e-5)


def test_a_family_that_transformers_does_not_have(tmp_path, monkeypatch):
    save_hf(tiny_model(family="deepseek_v3"), tmp_path)
    within_kimi(tmp_path)
    monkeypatch.setattr("training.model._CAUSAL", {"qwen3_moe"})
    with pytest.raises(UserError, match="deepseek_v3 is no family of transformers"):
        load_model(str(tmp_path), reference)


@torch.no_grad()
def test_the_text_of_a_model_with_a_vision_tower(folders, tmp_path):
    text = json.loads((folders / "qwen3_5_moe_text" / "config.json").read_text())
    text.pop("architectures")
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": text, "vision_config": {"depth": 27}}))
    held = load_file(folders / "qwen3_5_moe_text" / "model.safetensors")
    inside = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in held.items()}
    save_file(inside | {"model.visual.blocks.0.attn.qkv.weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    got = load_model(str(tmp_path), reference)(IDS, attention_mask=MASK).logits
    want = tiny_model(family="qwen3_5_moe_text")(IDS, attention_mask=MASK).logits
    torch.testing.assert_close(got[SEEN], want[SEEN], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", STATEFUL)
def test_packed_rows_are_refused_where_a_state_would_go_on(folders, tmp_path, family):
    (tmp_path / "d.jsonl").write_text("{}\n")
    given = {"output_dir": "out", "dataset": (str(tmp_path / "d.jsonl"),), "device": "cpu", "packing": True}
    with pytest.raises(UserError, match="carry one sample's state into the next") as refused:
        plan_training(TrainConfig(model_name_or_path=str(folders / family), **given))
    assert refused.value.field == "packing"


def test_experts_from_another_file_must_fit(folders, tmp_path):
    save_hf(tiny_model(num_experts=4), tmp_path)
    with pytest.raises(UserError, match=r"experts \(4, 64, 64\).*do not fit"):
        load_model(str(folders / "qwen3_moe"), reference, experts_from=str(tmp_path))
    save_hf(tiny_model(seed=5), tmp_path / "other")
    mixed = load_model(str(folders / "qwen3_moe"), reference, experts_from=str(tmp_path / "other"))
    own = load_model(str(folders / "qwen3_moe"), reference)
    assert torch.equal(mixed.lm_head.weight, own.lm_head.weight)
    assert not torch.equal(*(m.model.layers[0].mlp.experts.base_layer.experts.gate for m in (mixed, own)))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", *STATEFUL])
def test_loss_and_gradients_equal_stock_peft(folders, family):
    model = draw_b(ours(folders / family))
    other = plain(tiny_model(family=family))
    copy_lora(model, other)
    labels = IDS.masked_fill(MASK == 0, -100)
    losses = [m(input_ids=IDS, attention_mask=MASK, labels=labels).loss for m in (model, other)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    for loss in losses:
        loss.backward()
    assert any("linear_attn.out_proj" in name for name, _ in model.named_parameters()) is (family in STATEFUL)
    expect_gradients(model, other)


def expect_gradients(model: PeftModel, other: PeftModel) -> None:
    """Of one of ours and of a plain one, wherever there is LoRA."""
    modules = dict(other.named_modules())
    linears = [name for name, _ in model.named_parameters() if ".lora_A." in name or ".lora_B." in name]
    for name in linears:
        pair = [m.get_parameter(name).grad for m in (model, other)]
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    for layer in range(2):
        at = f"base_model.model.model.layers.{layer}"
        for name in ("gate", "up", "down"):
            for half, stock in (("a", "lora_A"), ("b", "lora_B")):
                got = model.get_parameter(f"{at}.mlp.experts.lora_experts.default.{name}_lora_{half}").grad
                for expert in range(8):
                    pair = getattr(modules[f"{at}.mlp.experts.{expert}.{name}_proj"], stock)["default"]
                    want = torch.zeros_like(pair.weight) if pair.weight.grad is None else pair.weight.grad
                    torch.testing.assert_close(got[expert], want, rtol=1e-4, atol=1e-7)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    window=st.one_of(st.integers(1, 12), st.just(64)),
    limit=st.sampled_from([0.7, 7.0]),
    packed=st.booleans(),
    lengths=st.lists(st.lists(st.integers(1, 19), min_size=1, max_size=3), min_size=1, max_size=2),
    attention=st.sampled_from(["sdpa", "eager"]),
    again=st.booleans(),
    rank=st.integers(1, 5),
)
def test_windows_and_sinks_in_packed_rows(tmp_path, window, limit, packed, lengths, attention, again, rank):
    """Each sample has the loss and the gradients that stock PEFT has for it alone, whatever lies beside it in a row."""
    shape = {"family": "gpt_oss", "sliding_window": window, "swiglu_limit": limit}
    save_hf(tiny_model(**shape), tmp_path)
    model = draw_b(ours(tmp_path, attention=attention, rank=rank)).train()
    other = plain(tiny_model(**shape), rank).train()
    other.set_attn_implementation("eager")
    copy_lora(model, other)
    if again:
        checkpoint_layers(model)
    rows = lengths if packed else [[count] for row in lengths for count in row]
    generator = torch.Generator().manual_seed(sum(map(sum, rows)))
    drawn = [[torch.randint(2, 128, (count,), generator=generator).tolist() for count in row] for row in rows]
    items = [packed_item(row) if packed else {"input_ids": row[0], "labels": row[0]} for row in drawn]
    batch = (PackingCollator(0, attention) if packed else PaddingCollator(0))(items)
    loss = model(**batch, num_items_in_batch=64).loss
    samples = [torch.tensor([sample]) for row in drawn for sample in row]
    want = torch.stack([other(input_ids=ids, labels=ids, num_items_in_batch=64).loss for ids in samples]).sum()
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    for each in (loss, want):
        each.backward()
    expect_gradients(model, other)


def packed_item(samples: list[list[int]]) -> Item:
    ids = [token for sample in samples for token in sample]
    return {
        "input_ids": ids,
        "labels": list(ids),
        "position_ids": [place for sample in samples for place in range(len(sample))],
        "segments": [index for index, sample in enumerate(samples) for _ in sample],
    }


@torch.no_grad()
def test_experts_in_mxfp4_are_what_the_file_holds(tmp_path):
    held = save_mxfp4(tiny_model(family="gpt_oss"), tmp_path)
    got = load_model(str(tmp_path), reference)(IDS, attention_mask=MASK).logits
    want = held(IDS, attention_mask=MASK).logits
    torch.testing.assert_close(got[SEEN], want[SEEN], rtol=1e-5, atol=1e-5)
    low = load_model(str(tmp_path), reference, dtype=torch.bfloat16)(IDS, attention_mask=MASK).logits
    theirs = held.to(torch.bfloat16)(IDS, attention_mask=MASK).logits
    assert (low - want)[SEEN].abs().mean() < 1.2 * (theirs - want)[SEEN].abs().mean()


def test_what_experts_with_biases_do_not_allow(folders, tmp_path):
    (tmp_path / "d.jsonl").write_text("{}\n")
    given = {"output_dir": "out", "dataset": (str(tmp_path / "d.jsonl"),), "device": "cpu"}
    for field, value in (("adapter_format", "kt-fused"), ("stream_min_tokens", 64)):
        with pytest.raises(UserError, match=field) as refused:
            plan_training(TrainConfig(model_name_or_path=str(folders / "gpt_oss"), **given, **{field: value}))
        assert refused.value.field == field


@EACH_FAMILY
def test_nothing_else_is_trained_and_everything_gets_a_gradient(folders, family):
    model = draw_b(ours(folders / family))
    checkpoint_layers(model)
    model.train()
    model(input_ids=IDS, attention_mask=MASK, labels=IDS).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in model.named_parameters() if "lora_" in name}
    assert all(p.grad is not None and p.grad.any() for p in model.parameters() if p.requires_grad)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    held = draw_b(ours(folders / family))
    held(input_ids=IDS, attention_mask=MASK, labels=IDS).loss.backward()
    for (name, p), q in zip(model.named_parameters(), held.parameters(), strict=True):
        if p.requires_grad:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@given(lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=3), packed=st.booleans())
@settings(max_examples=4)
def test_layers_that_are_computed_again_know_their_own_padding(folders, lengths, packed):
    """Several forwards, of batches with other padding and of other sizes, before one backward."""
    model = draw_b(ours(folders / "qwen3_moe")).train()
    batches = []
    for first, second in lengths:
        segments = torch.full((2, max(first, second)), -1)
        segments[0, :first], segments[1, :second] = 0, 0
        ids = IDS[:, : segments.shape[1]]
        mask = {"segments": segments} if packed else {"attention_mask": (segments >= 0).long()}
        batches.append({"input_ids": ids, "labels": ids.masked_fill(segments < 0, -100), **mask})
    wanted: dict[str, torch.Tensor] = {}
    for again in (False, True):
        if again:
            checkpoint_layers(model)
        model.zero_grad()
        torch.stack([model(**batch).loss.nan_to_num() for batch in batches]).sum().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            if not again:
                wanted[name] = parameter.grad.clone()
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-5, atol=1e-7)


@torch.no_grad()
def test_texts_are_generated_with_a_cache_and_padding(folders):
    """As stock scripts look at what they have trained."""
    model = draw_b(ours(folders / "qwen3_moe"))
    mask = torch.ones_like(IDS)
    mask[1, :8] = 0
    batch = {"input_ids": IDS, "attention_mask": mask, "pad_token_id": 0}
    long, short = (model.generate(**batch, max_new_tokens=6, do_sample=False, use_cache=c) for c in (False, True))
    assert torch.equal(long, short) and long.shape == (2, 25)


@torch.no_grad()
def test_switched_off_it_is_the_base(folders):
    model = draw_b(ours(folders / "qwen3_moe"))
    base = tiny_model()(IDS).logits
    with model.disable_adapter():
        torch.testing.assert_close(model(IDS).logits, base, rtol=1e-5, atol=1e-5)
    assert (model(IDS).logits - base).abs().mean() > 1e-2
    assert all(p.requires_grad for name, p in model.named_parameters() if "lora_" in name)


def test_padding_reaches_no_expert(folders):
    """Whatever stands in padding, NaN too, changes neither the rows that count nor a gradient."""
    model = draw_b(ours(folders / "qwen3_moe"))
    experts = model.base_model.model.model.layers[0].mlp.experts
    rows = experts.base_layer.rows
    rows.mask = SEEN.reshape(-1)
    hidden = torch.randn(IDS.numel(), 64, generator=torch.Generator().manual_seed(3))
    ids = torch.arange(2).repeat(IDS.numel(), 1)
    weights = torch.full((IDS.numel(), 2), 0.5)
    clean = experts(hidden, ids, weights)
    clean.sum().backward()
    grads = {name: p.grad.clone() for name, p in experts.named_parameters() if p.requires_grad}
    experts.zero_grad()
    hidden[~rows.mask] = torch.nan
    dirty = experts(hidden, ids, weights)
    dirty.sum().backward()
    assert torch.equal(clean, dirty) and not dirty[~rows.mask].any()
    assert all(torch.equal(grads[name], p.grad) for name, p in experts.named_parameters() if p.requires_grad)


def test_some_projections_alone(folders, tmp_path):
    model = ours(folders / "qwen3_moe", targets=("q_proj", "down_proj"))
    trained = {name.rpartition("layers.")[2][2:] for name, p in model.named_parameters() if p.requires_grad}
    prefix = "mlp.experts.lora_experts.default.down_lora_"
    attention = {f"self_attn.q_proj.lora_{half}.default.weight" for half in "AB"}
    assert trained == {*attention, f"{prefix}a", f"{prefix}b"}
    model(input_ids=IDS, labels=IDS).loss.backward()
    draw_b(model)
    with torch.no_grad():
        for lora in (m.lora("default") for m in model.modules() if hasattr(m, "lora")):
            lora.gate_lora_b.zero_(), lora.up_lora_b.zero_()
    save_adapter(model, tmp_path)
    read = parse_adapter(tmp_path, open_model(str(folders / "qwen3_moe")).config, name="a")
    assert sorted(read.linears) == [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    assert not read.experts[0].gate_b.any() and read.experts[0].down_b.any()


@torch.no_grad()
def test_pefts_own_files_are_read_again(folders, tmp_path):
    model = draw_b(ours(folders / "qwen3_moe"))
    model.save_pretrained(tmp_path)
    base = load_model(str(folders / "qwen3_moe"), reference)
    again = PeftModel.from_pretrained(base, tmp_path, config=lora_config(base, rank=4, alpha=8))
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("targets", "dropout", "match"),
    [(("x_proj",), 0.0, "lora_target: x_proj"), ((), 0.0, "nothing"), (("all",), 0.1, "lora_dropout is 0.1")],
)
def test_what_lora_cannot_be_here(folders, targets, dropout, match):
    base = load_model(str(folders / "qwen3_moe"), reference)
    with pytest.raises(UserError, match=match):
        lora_config(base, targets, rank=4, alpha=8, dropout=dropout)


@torch.no_grad()
def test_bfloat16_routes_as_the_server_does(folders):
    """Routers in float32, and what they give, whatever the rest is computed in."""
    model = load_model(str(folders / "qwen2_moe"), reference, dtype=torch.bfloat16)
    block = model.model.layers[0].mlp
    assert block.gate.weight.dtype == block.shared_expert_gate.weight.dtype == torch.float32
    _, weights, _ = block.gate(torch.randn(3, 64).bfloat16())
    assert weights.dtype == torch.float32
    want = tiny_model(family="qwen2_moe")(IDS).logits
    got = model(IDS).logits
    assert got.dtype == torch.bfloat16
    near = (got - want).abs().mean(-1) < 0.05 * want.abs().mean()  # a position may be routed otherwise
    assert near.float().mean() > 0.8
