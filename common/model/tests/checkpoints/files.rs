//! Damaged and inconsistent files.

use serde_json::{Value, json};

use crate::support::{Files, SHARDS, assert_refused, golden, logits, refusal};

fn first_tensor(map: &Value, shard: &str) -> String {
    let map = map["weight_map"].as_object().unwrap();
    map.iter().find(|(_, s)| *s == shard).unwrap().0.clone()
}

#[test]
fn shards_are_the_same_model() {
    let files = Files::plain();
    assert_eq!(logits(files.write_sharded(|_| {}).path()), logits(&golden("qwen3_5")));
}

#[test]
fn a_missing_shard_is_named() {
    let dir = Files::plain().write_sharded(|_| {});
    std::fs::remove_file(dir.path().join(SHARDS[1])).unwrap();
    assert_refused(dir.path(), &[SHARDS[1], "missing", "model.safetensors.index.json"]);
}

#[test]
fn an_index_and_its_shards_must_agree() {
    let files = Files::plain();
    let dir = files.write_sharded(|index| index["weight_map"]["model.ghost.weight"] = json!(SHARDS[0]));
    assert_refused(dir.path(), &[SHARDS[0], "lacks tensor model.ghost.weight"]);

    let mut moved = String::new();
    let dir = files.write_sharded(|index| {
        moved = first_tensor(index, SHARDS[0]);
        index["weight_map"][&moved] = json!(SHARDS[1]);
    });
    assert_refused(dir.path(), &[SHARDS[1], &moved, "index"]);

    let dir = files.write_sharded(|index| {
        moved = first_tensor(index, SHARDS[1]);
        index["weight_map"].as_object_mut().unwrap().remove(&moved);
    });
    assert_refused(dir.path(), &[SHARDS[1], &moved, "does not list"]);
}

#[test]
fn a_tensor_in_two_shards_is_refused() {
    let files = Files::plain();
    let dir = files.write_sharded(|_| {});
    let third = "model-00003-of-00003.safetensors";
    let mut twin = files.clone();
    twin.tensors.retain(|name, _| name == "model.norm.weight");
    std::fs::write(dir.path().join(third), twin.bytes()).unwrap();
    let path = dir.path().join("model.safetensors.index.json");
    let mut index: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    index["weight_map"]["model.norm.weight"] = json!(third);
    std::fs::write(&path, index.to_string()).unwrap();
    assert_refused(dir.path(), &[third, "model.norm.weight", "is also in"]);
}

#[test]
fn shard_names_are_plain_file_names() {
    let files = Files::plain();
    let outside = files.write();
    let absolute = outside.path().join("model.safetensors");
    let tricks = ["../model.safetensors", "a/b", "a/", "..", ".", "", "/", ".hidden", "a\\b", "a\0b"];
    for name in tricks.into_iter().chain([absolute.to_str().unwrap()]) {
        let dir = files.write_sharded(|index| {
            let moved = first_tensor(index, SHARDS[0]);
            index["weight_map"][&moved] = json!(name);
        });
        assert_refused(dir.path(), &["model.safetensors.index.json", "plain file name"]);
    }
}

#[test]
fn a_broken_index_is_named() {
    for text in ["", "{", "[]", "{}", r#"{"weight_map": []}"#, r#"{"weight_map": {"a": 1}}"#] {
        let dir = Files::plain().write();
        std::fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
        assert_refused(dir.path(), &["model.safetensors.index.json"]);
    }
}

#[test]
fn truncated_weights_are_refused_wherever_they_end() {
    let files = Files::plain();
    let whole = files.bytes();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let ends = [0, 1, 7, 8, 9, header / 2, header + 7, header + 8, header + 9, whole.len() / 2, whole.len() - 1];
    for end in ends {
        let dir = files.write_config();
        std::fs::write(dir.path().join("model.safetensors"), &whole[..end]).unwrap();
        assert_refused(dir.path(), &["model.safetensors", "truncated"]);
    }
}

#[test]
fn truncated_shards_are_refused_wherever_they_end() {
    for shard in SHARDS {
        let dir = Files::plain().write_sharded(|_| {});
        let path = dir.path().join(shard);
        let whole = std::fs::read(&path).unwrap();
        let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        for end in [0, 7, 8, header / 2, header + 8, whole.len() / 2, whole.len() - 1] {
            std::fs::write(&path, &whole[..end]).unwrap();
            assert_refused(dir.path(), &[shard, "truncated"]);
        }
        std::fs::write(&path, b"").unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert_refused(dir.path(), &[shard, "missing"]);
    }
}

#[test]
fn bytes_behind_the_last_tensor_are_refused() {
    let files = Files::plain();
    let dir = files.write_config();
    let mut whole = files.bytes();
    whole.extend([0; 3]);
    std::fs::write(dir.path().join("model.safetensors"), whole).unwrap();
    assert_refused(dir.path(), &["model.safetensors", "belong to no tensor"]);
}

#[test]
fn headers_that_lie_are_refused() {
    let dir = Files::plain().write_config();
    let write = |header_len: u64, header: &str, data: usize| {
        let mut file = header_len.to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(vec![0; data]);
        std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
        let message = refusal(dir.path());
        assert!(message.starts_with("model.safetensors: "), "{message}");
    };
    for len in [0, 1, 100, u64::MAX, u64::MAX - 7, 100_000_001, 1 << 40] {
        write(len, "{}", 0);
    }
    let tensor = |dtype: &str, shape: Value, offsets: [u64; 2]| {
        json!({"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).to_string()
    };
    let max = u64::MAX;
    for header in [
        tensor("F32", json!([2]), [0, 4]),
        tensor("F32", json!([2]), [8, 0]),
        tensor("F32", json!([2]), [4, 12]),
        tensor("F32", json!([max, max]), [0, 8]),
        tensor("F32", json!([1u64 << 62]), [0, max]),
        tensor("U8", json!([1u64 << 60]), [0, 1 << 60]),
        tensor("F32", json!([-1]), [0, 8]),
        tensor("QUUX", json!([2]), [0, 8]),
        "[]".to_string(),
        "not json".to_string(),
        r#"{"t": 1}"#.to_string(),
        // Two tensors over the same bytes.
        json!({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
               "b": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}})
        .to_string(),
        // Two tensors that overlap in part, in either order.
        json!({"a": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]},
               "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}})
        .to_string(),
        json!({"b": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]},
               "a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}})
        .to_string(),
        // One within another.
        json!({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
               "b": {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]}})
        .to_string(),
        // A hole before the first tensor.
        json!({"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}).to_string(),
        // One name twice, once with other bytes.
        r#"{"t": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
            "t": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}"#
            .to_string(),
        // A gap between tensors.
        json!({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
               "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}})
        .to_string(),
    ] {
        write(header.len() as u64, &header, 8);
    }
}

#[test]
fn what_is_not_there_is_named() {
    let empty = tempfile::tempdir().unwrap();
    assert_refused(empty.path(), &["config.json"]);
    let dir = Files::plain().write_config();
    assert_refused(dir.path(), &["model.safetensors", "model.safetensors.index.json", "neither"]);
    assert_refused(&dir.path().join("nowhere"), &["nowhere", "config.json"]);
}

#[test]
fn a_configuration_must_be_an_object_in_json() {
    let files = Files::plain();
    let text = files.config.to_string();
    let bad: [&[u8]; 7] = [b"", b"{", b"[]", b"null", b"\"x\"", b"\xff\xfe{}", &text.as_bytes()[..text.len() - 2]];
    for bytes in bad {
        let dir = files.write();
        std::fs::write(dir.path().join("config.json"), bytes).unwrap();
        assert_refused(dir.path(), &["config.json"]);
    }
    let dir = files.write();
    std::fs::write(dir.path().join("config.json"), format!("\u{feff}{text}")).unwrap();
    assert_eq!(logits(dir.path()), logits(&golden("qwen3_5")), "a byte order mark");
}

#[test]
fn a_broken_generation_config_is_named() {
    for bytes in [b"".as_slice(), b"[1]", b"{\"top_k\":", b"\xff"] {
        let dir = Files::plain().write();
        std::fs::write(dir.path().join("generation_config.json"), bytes).unwrap();
        let message = refusal(dir.path());
        assert!(message.starts_with("generation_config.json: "), "{message}");
    }
}
