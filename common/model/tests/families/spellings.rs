//! One model in several key sets, and the names of families.

use hypic_model::spec::DecaySpec;
use serde_json::{Value, json};

use crate::support::*;

#[test]
fn both_key_sets_describe_one_model() {
    for name in ["kimi_linear", "bailing_hybrid"] {
        assert_same(name, &json(&format!("{name}/config.save_pretrained.json")), &fixture(name));
    }
    let config = with(&json("bailing_hybrid/config.save_pretrained.json"), "head_dim", 10);
    assert_refused(&config, &["head_dim", "neither linear_head_dim nor qk_rope_head_dim"]);
    // MiniMax's releases and transformers differ in the last digits of the decays.
    let (mut release, mut converted) =
        (describe(&json("minimax/config.release_names.json")), describe(&fixture("minimax")));
    assert_eq!((release.family, converted.family), ("minimax_m1", "minimax"));
    release.family = converted.family;
    for layer in 0..7 {
        let [mut theirs, mut ours] = [&release, &converted].map(|spec| recurrent(spec, layer).clone());
        let (DecaySpec::Fixed { log: a, .. }, DecaySpec::Fixed { log: b, .. }) = (&mut theirs.decay, &mut ours.decay)
        else {
            panic!("fixed decays")
        };
        assert!(a.iter().zip(&*b).all(|(a, b)| (a - b).abs() < 1e-5 && (layer == 0) == (a == b)), "{a:?} {b:?}");
        (*a, *b) = (vec![], vec![]);
        (release.layers[layer].mixer.body, converted.layers[layer].mixer.body) = (
            hypic_model::spec::MixerSpec::Recurrent(theirs.into()),
            hypic_model::spec::MixerSpec::Recurrent(ours.into()),
        );
    }
    assert_eq!(format!("{release:#?}"), format!("{converted:#?}"));
}

#[test]
fn a_text_model_may_be_nested_or_not() {
    for name in ["qwen3_5_moe", "qwen3_next", "olmo_hybrid"] {
        let flat = fixture(name);
        let nested = json!({"architectures": flat["architectures"], "text_config": flat});
        assert_same(name, &nested, &flat);
    }
    let vlm = fixture("qwen3_5_moe_vlm");
    let mut flat = vlm["text_config"].clone();
    flat["architectures"] = vlm["architectures"].clone();
    assert_same("qwen3_5_moe_vlm", &flat, &vlm);
}

#[test]
fn the_model_type_tells_where_architectures_are_missing() {
    for name in FIXTURES {
        let config = fixture(name);
        for nothing in [Value::Null, json!([])] {
            assert_same(name, &with(&config, "architectures", nothing), &config);
        }
        let alone = with(&with(&config, "architectures", Value::Null), "model_type", Value::Null);
        assert_refused(&alone, &["architectures", "is missing", "BambaForCausalLM"]);
    }
    assert_refused(
        &with(&fixture("bamba"), "architectures", json!(["LlamaForCausalLM"])),
        &["LlamaForCausalLM", "Bamba"],
    );
}

/// Ring-2.5 and Ling-3.0 share a model type.
#[test]
fn bailing_hybrid_is_told_by_its_keys_or_refused() {
    let both = ["BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "architectures"];
    let ring = with(&fixture("bailing_moe_v2_5"), "architectures", Value::Null);
    assert_eq!(describe(&ring).family, "bailing_moe_v2_5");
    let neither = with(&with(&ring, "group_norm_size", Value::Null), "linear_silu", Value::Null);
    assert_refused(&neither, &both);
    assert_refused(&with(&neither, "use_linear_silu", true), &["group_norm_size: is missing"]);
    assert_refused(&with(&ring, "kda_safe_gate", true), &both);
    let ling = with(&fixture("bailing_hybrid"), "architectures", Value::Null);
    assert_eq!(describe(&ling).family, "bailing_hybrid");
    assert_refused(&with(&ling, "group_norm_size", 2), &both);
    let alias = with(&fixture("bailing_hybrid"), "architectures", json!(["BailingHybridForCausalLM"]));
    assert_same("the name in transformers", &alias, &fixture("bailing_hybrid"));
}

#[test]
fn releases_of_minimax_have_three_names() {
    let release = fixture("minimax_m1");
    let text = with(&release, "architectures", json!(["MiniMaxText01ForCausalLM"]));
    assert_same("Text-01", &text, &release);
}

#[test]
fn the_epsilon_of_norms_has_three_names() {
    for name in FIXTURES.into_iter().filter(|name| !name.ends_with("vlm")) {
        let names = ["rms_norm_eps", "layer_norm_epsilon", "norm_eps"];
        let bare = names.iter().fold(fixture(name), |config, key| with(&config, key, Value::Null));
        for key in names {
            let named = with(&bare, key, 0.25);
            assert_eq!(describe(&named).final_norm.eps, 0.25, "{name}: {key}");
            let other = if key == names[0] { names[1] } else { names[0] };
            assert_refused(&with(&named, other, 0.5), &["differs from", key, other]);
        }
    }
}

#[test]
fn the_length_has_two_names() {
    for name in FIXTURES.into_iter().filter(|name| !name.ends_with("vlm")) {
        let bare = with(&with(&fixture(name), "max_position_embeddings", Value::Null), "model_max_length", Value::Null);
        // Nemotron-H's default is what the reference model has.
        assert_eq!(describe(&bare).max_positions == 4096, name.starts_with("nemotron_h"), "{name}");
        for key in ["max_position_embeddings", "model_max_length"] {
            assert_eq!(describe(&with(&bare, key, 77)).max_positions, 77, "{name}");
        }
    }
}
