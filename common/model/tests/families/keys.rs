//! Every key of every reference configuration: it is read, or it has no bearing on inference.

use serde_json::{Value, json};

use crate::support::*;

/// Keys that say nothing about what a text model computes from its weights and tokens.
const UNREAD: [&str; 51] = [
    "attention_dropout",
    "block_size",
    "chunk_size",
    "expand",
    "hidden_dropout",
    "mamba_ssm_cache_dtype",
    "mtp_layers_block_type",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "time_step_floor",
    // Of initial weights.
    "time_step_max",
    "time_step_min",
    "use_mamba_kernels",
    "moe_shared_expert_overlap",
    "bos_token_id",
    "dtype",
    "embedding_dropout",
    "image_token_id",
    "initializer_range",
    "linear_a_log_max",
    "linear_a_log_min",
    "linear_dt_init_floor",
    "linear_dt_max",
    "linear_dt_min",
    "mamba_chunk_size",
    "mamba_ssm_dtype",
    // `architectures` counts more.
    "model_type",
    "mrope_interleaved",
    "mtp_loss_scaling_factor",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    "num_logits_to_keep",
    "output_dropout",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "router_aux_loss_coef",
    "router_dtype",
    "router_jitter_noise",
    "seq_aux",
    // Of a shared expert that is refused.
    "shared_moe_mode",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
    "z_loss_coefficient",
    // The three rows of mrope are equal for text.
    "mrope_section",
    "max_window_layers",
];

/// Keys that one family does not read.
const UNREAD_BY: [(&str, &[&str]); 4] = [
    // Latent attention has neither key/value heads nor a width of heads, and Kimi's does not rotate.
    ("kimi_linear", &["num_key_value_heads", "head_dim", "rope_theta"]),
    ("bailing_hybrid", &["num_key_value_heads"]),
    // No block has experts.
    (
        "nemotron_h",
        &[
            "moe_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "n_group",
            "n_routed_experts",
            "n_shared_experts",
            "norm_topk_prob",
            "num_experts_per_tok",
            "num_nextn_predict_layers",
            "routed_scaling_factor",
            "topk_group",
        ],
    ),
    // Every layer has experts.
    ("qwen3_next", &["intermediate_size"]),
];

fn configs() -> Vec<(&'static str, Value)> {
    let more = ["kimi_linear", "bailing_hybrid"].map(|name| (name, "config.save_pretrained.json"));
    let release = ("minimax", "config.release_names.json");
    let read = |(name, file): (&'static str, &str)| (name, json(&format!("{name}/{file}")));
    FIXTURES.iter().map(|name| (*name, "config.json")).chain(more).chain([release]).map(read).collect()
}

/// Paths of all values but objects.
fn leaves(config: &Value) -> Vec<String> {
    let fields = config.as_object().expect("an object");
    let below = |(key, value): (&String, &Value)| match value {
        Value::Object(_) if key != "vision_config" => {
            leaves(value).into_iter().map(|path| format!("{key}.{path}")).collect()
        }
        Value::Null => vec![],
        _ => vec![key.clone()],
    };
    fields.iter().flat_map(below).collect()
}

#[test]
fn every_key_is_read_or_known_to_be_idle() {
    for (name, config) in configs() {
        for path in leaves(&config) {
            let key = path.rsplit('.').next().unwrap();
            let idle = UNREAD_BY.iter().any(|(of, keys)| *of == name && keys.contains(&key));
            let absurd = with(&config, &path, json!({"absurd": true}));
            match try_describe(&absurd) {
                Ok(_) => assert!(UNREAD.contains(&key) || idle, "{name}: {path} is not read"),
                Err(message) => {
                    assert!(message.contains(&path), "{name}: {path} is wrong, but: {message}");
                    assert!(!UNREAD.contains(&key), "{name}: {path} is read");
                }
            }
        }
    }
}

#[test]
fn a_key_that_is_missed_is_named() {
    for (name, config) in configs() {
        let mut needed = 0;
        for path in leaves(&config) {
            if let Err(message) = try_describe(&with(&config, &path, Value::Null)) {
                assert!(message.contains(&path), "{name} without {path}: {message}");
                assert!(message.contains("missing"), "{name} without {path}: {message}");
                needed += 1;
            }
        }
        assert!(needed >= 5, "{name} does with {needed} keys");
    }
}

#[test]
fn what_no_family_serves_is_refused_by_name() {
    for (name, config) in configs() {
        let inner = if config.get("text_config").is_some() { "text_config." } else { "" };
        for (key, value) in [
            ("hidden_act", json!("gelu")),
            ("attention_bias", json!(true)),
            ("use_bias", json!(true)),
            ("use_qkv_bias", json!(true)),
            ("mlp_bias", json!(true)),
            ("use_sliding_window", json!(true)),
            ("sliding_window", json!(128)),
            ("swiglu_limit", json!(7)),
        ] {
            let path = format!("{inner}{key}");
            assert_refused(&with(&config, &path, value), &["config.json: ", &path, "served"]);
        }
        for list in ["expert_swiglu_limit_list", "share_expert_swiglu_limit_list"] {
            let path = format!("{inner}{list}");
            assert_same(name, &with(&config, &path, json!([null, 0, 0.0, null, 0, 0, 0, null])), &config);
            // The first layer has no experts, or is not one that may have a limit.
            assert_refused(
                &with(&config, &path, json!([7, 0, 0, 0, 0, 0, 0, 0])),
                &["config.json: ", &path, "layer 0"],
            );
            for (wrong, word) in [(json!([0]), "has 1 entries"), (json!(7), "a list")] {
                assert_refused(&with(&config, &path, wrong), &["config.json: ", &path, word]);
            }
            for wrong in [json!(-1), json!("7"), json!(true)] {
                let all = json!([wrong, 0, 0, 0, 0, 0, 0, 0]);
                assert_refused(&with(&config, &path, all), &["config.json: ", &path, "0 or more"]);
            }
        }
        let width = with(&config, &format!("{inner}sliding_window"), 128);
        assert_same(name, &with(&width, &format!("{inner}use_sliding_window"), false), &config);
    }
    for (name, key, value) in [
        ("qwen3_5_moe", "norm_topk_prob", json!(false)),
        ("qwen3_5_moe", "mlp_only_layers", json!([1])),
        ("qwen3_next", "attn_output_gate", json!(false)),
        ("bailing_moe_linear", "score_function", json!("softmax")),
        ("bailing_moe_linear", "linear_rope", json!(false)),
        ("bailing_moe_v2_5", "topk_method", json!("greedy")),
        ("bailing_hybrid", "no_kda_lora", json!(false)),
        ("bailing_hybrid", "use_qk_norm", json!(false)),
        ("bailing_hybrid", "gated_attention_proj_granularity_type", json!("element_wise")),
        ("kimi_linear", "mla_use_nope", json!(false)),
        ("kimi_linear", "moe_router_activation_func", json!("softmax")),
        ("minimax_m1", "shared_intermediate_size", json!(16)),
        ("bailing_moe_linear", "norm_head", json!(true)),
        ("bailing_moe_v2_5", "norm_head", json!(true)),
        ("bailing_hybrid", "norm_head", json!(true)),
        ("bailing_moe_linear", "use_rmsnorm", json!(false)),
        ("bailing_moe_v2_5", "use_rmsnorm", json!(false)),
        ("bailing_hybrid", "use_rmsnorm", json!(false)),
        ("bamba", "mamba_proj_bias", json!(true)),
    ] {
        assert_refused(&with(&fixture(name), key, value), &["config.json: ", key, "served"]);
    }
}

#[test]
fn the_rule_of_composition_may_be_configured() {
    use hypic_state::ComposeRule;
    for (name, default) in [("qwen3_next", ComposeRule::Transition), ("bamba", ComposeRule::Last)] {
        let config = fixture(name);
        for (written, rule) in ComposeRule::NAMES {
            let spec = describe(&with(&config, "hypic", json!({"compose": written})));
            assert_eq!(spec.compose, rule, "{name}");
        }
        for nothing in [json!({}), json!({"compose": null})] {
            assert_eq!(describe(&with(&config, "hypic", nothing)).compose, default, "{name}");
        }
        assert_refused(
            &with(&config, "hypic", json!({"compose": "sum"})),
            &["config.json: hypic.compose", "'sum'", "last"],
        );
        assert_refused(&with(&config, "hypic", json!({"compose": 1})), &["config.json: hypic.compose", "a string"]);
        assert_refused(&with(&config, "hypic", json!({"seam": 8})), &["config.json: hypic.seam", "compose"]);
        assert_refused(&with(&config, "hypic", json!("last")), &["config.json: hypic", "an object"]);
    }
}

#[test]
fn a_head_may_be_the_embedding_in_every_family() {
    for (name, config) in configs() {
        let embed = describe(&config).embed;
        let tied = describe(&with(&config, "tie_word_embeddings", true));
        let inner = config.get("text_config").is_some();
        // The text model's word counts more.
        if !inner {
            assert_eq!((tied.head, tied.tied_head.as_deref()), (None, Some("lm_head.weight")), "{name}");
        }
        let untied = describe(&with(&config, "tie_word_embeddings", Value::Null));
        assert!(inner || untied.head.as_deref() == Some("lm_head.weight"), "{name}");
        assert!(embed.contains("embed"), "{name}: {embed}");
    }
}

/// Nothing is multiplied or listed without a bound.
#[test]
fn absurd_sizes_are_refused_and_not_described() {
    for (name, config) in configs() {
        for path in leaves(&config) {
            let at = path.split('.').fold(&config, |at, key| &at[key]);
            if !at.is_u64() {
                continue;
            }
            for size in [1u64 << 20, (1 << 20) + 1, u64::MAX] {
                if let Ok(spec) = try_describe(&with(&config, &path, size)) {
                    assert!(spec.layers.len() <= 4096 && spec.ignored.len() <= 4096, "{name} {path}");
                    let numbers =
                        spec.tensors(true).values().map(|shape| shape.iter().product::<usize>()).sum::<usize>();
                    assert!(numbers < 1 << 50, "{name} {path}");
                }
            }
        }
    }
    let many = with(&with(&fixture("qwen3_next"), "num_experts", 1 << 16), "num_experts_per_tok", 8);
    assert_refused(&many, &["config.json: num_experts: is 65536", "num_hidden_layers = 4", "131072"]);
}
