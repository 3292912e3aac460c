//! `hypic model info`.

use serde_json::{Value, json};

use crate::support::{Files, answer, fails, hypic, repository};

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
    for name in ["qwen3_5", "qwen3_5_vlm"] {
        let golden = repository(&format!("golden/{name}"));
        let whole = answer(&["model", "info", &golden, "--json"]);
        let files = Files::new();
        files.write("config.json", std::fs::read(format!("{golden}/config.json")).unwrap());
        assert_eq!(answer(&["model", "info", files.path(), "--json"]), whole);
        assert_eq!(whole["turn_anchor"], Value::Null);
        assert_eq!(whole["dtype"], "f32");
    }
}

#[test]
fn parameters_are_those_of_the_file() {
    let bytes = std::fs::read(repository("golden/qwen3_5/model.safetensors")).unwrap();
    let weights = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let count: usize = weights.tensors().iter().map(|(_, t)| t.shape().iter().product::<usize>()).sum();
    let info = answer(&["model", "info", &repository("golden/qwen3_5"), "--json"]);
    assert_eq!(info["parameters"], json!(count));
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
    fails(1, &["model", "info", &file], &["is a file"]);
    fails(1, &["model", "info", files.path()], &["config.json", "not valid JSON"]);
    files.write("config.json", b"\xff\xff");
    fails(1, &["model", "info", files.path(), "--json"], &["config.json", "UTF-8"]);
    files.write("config.json", r#"{"architectures": ["MambaForCausalLM"]}"#);
    fails(1, &["model", "info", files.path(), "--json"], &["MambaForCausalLM", "Qwen3_5ForCausalLM"]);
    files.write("config.json", r#"{"architectures": ["Qwen3_5ForCausalLM"]}"#);
    fails(1, &["model", "info", files.path()], &["config.json: hidden_size: is missing"]);
}
