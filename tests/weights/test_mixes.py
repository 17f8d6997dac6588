"""Files that mix types as the quantisers of public models do: every tensor stays as small as the file has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.memory.items import Kind
from engine.weights.open import open_model
from native import available
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import tiny_model
from tests.weights.planned import plan, size

pytestmark = pytest.mark.skipif(not available()[0], reason=f"no native kernels: {available()[1]}")

# Per mix the types of two layers' (gate, up, down), of (q, k, v, o), of the embedding and of the head.
MIXES = {
    "UD-Q4_K_XL": (("Q4_K Q4_K Q6_K", "IQ4_XS Q4_K Q5_K"), "Q5_K Q6_K Q8_0 Q4_K", "Q5_K", "Q6_K"),
    "UD-Q2_K_XL": (("Q2_K Q2_K Q3_K", "IQ2_S IQ3_XXS IQ4_XS"), "Q4_K Q5_K Q6_K Q4_K", "Q4_K", "Q6_K"),
    "UD-IQ2_XXS": (("IQ2_XXS IQ2_XXS IQ2_XS", "IQ2_XS IQ2_S IQ3_S"), "Q4_K IQ4_XS Q5_K IQ3_S", "IQ3_S", "Q5_K"),
    "UD-IQ3_XXS": (("IQ3_XXS IQ3_XXS IQ4_NL", "IQ3_XXS IQ3_S Q3_K"), "Q4_K Q5_K Q6_K IQ3_S", "IQ3_S", "Q5_K"),
    "Q3_K_M": (("Q3_K Q3_K Q4_K", "Q3_K Q3_K Q5_K"), "Q3_K Q3_K Q5_K Q4_K", "Q3_K", "Q6_K"),
    "IQ4_XS": (("IQ4_XS IQ4_XS Q5_K", "IQ4_XS IQ4_XS IQ4_XS"), "IQ4_XS IQ4_XS Q5_K IQ4_XS", "IQ4_XS", "Q6_K"),
    "MXFP4_MOE": (("MXFP4 MXFP4 MXFP4", "MXFP4 MXFP4 MXFP4"), "Q8_0 Q8_0 Q8_0 Q8_0", "Q8_0", "Q8_0"),
}


@pytest.mark.parametrize("mix", MIXES)
def test_no_tensor_is_widened(mix: str, tmp_path: Path) -> None:
    experts, attention, embedding, head = MIXES[mix]
    types = {"token_embd.weight": embedding, "output.weight": head}
    for layer, chosen in enumerate(experts):
        names = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "attn_q", "attn_k", "attn_v", "attn_output")
        of_layer = zip(names, [*chosen.split(), *attention.split()], strict=True)
        types |= {f"blk.{layer}.{name}.weight": kind for name, kind in of_layer}
    model = tiny_model(0, hidden_size=512, moe_intermediate_size=256, num_experts=2, head_dim=64)
    save_gguf(model, tmp_path / "m.gguf", types=types)
    source = open_model(str(tmp_path / "m.gguf"))
    made = plan(source, backend="native", linear_backend="native")
    assert not [note for note in made.notes if "dequantised" in note]
    stored = sum(source.experts(layer).num_bytes for layer in range(2))
    assert size(made, Kind.EXPERTS) <= 1.05 * stored
    dense = [source.tensor(name) for name in source.names()]
    pages = 4096 * sum(len(tensor.shape) == 2 for tensor in dense)  # each matrix ends its own; a wider one would exceed
    assert size(made, Kind.WEIGHTS) <= 1.05 * sum(tensor.num_bytes for tensor in dense) + pages
