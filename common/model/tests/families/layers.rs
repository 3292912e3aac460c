//! Which layers are which, from every form of list.

use serde_json::{Value, json};

use crate::support::*;

fn kimi(full: Value, kda: Value) -> Value {
    let config = with(&fixture("kimi_linear"), "linear_attn_config.full_attn_layers", full);
    with(&config, "linear_attn_config.kda_layers", kda)
}

#[test]
fn kimis_lists_count_from_one() {
    let spec = |full, kda| pattern(&describe(&kimi(full, kda)));
    assert_eq!(spec(json!([4]), json!([1, 2, 3])), "LLLF");
    assert_eq!(spec(json!([1, 3]), json!([2, 4])), "FLFL");
    assert_eq!(spec(json!([3, 1]), json!([4, 2])), "FLFL", "in any order");
    assert_eq!(spec(json!([]), json!([1, 2, 3, 4])), "LLLL");
    let full = "linear_attn_config.full_attn_layers";
    let linear = "linear_attn_config.kda_layers";
    assert_refused(&kimi(json!([0]), json!([1, 2, 3])), &[full, "has 0", "numbered 1 to 4"]);
    assert_refused(&kimi(json!([5]), json!([1, 2, 3])), &[full, "has 5", "numbered 1 to 4"]);
    assert_refused(&kimi(json!([4]), json!([1, 2, 3, 4])), &[linear, "has layer 4", full]);
    assert_refused(&kimi(json!([4]), json!([1, 3])), &[linear, "lacks layer 2", full]);
    assert_refused(&kimi(json!([4.5]), json!([1, 2, 3])), &[full, "whole numbers"]);
    assert_refused(&kimi(json!(4), json!([1, 2, 3])), &[full, "whole numbers"]);
    assert_refused(&kimi(Value::Null, json!([1, 2, 3])), &[full, "missing"]);
    assert_refused(&kimi(json!([4]), Value::Null), &[linear, "missing"]);
    let missing = "linear_attn_config.full_attn_layers: is missing, and so is layer_types";
    assert_refused(&kimi(Value::Null, Value::Null), &[missing]);
}

#[test]
fn two_lists_must_agree() {
    let both = json("kimi_linear/config.save_pretrained.json");
    let kinds = json!(["linear_attention", "full_attention", "linear_attention", "full_attention"]);
    let other = with(&both, "layer_types", kinds.clone());
    assert_refused(&other, &["linear_attn_config", "differs from layer_types in layer 1"]);
    let alone = with(
        &with(&other, "linear_attn_config.full_attn_layers", Value::Null),
        "linear_attn_config.kda_layers",
        Value::Null,
    );
    assert_eq!(pattern(&describe(&alone)), "LFLF");
    let heads = with(&both, "linear_num_heads", 8);
    assert_refused(&heads, &["linear_attn_config.num_heads", "differs from linear_num_heads"]);
    // Without the object, heads come from keys of their own.
    let flat = with(&both, "linear_attn_config", Value::Null);
    assert_same("kimi without linear_attn_config", &flat, &both);
    let bamba = with(&fixture("bamba"), "layer_types", kinds);
    assert_refused(&bamba, &["attn_layer_indices", "differs from layer_types in layer 1"]);
    assert_eq!(pattern(&describe(&with(&bamba, "attn_layer_indices", Value::Null))), "LFLF");
    let minimax = with(&fixture("minimax"), "attn_type_list", json!([1, 0, 0, 0, 0, 0, 0, 1]));
    assert_refused(&minimax, &["attn_type_list", "differs from layer_types in layer 0"]);
}

#[test]
fn bambas_indices_count_from_zero() {
    let spec = |indices: Value| pattern(&describe(&with(&fixture("bamba"), "attn_layer_indices", indices)));
    assert_eq!(spec(json!([2])), "LLFL");
    assert_eq!(spec(json!([0, 3])), "FLLF");
    assert_eq!(spec(json!([])), "LLLL");
    let refused = |indices: Value, words: &[&str]| {
        assert_refused(&with(&fixture("bamba"), "attn_layer_indices", indices), words);
    };
    refused(json!([4]), &["attn_layer_indices", "has 4", "numbered 0 to 3"]);
    refused(json!([-1]), &["attn_layer_indices", "whole numbers"]);
    refused(Value::Null, &["attn_layer_indices", "missing", "layer_types"]);
    let named = with(&fixture("bamba"), "attn_layer_indices", Value::Null);
    for key in ["layer_types", "layers_block_type"] {
        let types = json!(["mamba", "attention", "mamba", "mamba"]);
        assert_eq!(pattern(&describe(&with(&named, key, types))), "LFLL");
        let unknown = json!(["mamba", "attention", "mamba", "moe"]);
        assert_refused(&with(&named, key, unknown), &[key, "[3]", "\"moe\"", "mamba"]);
    }
}

#[test]
fn minimax_marks_full_attention_by_one() {
    let spec = |list: Value| pattern(&describe(&with(&fixture("minimax_m1"), "attn_type_list", list)));
    assert_eq!(spec(json!([0, 0, 0, 0, 0, 0, 0, 1])), "LLLLLLLF");
    assert_eq!(spec(json!([1, 0, 0, 1, 0, 0, 0, 0])), "FLLFLLLL");
    let refused = |list: Value, words: &[&str]| {
        assert_refused(&with(&fixture("minimax_m1"), "attn_type_list", list), words);
    };
    refused(json!([0, 0, 0, 1]), &["attn_type_list", "4 entries", "num_hidden_layers is 8"]);
    refused(json!([0, 0, 0, 0, 0, 0, 0, 2]), &["attn_type_list[7] = 2", "0 and 1"]);
    refused(json!(["a"]), &["attn_type_list", "whole numbers"]);
    refused(Value::Null, &["attn_type_list", "missing", "layer_types"]);
    let named = with(&fixture("minimax_m1"), "attn_type_list", Value::Null);
    let types = fixture("minimax")["layer_types"].clone();
    assert_same("minimax_m1 by layer_types", &with(&named, "layer_types", types), &fixture("minimax_m1"));
}

#[test]
fn bailing_groups_end_with_full_attention_and_so_does_the_tail() {
    for name in ["bailing_moe_linear", "bailing_moe_v2_5", "bailing_hybrid"] {
        let spec = |layers: usize, group: usize| {
            let config = with(&with(&fixture(name), "num_hidden_layers", layers), "layer_group_size", group);
            pattern(&describe(&config))
        };
        assert_eq!(spec(10, 5), "LLLLFLLLLF", "{name}");
        assert_eq!(spec(7, 3), "LLFLLFF", "{name}");
        assert_eq!(spec(8, 5), "LLLLFFFF", "{name}");
        assert_eq!(spec(3, 5), "FFF", "{name}: no whole group");
        assert_eq!(spec(2, 1), "FF", "{name}");
        let listed = with(&with(&fixture(name), "num_hidden_layers", 3), "layer_group_size", Value::Null);
        assert_refused(&listed, &["layer_group_size", "missing"]);
        let types = json!(["full_attention", "linear_attention", "full_attention"]);
        assert_eq!(pattern(&describe(&with(&listed, "layer_types", types))), "FLF", "{name}");
        let zero = with(&fixture(name), "layer_group_size", 0);
        assert_refused(&zero, &["layer_group_size", "from 1"]);
    }
}

#[test]
fn every_fourth_layer_of_qwen_and_olmo_by_default() {
    for name in ["qwen3_5_moe", "qwen3_next", "olmo_hybrid"] {
        let config = with(&with(&fixture(name), "layer_types", Value::Null), "num_hidden_layers", 9);
        assert_eq!(pattern(&describe(&config)), "LLLFLLLFL", "{name}");
    }
    let config = with(&fixture("qwen3_next"), "layer_types", Value::Null);
    assert_eq!(pattern(&describe(&with(&config, "full_attention_interval", 2))), "LFLF");
    // The last layer of an OLMo that is too small for a fourth one.
    let olmo = with(&fixture("olmo_hybrid"), "layer_types", Value::Null);
    for (layers, kinds) in [(2, "LF"), (3, "LLF"), (4, "LLLF"), (5, "LLLFL")] {
        assert_eq!(pattern(&describe(&with(&olmo, "num_hidden_layers", layers))), kinds);
    }
}

#[test]
fn a_list_of_layers_counts_more_than_a_rule_and_a_difference_is_told() {
    let listed = |name: &str| {
        let config = with(&fixture(name), "num_hidden_layers", 4);
        let types = json!(["linear_attention", "full_attention", "linear_attention", "full_attention"]);
        with(&config, "layer_types", types)
    };
    for (name, key) in [
        ("qwen3_next", "full_attention_interval"),
        ("qwen3_5", "full_attention_interval"),
        ("bailing_moe_linear", "layer_group_size"),
        ("bailing_moe_v2_5", "layer_group_size"),
        ("bailing_hybrid", "layer_group_size"),
    ] {
        let warnings = |config: &Value| {
            let (spec, warnings) = with_warnings(|| describe(config));
            assert_eq!(pattern(&spec), "LFLF", "{name}");
            warnings
        };
        assert_eq!(warnings(&with(&listed(name), key, 2)), 0, "{name}: the same");
        assert_eq!(warnings(&with(&listed(name), key, 3)), 1, "{name}: another");
        assert_eq!(warnings(&with(&listed(name), key, Value::Null)), 0, "{name}: the list alone");
    }
}

#[test]
fn an_unknown_kind_of_layer_is_refused_by_name() {
    for (name, inner) in [("qwen3_5_moe_vlm", "text_config."), ("qwen3_next", ""), ("olmo_hybrid", ""), ("minimax", "")]
    {
        let config = fixture(name);
        let path = format!("{inner}layer_types");
        let mut types = path.split('.').fold(&config, |at, key| &at[key]).clone();
        types[1] = json!("sliding_attention");
        assert_refused(&with(&config, &path, types), &[&format!("{path}[1]"), "sliding_attention", "linear_attention"]);
    }
}

#[test]
fn layers_with_experts() {
    let next = |key: &str, value: Value| feeds(&describe(&with(&fixture("qwen3_next"), key, value)));
    assert_eq!(next("decoder_sparse_step", json!(2)), "dEdE");
    assert_eq!(next("mlp_only_layers", json!([0, 3])), "dEEd");
    assert_refused(
        &with(&fixture("qwen3_next"), "mlp_only_layers", json!([4])),
        &["mlp_only_layers", "has 4", "0 to 3"],
    );
    for name in ["bailing_moe_linear", "kimi_linear"] {
        let feeds_with = |key: &str, value: Value| feeds(&describe(&with(&fixture(name), key, value)));
        let layers = feeds_with("first_k_dense_replace", json!(0)).len();
        assert_eq!(feeds_with("first_k_dense_replace", json!(0)), "E".repeat(layers));
        assert_eq!(feeds_with("first_k_dense_replace", json!(3)), format!("ddd{}", "E".repeat(layers - 3)));
        assert_eq!(feeds_with("first_k_dense_replace", json!(99)), "d".repeat(layers));
        assert_eq!(feeds_with("moe_layer_freq", json!(2)), "ddEdE"[..layers], "{name}");
        let missing = with(&fixture(name), "first_k_dense_replace", Value::Null);
        assert_refused(&missing, &["first_k_dense_replace", "missing", "mlp_layer_types"]);
        let listed: Vec<&str> = (0..layers).map(|l| if l == 1 { "sparse" } else { "dense" }).collect();
        let listed = with(&missing, "mlp_layer_types", json!(listed));
        assert_eq!(feeds(&describe(&listed)), format!("dE{}", "d".repeat(layers - 2)));
        let mut unknown = listed.clone();
        unknown["mlp_layer_types"][0] = json!("moe");
        assert_refused(&unknown, &["mlp_layer_types[0]", "\"moe\"", "dense and sparse"]);
    }
}

#[test]
fn blocks_of_nemotron() {
    let config = fixture("nemotron_h");
    let bare = with(&config, "layers_block_type", Value::Null);
    let spec = |letters: &str| describe(&with(&bare, "hybrid_override_pattern", letters));
    assert_same("letters", &with(&bare, "hybrid_override_pattern", "M-M*-M"), &config);
    assert_same("words", &with(&bare, "layer_types", config["layers_block_type"].clone()), &config);
    let short = json!(["mamba", "mlp", "mamba", "attention", "mlp", "mamba"]);
    assert_same("short words", &with(&config, "layers_block_type", short), &config);
    assert_eq!((pattern(&spec("MM*M-")), feeds(&spec("MM*M-"))), ("LLFL".to_string(), "---d".to_string()));
    let refused = |letters: &str, words: &[&str]| {
        assert_refused(&with(&bare, "hybrid_override_pattern", letters), words);
    };
    refused("-M", &["hybrid_override_pattern[0] = \"-\"", "behind no mixer"]);
    refused("M--", &["hybrid_override_pattern[2] = \"-\"", "behind no mixer"]);
    refused("EM", &["hybrid_override_pattern[0] = \"E\"", "behind no mixer"]);
    refused("M-E", &["hybrid_override_pattern[2] = \"E\"", "behind no mixer"]);
    refused("MX", &["hybrid_override_pattern[1] = \"X\"", "experts are served"]);
    let with_experts = fixture("nemotron_h_moe");
    let bare = with(&with_experts, "layers_block_type", Value::Null);
    assert_same("E", &with(&bare, "hybrid_override_pattern", "MEM*EM-"), &with_experts);
    refused("", &["hybrid_override_pattern", "is empty"]);
    assert_refused(&with(&bare, "layers_block_type", json!([])), &["layers_block_type", "is empty"]);
    assert_refused(&bare, &["hybrid_override_pattern", "missing", "layers_block_type"]);
    // Both may be there if they say the same.
    assert_same("both", &with(&config, "hybrid_override_pattern", "M-M*-M"), &config);
    assert_refused(
        &with(&config, "hybrid_override_pattern", "M-M*M-"),
        &["hybrid_override_pattern", "differs from layers_block_type"],
    );
    assert_refused(&with(&config, "num_hidden_layers", 7), &["layers_block_type", "6 entries", "num_hidden_layers"]);
    assert_same("their number", &with(&config, "num_hidden_layers", 6), &config);
    assert_refused(&with(&config, "mlp_hidden_act", "silu"), &["mlp_hidden_act", "relu2"]);
    let width = with(&with(&config, "head_dim", Value::Null), "attention_head_dim", 16);
    assert_same("attention_head_dim", &width, &config);
}

#[test]
fn predictors_behind_the_last_layer_are_ignored() {
    for (name, key, layers) in
        [("bailing_moe_linear", "num_nextn_predict_layers", 5), ("kimi_linear", "num_mtp_layers", 4)]
    {
        let config = with(&fixture(name), "num_nextn_predict_layers", Value::Null);
        assert_eq!(describe(&config).ignored, Vec::<String>::new(), "{name}");
        let prefix = |l: usize| format!("model.layers.{l}.");
        assert_eq!(describe(&with(&config, key, 2)).ignored, [prefix(layers), prefix(layers + 1)], "{name}");
        assert_refused(&with(&config, key, 1u64 << 40), &["config.json: ", key, "at most"]);
    }
    let vlm = describe(&fixture("qwen3_5_moe_vlm"));
    assert_eq!(vlm.ignored, ["model.visual.", "mtp."]);
}
