//! Models of odd shapes, with random weights: the CPU backend against the float64 reference, composition against
//! an ordinary forward, and the size of entries against what is told of it.

use std::path::Path;

use hypic_kernels::{Backend, Cpu, Form, Isa, Reference};
use hypic_model::spec::MixerSpec;
use hypic_model::{Config, Item, ModelInfo, families};
use hypic_state::{DType, LayerPart};
use serde_json::{Value, json};

use crate::support::{Files, Rig, Stored, TOKENS, assert_close, golden, load};

/// A small Qwen3.5; `changes` are laid over it.
fn plain(changes: Value) -> Files {
    let config = json!({
        "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 24, "intermediate_size": 20, "vocab_size": 11,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
        "partial_rotary_factor": 0.5, "tie_word_embeddings": true
    });
    model(config, changes, false)
}

/// A model with random weights; `changes` are laid over `config`, null takes a key away.
fn model(mut config: Value, changes: Value, fused: bool) -> Files {
    for (key, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => _ = config.as_object_mut().unwrap().remove(key),
            value => config[key] = value.clone(),
        }
    }
    let spec = families::describe(&Config::parse(&config.to_string()).unwrap());
    let spec = spec.unwrap_or_else(|e| panic!("{changes}: {e}"));
    // Weights by a linear congruential generator (Knuth's MMIX constants), within -0.5..0.5.
    let mut seed = 1u64;
    let mut random = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let tensors = spec.tensors(fused).into_iter().map(|(name, shape)| {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| random()).collect();
        (name, Stored::f32(&shape, &values))
    });
    Files { config, tensors: tensors.collect() }
}

/// One segment and a query, then two segments, on one backend.
fn check<B: Backend>(rig: &Rig<B>, what: &str, tolerance: f64) -> Vec<f64> {
    let vocab = rig.model.spec().vocab;
    let whole = rig.run(vec![Item::Run(TOKENS.to_vec())]);
    for seam in [0, 1, 3] {
        let (segment, query) = TOKENS.split_at(15);
        let entry = rig.entry(segment, seam, &[]);
        let jump = hypic_model::Jump {
            tokens: entry.body_len(),
            source: entry,
            origin: 0,
            rule: hypic_state::ComposeRule::Transition,
        };
        let seam_rows = Item::Run(segment[..seam].to_vec());
        let composed = rig.run(vec![seam_rows, Item::Jump(jump), Item::Run(query.to_vec())]);
        let what = format!("{what}, seam {seam}");
        assert_close(&what, &composed[seam * vocab..], &whole[15 * vocab..], tolerance);
    }
    let two = rig.compose([&TOKENS[..9], &TOKENS[9..16]], 2, &TOKENS[16..]);
    [whole, two].concat()
}

#[test]
fn odd_shapes_compute_and_compose() {
    let all_full = json!(["full_attention", "full_attention", "full_attention", "full_attention"]);
    let all_linear = json!(["linear_attention", "linear_attention", "linear_attention", "linear_attention"]);
    for changes in [
        json!({}),
        json!({"linear_conv_kernel_dim": 1}),
        json!({"linear_conv_kernel_dim": 2}),
        json!({"linear_conv_kernel_dim": 7}),
        json!({"head_dim": 7, "partial_rotary_factor": 0.3}),
        json!({"head_dim": 1, "partial_rotary_factor": 0.0}),
        json!({"head_dim": 33, "partial_rotary_factor": 0.25}),
        json!({"head_dim": null, "partial_rotary_factor": 1.0}),
        json!({"num_key_value_heads": 1}),
        json!({"num_attention_heads": 3, "num_key_value_heads": 3}),
        json!({
            "linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_key_head_dim": 5,
            "linear_value_head_dim": 3
        }),
        json!({
            "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 1,
            "linear_value_head_dim": 1
        }),
        json!({"hidden_size": 27, "intermediate_size": 1, "vocab_size": 3}),
        json!({"layer_types": all_full}),
        json!({"layer_types": all_linear}),
        json!({"num_hidden_layers": 1}),
    ] {
        let what = changes.to_string();
        check_everywhere(&plain(changes), &what);
    }
}

/// The same for the other families: head counts that are no power of two, groups that leave a rest, one head, no
/// convolution, narrow latents, and choices that a fixture has the other way.
#[test]
fn odd_shapes_of_other_families() {
    for (name, fused, changes) in [
        ("qwen3_next", false, json!({"linear_num_value_heads": 6, "linear_value_head_dim": 7, "num_experts": 5})),
        ("qwen3_5_moe", true, json!({"num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 5})),
        (
            "bailing_moe_linear",
            false,
            json!({
                "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10, "partial_rotary_factor": 0.4,
                "group_norm_size": 5, "num_hidden_layers": 7, "layer_group_size": 3, "num_experts": 6, "n_group": 3,
                "num_experts_per_tok": 3
            }),
        ),
        ("bailing_moe_linear", false, json!({"linear_silu": true, "use_qk_norm": false, "group_norm_size": 1})),
        (
            "bailing_moe_v2_5",
            false,
            json!({
                "q_lora_rank": null, "kv_lora_rank": 9, "qk_rope_head_dim": 2, "qk_nope_head_dim": 5,
                "qk_head_dim": 7, "v_head_dim": 7, "partial_rotary_factor": 0.125
            }),
        ),
        (
            "bailing_hybrid",
            false,
            json!({
                "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 7, "kv_lora_rank": 5,
                "q_lora_rank": 3
            }),
        ),
        ("kimi_linear", false, json!({"num_attention_heads": 1, "num_key_value_heads": 1, "kv_lora_rank": 17})),
        (
            "minimax_m1",
            false,
            json!({"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 6, "rotary_dim": 2}),
        ),
        ("minimax", false, json!({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 4})),
        (
            "olmo_hybrid",
            false,
            json!({
                "linear_num_value_heads": 4, "linear_value_head_dim": 5, "linear_allow_neg_eigval": false,
                "rope_parameters": null
            }),
        ),
        ("bamba", false, json!({"mamba_n_groups": 4, "mamba_d_state": 5, "mamba_d_conv": 2, "mamba_conv_bias": false})),
        (
            "bamba",
            false,
            json!({"mamba_n_groups": 1, "mamba_n_heads": 16, "mamba_d_head": 8, "tie_word_embeddings": true}),
        ),
    ] {
        let config = Files::golden(name).config;
        let what = format!("{name} {changes}");
        let files = model(config, changes, fused);
        check_everywhere(&files, &what);
    }
}

/// On the CPU with every instruction set against the float64 reference.
fn check_everywhere(files: &Files, what: &str) {
    let dir = files.write();
    // Operators that have decayed are omitted: that is what remains in float64.
    let want = check(&load(Reference::<f64>::new(), dir.path(), DType::F64).unwrap(), what, 1e-7);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        let what = format!("{what} {isa:?}");
        let got = check(&load(Cpu::with_isa(2, isa), dir.path(), DType::F32).unwrap(), &what, 1e-3);
        assert_close(&what, &got, &want, 1e-3);
        // With half the bits the shapes must still be right; the numbers are the kernels' tests to hold.
        load(Cpu::with_isa(2, isa), dir.path(), DType::Bf16).unwrap().run(vec![Item::Run(TOKENS.to_vec())]);
    }
}

/// What is told of an entry's size is what it takes.
#[test]
fn entries_are_as_large_as_told() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models/demo");
    let families = ["qwen3_5", "qwen3_5_vlm", "bailing_moe_linear", "bailing_hybrid", "kimi_linear", "bamba"];
    let folders = families.into_iter().map(|name| (golden(name), 256)).chain([(demo, 1700)]);
    for (dir, vocab) in folders {
        for dtype in [DType::F32, DType::Bf16] {
            let rig = load(Cpu::new(2), &dir, dtype).unwrap();
            let info = ModelInfo::of(rig.model.spec(), dtype);
            for (len, seam) in [(1, 0), (9, 8), (24, 8), (25, 8), (15, 0), (16, 0), (17, 0), (300, 8), (700, 0)] {
                let tokens: Vec<u32> = (0..len).map(|i| i * 7919 % vocab).collect();
                let entry = rig.entry(&tokens, seam, &[]);
                let told = info.entry_bytes(tokens.len(), seam);
                let omitted: usize = entry
                    .parts()
                    .iter()
                    .zip(&rig.model.spec().layers)
                    .map(|(part, layer)| match (&**part, &layer.mixer.body) {
                        (LayerPart::Recurrent(p), MixerSpec::Recurrent(m)) if m.form() == Form::Dense => {
                            let kept = hypic_state::Stored::bytes(p.transition.tensor());
                            m.shape.heads * m.shape.d_k * m.shape.d_k * 4 - kept
                        }
                        _ => 0,
                    })
                    .sum();
                let what = format!("{} in {dtype}, {len} tokens, seam {seam}", dir.display());
                assert_eq!(entry.bytes() + omitted, told, "{what}");
                assert!(len > 9 || omitted == 0, "{what}: nothing decays in one token");
            }
            assert_eq!(info.entry_bytes(8, 8), 0, "no body");
        }
    }
}
