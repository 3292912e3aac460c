//! The same model, described in each way that releases use; and descriptions of models that are not served.

use serde_json::{Value, json};

use crate::support::{Files, assert_refused, golden, logits};

#[track_caller]
fn assert_same(files: &Files, want: &[f64], what: &str) {
    assert_eq!(logits(files.write().path()), want, "{what}");
}

/// The text model's configuration under `text_config`.
fn nested(files: &Files) -> Files {
    let mut nested = files.clone();
    nested.config = json!({"architectures": files.config["architectures"], "text_config": files.config});
    nested.config["text_config"].as_object_mut().unwrap().remove("architectures");
    nested
}

#[test]
fn nesting_and_the_names_of_the_family() {
    let (plain, release) = (Files::plain(), Files::release());
    let (want_plain, want_release) = (logits(&golden("qwen3_5")), logits(&golden("qwen3_5_vlm")));
    assert_same(&nested(&plain), &want_plain, "plain, nested");
    for missing in [json!(null), json!([])] {
        assert_same(&plain.clone().with("architectures", missing.clone()), &want_plain, "by model type");
        assert_same(&release.clone().with("architectures", missing), &want_release, "by model type");
    }
    let mut flat = release.clone();
    flat.config = release.config["text_config"].clone();
    flat.config["architectures"] = release.config["architectures"].clone();
    assert_same(&flat, &want_release, "release, flat");

    let nameless = plain.clone().with("architectures", json!(null)).with("model_type", json!(null));
    assert_refused(nameless.write().path(), &["config.json", "architectures", "Qwen3_5ForCausalLM"]);
    let other = plain.clone().with("architectures", json!(["LlamaForCausalLM"]));
    assert_refused(other.write().path(), &["LlamaForCausalLM", "Qwen3_5ForCausalLM"]);
    let other = nameless.with("model_type", json!("llama"));
    assert_refused(other.write().path(), &["llama", "Qwen3_5ForCausalLM"]);
    for bad in [json!("Qwen3_5ForCausalLM"), json!([1]), json!({})] {
        let bad = plain.clone().with("architectures", bad);
        assert_refused(bad.write().path(), &["config.json", "architectures", "list of strings"]);
    }
    for bad in [json!("x"), json!([]), json!(1)] {
        assert_refused(release.clone().with("text_config", bad).write().path(), &["text_config", "object"]);
    }
}

/// Other parameters than the golden model's.
const THETA: f64 = 5000.0;
const PARTIAL: f64 = 0.5;

#[test]
fn rope_parameters_are_found_wherever_they_are() {
    let bare = Files::plain().with("rope_parameters", json!(null));
    let named = bare.clone().with("rope_theta", json!(1e7));
    assert_same(&named, &logits(&golden("qwen3_5")), "the family's share of a head");

    let both = json!({"rope_theta": THETA, "partial_rotary_factor": PARTIAL});
    let want = logits(bare.clone().with("rope_parameters", both.clone()).write().path());
    assert_ne!(want, logits(&golden("qwen3_5")));
    let scaling = json!({"type": "default", "rope_theta": THETA, "partial_rotary_factor": PARTIAL});
    let per_type = json!({"full_attention": both, "linear_attention": {"rope_theta": 1.0}});
    let top = bare.clone().with("rope_theta", json!(THETA)).with("partial_rotary_factor", json!(PARTIAL));
    let places = [
        ("per layer type", bare.clone().with("rope_parameters", per_type)),
        ("rope_scaling", bare.clone().with("rope_scaling", scaling.clone())),
        ("top level", top.clone()),
    ];
    for (what, files) in places {
        assert_same(&files, &want, what);
        assert_same(&nested(&files), &want, &format!("{what}, nested"));
    }
    // At the outer level of a nested configuration.
    let outer = nested(&bare);
    let outer_top = outer.clone().with("rope_theta", json!(THETA)).with("partial_rotary_factor", json!(PARTIAL));
    assert_same(&outer_top, &want, "outer top level");
    assert_same(&outer.clone().with("rope_parameters", both.clone()), &want, "outer rope_parameters");
    assert_same(&outer.clone().with("rope_scaling", scaling), &want, "outer rope_scaling");

    // One parameter here, the other there.
    let split = bare.clone().with("rope_parameters", json!({"rope_theta": THETA}));
    assert_same(&split.clone().with("partial_rotary_factor", json!(PARTIAL)), &want, "split");
    assert_same(&nested(&split).with("partial_rotary_factor", json!(PARTIAL)), &want, "split over levels");

    // Where two differ, the more specific counts.
    let conflict = bare.clone().with("rope_parameters", both.clone()).with("rope_theta", json!(7.0));
    assert_same(&conflict.with("partial_rotary_factor", json!(1.0)), &want, "rope_parameters over the top level");
    let outer = nested(&bare.with("rope_parameters", both)).with("rope_theta", json!(7.0));
    assert_same(&outer.with("partial_rotary_factor", json!(1.0)), &want, "the text model's over the outer ones");
}

#[test]
fn rope_parameters_out_of_range_are_named() {
    let set = |key: &str, value: Value| Files::plain().with(&format!("rope_parameters.{key}"), value);
    for theta in [json!(0), json!(-1.0)] {
        assert_refused(
            set("rope_theta", theta).write().path(),
            &["config.json: rope_parameters.rope_theta", "above 0"],
        );
    }
    for partial in [json!(-0.1), json!(1.5)] {
        let dir = set("partial_rotary_factor", partial).write();
        assert_refused(dir.path(), &["rope_parameters.partial_rotary_factor", "from 0 to 1"]);
    }
    let dir = set("partial_rotary_factor", json!(3.0 / 32.0)).write();
    assert_refused(dir.path(), &["partial_rotary_factor", "pairs"]);
    for (key, value) in [("rope_theta", json!("1e7")), ("partial_rotary_factor", json!([0.25]))] {
        assert_refused(set(key, value).write().path(), &[&format!("rope_parameters.{key}"), "a number"]);
    }
    for kind in ["longrope", "su", "axial", "ntk", "proportional", ""] {
        assert_refused(set("rope_type", json!(kind)).write().path(), &["rope_parameters.rope_type", kind, "served"]);
        let scaling = Files::plain().with("rope_scaling", json!({"type": kind, "factor": 4.0}));
        assert_refused(scaling.write().path(), &["rope_scaling.type", kind]);
        let outer = nested(&Files::plain()).with("rope_scaling", json!({"rope_type": kind}));
        assert_refused(outer.write().path(), &["rope_scaling.rope_type", kind]);
    }
    for bad in [json!("default"), json!([]), json!(3)] {
        assert_refused(Files::plain().with("rope_parameters", bad).write().path(), &["rope_parameters", "object"]);
    }
}

#[test]
fn layer_types_say_which_layers_are_which() {
    let plain = Files::plain();
    let want = logits(&golden("qwen3_5"));
    let bare = plain.clone().with("layer_types", json!(null));
    assert_same(&bare, &want, "every fourth by default");
    assert_same(&bare.clone().with("full_attention_interval", json!(4)), &want, "every fourth");
    assert_refused(bare.clone().with("full_attention_interval", json!(2)).write().path(), &["self_attn"]);
    assert_refused(
        bare.with("full_attention_interval", json!(0)).write().path(),
        &["config.json: full_attention_interval", "from 1"],
    );
    let short = plain.clone().with("layer_types", json!(["linear_attention"]));
    assert_refused(short.write().path(), &["config.json: layer_types", "1 entries", "num_hidden_layers is 8"]);
    for kind in ["sliding_attention", "mamba", ""] {
        let mut files = plain.clone();
        files.config["layer_types"][3] = json!(kind);
        assert_refused(files.write().path(), &["layer_types[3]", kind]);
    }
    for bad in [json!("linear_attention"), json!([1, 2]), json!({})] {
        assert_refused(plain.clone().with("layer_types", bad).write().path(), &["layer_types", "list of strings"]);
    }
}

#[test]
fn what_is_not_served_is_refused_by_name() {
    for (key, value) in [
        ("hidden_act", json!("gelu")),
        ("attention_bias", json!(true)),
        ("attn_output_gate", json!(false)),
        ("quantization_config", json!({"quant_method": "fp8"})),
    ] {
        for files in [Files::plain(), nested(&Files::plain())] {
            let inner = if files.config.get("text_config").is_some() { "text_config." } else { "" };
            let path = format!("{inner}{key}");
            assert_refused(files.with(&path, value.clone()).write().path(), &["config.json", &path, "served"]);
        }
    }
    let outer = nested(&Files::plain()).with("quantization_config", json!({"quant_method": "fp8"}));
    assert_refused(outer.write().path(), &["quantization_config", "fp8"]);
}

#[test]
fn end_tokens_are_one_or_many() {
    let ids = |value: Value| {
        let dir = Files::plain().with("eos_token_id", value).write_config();
        let text = std::fs::read_to_string(dir.path().join("config.json")).unwrap();
        let config = hypic_model::Config::parse(&text).unwrap();
        hypic_model::families::describe(&config).map(|spec| spec.eos).map_err(|e| e.to_string())
    };
    assert_eq!(ids(json!(null)), Ok(vec![]));
    assert_eq!(ids(json!(7)), Ok(vec![7]));
    assert_eq!(ids(json!([7, 9])), Ok(vec![7, 9]));
    for bad in [json!(-1), json!("7"), json!([7, -1]), json!(1u64 << 33), json!(7.5)] {
        assert!(ids(bad).unwrap_err().contains("config.json: eos_token_id: must be a token id"));
    }
}
