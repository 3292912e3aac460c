//! `hypic model info`.

use serde_json::{Value, json};

use crate::support::{Files, answer, fails, hypic, repository};

/// Every fixture, and parts of the names of its tensors that the engine does not serve.
const CHECKPOINTS: [(&str, &[&str]); 17] = [
    ("qwen3_5", &[]),
    ("qwen3_5_vlm", &["model.visual.", "mtp."]),
    ("qwen3_5_moe", &[]),
    ("qwen3_5_moe_vlm", &["model.visual.", "mtp."]),
    ("qwen3_next", &[]),
    ("bailing_moe_linear", &[]),
    ("bailing_moe_v2_5", &[]),
    ("bailing_hybrid", &[]),
    ("kimi_linear", &[]),
    ("minimax", &["self_attn.slope_rate", "_decay"]),
    ("minimax_m1", &[]),
    ("olmo_hybrid", &[]),
    ("bamba", &[]),
    ("granitemoehybrid", &[]),
    ("nemotron_h", &[]),
    ("nemotron_h_moe", &[]),
    ("nemotron_h_latent_moe", &[]),
];

/// Configurations of released models that are complete, their linear and full layers, and their kind of T.
const COMPLETE: [(&str, [usize; 2], &str); 7] = [
    ("Qwen3.5-35B-A3B", [30, 10], "dense"),
    ("Qwen3.5-122B-A10B", [36, 12], "dense"),
    ("Qwen3-Next-80B-A3B", [36, 12], "dense"),
    ("Ring-mini-linear-2.0", [16, 4], "scalar"),
    ("Kimi-Linear-48B-A3B", [20, 7], "dense"),
    ("MiniMax-M1", [70, 10], "scalar"),
    ("Ling-3.0-flash", [35, 7], "dense"),
];

#[test]
fn of_the_demo_model() {
    let info = answer(&["model", "info", "--json"]);
    assert_eq!(info["family"], "qwen3_5");
    assert_eq!((&info["layers"], &info["linear_layers"], &info["attention_layers"]), (&json!(8), &json!(6), &json!(2)));
    assert_eq!(info["dtype"], "bf16");
    assert_eq!(info["compose"], "transition");
    assert_eq!(info["turn_anchor"]["text"], "<|im_start|>user\n");
    let parameters = info["parameters"].as_u64().unwrap();
    assert!((1_940_000..1_960_000).contains(&parameters), "{parameters}");
    assert_eq!(answer(&["model", "info", &repository("models/demo"), "--json"]), info);
}

#[test]
fn a_configuration_alone_is_enough() {
    for (name, _) in CHECKPOINTS {
        let golden = repository(&format!("golden/{name}"));
        let whole = answer(&["model", "info", &golden, "--json"]);
        let files = Files::new();
        let file = files.write("config.json", std::fs::read(format!("{golden}/config.json")).unwrap());
        assert_eq!(answer(&["model", "info", files.path(), "--json"]), whole);
        assert_eq!(answer(&["model", "info", &file, "--json"]), whole);
        assert_eq!(whole["turn_anchor"], Value::Null);
        assert_eq!(whole["dtype"], "f32");
    }
}

#[test]
fn parameters_are_those_of_the_file() {
    for (name, ignored) in CHECKPOINTS {
        let bytes = std::fs::read(repository(&format!("golden/{name}/model.safetensors"))).unwrap();
        let weights = safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors();
        let served = weights.iter().filter(|(tensor, _)| !ignored.iter().any(|part| tensor.contains(part)));
        let count: usize = served.map(|(_, t)| t.shape().iter().product::<usize>()).sum();
        let info = answer(&["model", "info", &repository(&format!("golden/{name}")), "--json"]);
        assert_eq!(info["parameters"], json!(count), "{name}");
    }
}

#[test]
fn released_models_are_told_from_their_configuration() {
    for (name, [linear, full], transition) in COMPLETE {
        let file = repository(&format!("golden/production_configs/{name}.json"));
        let info = answer(&["model", "info", &file, "--dtype", "bf16", "--json"]);
        assert_eq!((&info["linear_layers"], &info["attention_layers"]), (&json!(linear), &json!(full)), "{name}");
        assert_eq!((&info["transition"], &info["compose"]), (&json!(transition), &json!("transition")), "{name}");
        let at = |tokens: &str| info["entry_bytes"][tokens].as_u64().unwrap();
        let per_token = info["kv_bytes_per_token"].as_u64().unwrap() + 4;
        assert_eq!(at("8192") - at("2048"), 6144 * per_token, "{name}");
        assert!(at("512") > info["entry_recurrent_bytes"].as_u64().unwrap(), "{name}");
        let run = hypic(&["model", "info", &file]);
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{name}");
        for word in [name, &format!("{linear} linear, {full} full attention"), transition, "8192 tokens"] {
            assert!(run.stdout.contains(word), "{word} is not in {}", run.stdout);
        }
    }
}

#[test]
fn an_incomplete_configuration_is_refused_by_the_key_that_is_missing() {
    for (name, key) in [("Ring-flash-linear-2.0", "group_norm_size"), ("Ring-2.5-1T", "first_k_dense_replace")] {
        let file = repository(&format!("golden/production_configs/{name}.json"));
        fails(1, &["model", "info", &file], &[&format!("{name}.json: {key}: is missing")]);
    }
}

#[test]
fn sizes_follow_dtype_length_and_seam() {
    let golden = repository("golden/qwen3_5");
    let info = |more: &[&str]| answer(&[&["model", "info", &golden, "--json"], more].concat());
    let (f32, bf16) = (info(&[]), info(&["--dtype", "bf16"]));
    let number = |v: &Value, key: &str| v[key].as_u64().unwrap();
    // 2 attention layers, K and V, 2 heads of 32.
    assert_eq!((number(&f32, "kv_bytes_per_token"), number(&bf16, "kv_bytes_per_token")), (1024, 512));
    // 6 layers: S of 4 heads [16, 32] and 3 rows of the window of 2 * 2 * 16 + 4 * 32 channels.
    assert_eq!(number(&f32, "sequence_bytes"), 6 * 4 * (4 * 16 * 32 + 3 * 192));
    assert_eq!(number(&f32, "entry_operator_bytes"), 6 * 4 * 4 * 16 * 16);
    let at = |v: &Value, tokens: &str| v["entry_bytes"][tokens].as_u64().unwrap();
    assert_eq!(at(&f32, "2048") - at(&f32, "512"), 1536 * (1024 + 4), "K, V and the ids of 1536 tokens");
    let wide = info(&["--seam", "512"]);
    assert_eq!(at(&wide, "512"), 0, "no body, no entry");
    // The body is 504 tokens shorter; keys come in blocks of 16, so that 2040 of them take the room of 2048.
    assert_eq!(at(&f32, "2048") - at(&wide, "2048"), (2048 - 1536) * 512 + 504 * 512);
}

#[test]
fn as_a_table() {
    let run = hypic(&["model", "info"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    for word in ["qwen3_5", "6 linear, 2 full attention", "1.95 million", "transition", "anchor turn", "512 tokens"] {
        assert!(run.stdout.contains(word), "{word} is not in {}", run.stdout);
    }
}

#[test]
fn what_cannot_be_told_is_refused() {
    let files = Files::new();
    fails(1, &["model", "info", files.path()], &["config.json", files.path()]);
    fails(1, &["model", "info", &format!("{}/nowhere", files.path())], &["nowhere", "does not exist"]);
    let file = files.write("config.json", "{");
    fails(1, &["model", "info", &file], &["config.json", "not valid JSON"]);
    fails(1, &["model", "info", files.path()], &["config.json", "not valid JSON"]);
    files.write("config.json", b"\xff\xff");
    fails(1, &["model", "info", files.path(), "--json"], &["config.json", "UTF-8"]);
    files.write("config.json", r#"{"architectures": ["MambaForCausalLM"]}"#);
    fails(1, &["model", "info", files.path(), "--json"], &["MambaForCausalLM", "Qwen3_5ForCausalLM"]);
    files.write("config.json", r#"{"architectures": ["Qwen3_5ForCausalLM"]}"#);
    fails(1, &["model", "info", files.path()], &["config.json: hidden_size: is missing"]);
}
