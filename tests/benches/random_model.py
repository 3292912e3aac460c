#!/usr/bin/env python3
"""Write a checkpoint of random weights in Qwen3.5's dense shape: real costs, without a download. What it says is noise.

    python3 tests/benches/random_model.py DIR [--layers 10]

Dimensions are those of Qwen3.5-0.8B, with fewer layers (10 make 213 million parameters), bf16, and the demo model's tokenizer, for which the embedding has more rows than it needs. Needs nothing but
Python. The same arguments write the same bytes.
"""

import argparse
import json
import math
import random
import shutil
import struct
from pathlib import Path

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
# Of Qwen3.5-0.8B, but for the vocabulary.
HIDDEN, INNER, VOCAB = 1024, 3584, 4096
KEY_HEADS, VALUE_HEADS, LINEAR_DIM, KERNEL = 16, 16, 128, 4
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 256
# Every so many layers one has full attention.
ATTENTION_INTERVAL = 4


class Draw:
    """Random tensors of bf16, by name."""

    def __init__(self):
        self.random = random.Random(7)
        self.tensors = {}

    def matrix(self, name, rows, cols, gain=1.0):
        """Random signs, and sizes between a power of two and its double: about what keeps the size of what the matrix
        is multiplied with."""
        count = rows * cols
        exponent = 127 + round(math.log2(gain / math.sqrt(cols) / 1.5))
        # bf16: sign, 8 bits of exponent, 7 of mantissa.
        high = bytes((byte & 0x80) | (exponent >> 1) for byte in range(256))
        low = bytes(((exponent & 1) << 7) | (byte & 0x7F) for byte in range(256))
        data = bytearray(2 * count)
        data[0::2] = self.random.randbytes(count).translate(low)
        data[1::2] = self.random.randbytes(count).translate(high)
        self.tensors[name] = ([rows, cols], bytes(data))

    def each(self, name, shape, make):
        values = [make(self.random.random()) for _ in range(math.prod(shape))]
        halves = (struct.pack("<f", value)[2:] for value in values)
        self.tensors[name] = (shape, b"".join(halves))


def tensors(layers):
    draw = Draw()
    branch = (2 * layers) ** -0.5
    draw.matrix("model.embed_tokens.weight", VOCAB, HIDDEN)
    draw.each("model.norm.weight", [HIDDEN], lambda _: 0.0)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        draw.each(at + "input_layernorm.weight", [HIDDEN], lambda _: 0.0)
        draw.each(at + "post_attention_layernorm.weight", [HIDDEN], lambda _: 0.0)
        draw.matrix(at + "mlp.gate_proj.weight", INNER, HIDDEN)
        draw.matrix(at + "mlp.up_proj.weight", INNER, HIDDEN)
        draw.matrix(at + "mlp.down_proj.weight", HIDDEN, INNER, branch)
        if is_attention(layer):
            at += "self_attn."
            draw.matrix(at + "q_proj.weight", 2 * HEADS * HEAD_DIM, HIDDEN)
            draw.matrix(at + "k_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN)
            draw.matrix(at + "v_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN)
            draw.matrix(at + "o_proj.weight", HIDDEN, HEADS * HEAD_DIM, branch)
            draw.each(at + "q_norm.weight", [HEAD_DIM], lambda _: 0.0)
            draw.each(at + "k_norm.weight", [HEAD_DIM], lambda _: 0.0)
            continue
        at += "linear_attn."
        values = VALUE_HEADS * LINEAR_DIM
        channels = 2 * KEY_HEADS * LINEAR_DIM + values
        draw.matrix(at + "in_proj_qkv.weight", channels, HIDDEN)
        draw.matrix(at + "in_proj_z.weight", values, HIDDEN)
        draw.matrix(at + "in_proj_b.weight", VALUE_HEADS, HIDDEN)
        draw.matrix(at + "in_proj_a.weight", VALUE_HEADS, HIDDEN)
        draw.matrix(at + "out_proj.weight", HIDDEN, values, branch)
        draw.each(at + "conv1d.weight", [channels, 1, KERNEL], lambda even: even - 0.5)
        # As the published initialisation of gated delta nets draws them: decay rates from 1 to 16, steps from 0.001 to
        # 0.1, evenly in their logarithm, of which dt_bias is the inverse softplus.
        draw.each(at + "A_log", [VALUE_HEADS], lambda even: math.log(1 + 15 * even))
        draw.each(at + "dt_bias", [VALUE_HEADS], lambda even: math.log(math.expm1(1e-3 * 100**even)))
        draw.each(at + "norm.weight", [LINEAR_DIM], lambda _: 1.0)
    return draw.tensors


def is_attention(layer):
    return (layer + 1) % ATTENTION_INTERVAL == 0


def config(layers):
    kinds = ["full_attention" if is_attention(layer) else "linear_attention" for layer in range(layers)]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": LINEAR_DIM,
        "linear_value_head_dim": LINEAR_DIM,
        "linear_conv_kernel_dim": KERNEL,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 1 << 18,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e7, "rope_type": "default"},
        "tie_word_embeddings": True,
        "vocab_size": VOCAB,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("dir", type=Path)
    options.add_argument("--layers", type=int, default=10)
    given = options.parse_args()
    given.dir.mkdir(parents=True, exist_ok=True)
    made = tensors(given.layers)
    header, offset = {}, 0
    for name, (shape, data) in sorted(made.items()):
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(given.dir / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for _, (_, data) in sorted(made.items()):
            file.write(data)
    (given.dir / "config.json").write_text(json.dumps(config(given.layers), indent=1))
    for name in ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]:
        shutil.copy(DEMO / name, given.dir / name)
    print(f"{given.dir}: {offset // 2 / 1e6:.0f} million parameters in {given.layers} layers")


if __name__ == "__main__":
    main()
