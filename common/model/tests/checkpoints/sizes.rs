//! Numbers in a configuration: wrong ones are named, and none is multiplied or allocated unchecked.

use hypic_model::{Config, ModelInfo, families};
use hypic_state::DType;
use serde_json::{Value, json};

use crate::support::{Files, assert_refused};

const SIZES: [&str; 11] = [
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
];

#[test]
fn a_size_is_a_whole_number_within_reason() {
    let wrong =
        [json!(0), json!(-1), json!(1.5), json!("64"), json!([64]), json!(true), json!(10u64.pow(18)), json!(u64::MAX)];
    let more = ["linear_conv_kernel_dim", "max_position_embeddings"];
    for key in SIZES.into_iter().chain(more) {
        for value in &wrong {
            let dir = Files::plain().with(key, value.clone()).write();
            assert_refused(dir.path(), &["config.json: ", key, "must be"]);
        }
    }
}

#[test]
fn a_size_that_is_needed_and_missing_is_named() {
    for key in SIZES {
        // Heads of their own for K and V, and a width of their own, are optional.
        if ["num_key_value_heads", "head_dim"].contains(&key) {
            continue;
        }
        for value in [json!(null), Value::Null] {
            let dir = Files::plain().with(key, value).write();
            assert_refused(dir.path(), &[&format!("config.json: {key}: is missing")]);
        }
    }
    // Without a width of their own, heads share the hidden size: then the weights do not fit, and say so.
    let dir = Files::plain().with("head_dim", json!(null)).write();
    assert_refused(dir.path(), &["q_proj.weight", "[256, 64]", "[128, 64]"]);
    let dir = Files::plain().with("head_dim", json!(null)).with("num_attention_heads", json!(6)).write();
    assert_refused(dir.path(), &["config.json: hidden_size", "no multiple of num_attention_heads = 6"]);
}

/// Every combination of sizes that is accepted can be told without an overflow.
#[test]
fn large_sizes_do_not_overflow() {
    let huge = 1u64 << 20;
    let all_large = SIZES.iter().filter(|key| **key != "num_hidden_layers");
    let mut files = Files::plain().with("layer_types", json!(null)).with("num_hidden_layers", json!(4096));
    for key in all_large.clone() {
        files = files.with(key, json!(huge));
    }
    assert_refused(files.write().path(), &["config.json: ", "wider than"]);
    for key in ["head_dim", "linear_key_head_dim", "linear_value_head_dim"] {
        files = files.with(key, json!(1));
    }
    let describe = |files: &Files| {
        let config = Config::parse(&files.config.to_string()).unwrap();
        families::describe(&config).map(|spec| ModelInfo::of(&spec, DType::F32)).map_err(|e| e.to_string())
    };
    let info = describe(&files).expect("large, but not absurd");
    assert!(info.parameters > 1 << 50 && info.entry_bytes(1 << 20, 8) > 1 << 40);
    // One dimension at a time, on a small model: never a panic, and never weights that fit.
    for key in SIZES {
        for value in [1, 2, 3, 5, 127, 4096, huge] {
            let files = Files::plain().with(key, json!(value));
            if describe(&files).is_ok() && files.config != Files::plain().config {
                let same = value == 2 && ["num_key_value_heads", "linear_num_key_heads"].contains(&key);
                assert!(
                    same || crate::support::refusal(files.write().path()).contains(".safetensors"),
                    "{key} {value}"
                );
            }
        }
    }
}

#[test]
fn heads_must_divide() {
    for (key, value, other) in
        [("num_key_value_heads", 3, "num_attention_heads"), ("linear_num_key_heads", 3, "linear_num_value_heads")]
    {
        let dir = Files::plain().with(key, json!(value)).write();
        assert_refused(dir.path(), &[&format!("config.json: {other}: is 4, which is no multiple of {key} = 3")]);
    }
    let dir = Files::plain().with("num_key_value_heads", json!(8)).write();
    assert_refused(dir.path(), &["num_attention_heads", "num_key_value_heads = 8"]);
}

#[test]
fn the_epsilon_of_norms() {
    let logits = |files: Files| crate::support::logits(files.write().path());
    let plain = logits(Files::plain());
    assert_eq!(logits(Files::plain().with("rms_norm_eps", json!(null))), plain, "the family's default");
    assert_ne!(logits(Files::plain().with("rms_norm_eps", json!(1e-2))), plain);
    for bad in [json!(0), json!(-1e-6), json!(1e-60), json!(1.0), json!(1e300)] {
        assert_refused(
            Files::plain().with("rms_norm_eps", bad).write().path(),
            &["config.json: rms_norm_eps", "must be"],
        );
    }
    assert_refused(Files::plain().with("rms_norm_eps", json!("1e-6")).write().path(), &["rms_norm_eps", "a number"]);
}
