//! Which dimensions turn in which family, from every spelling of the share.

use hypic_kernels::RopeSpec;
use serde_json::{Value, json};

use crate::support::*;

/// Frequencies of `dims` dimensions, from the formula.
fn frequencies(dims: usize, theta: f64) -> Vec<f64> {
    (0..dims / 2).map(|i| theta.powf(-2.0 * i as f64 / dims as f64)).collect()
}

#[track_caller]
fn assert_turns(what: &str, rope: Option<&RopeSpec>, dims: usize, theta: f64, interleaved: bool) {
    let rope = rope.unwrap_or_else(|| panic!("{what} does not turn"));
    let near = |(got, want): (&f64, &f64)| (got - want).abs() <= 1e-12 * want;
    let want = frequencies(dims, theta);
    assert_eq!(rope.inv_freq.len(), want.len(), "{what}");
    assert!(rope.inv_freq.iter().zip(&want).all(near), "{what}: {:?} instead of {want:?}", rope.inv_freq);
    assert_eq!((rope.interleaved, rope.offset, rope.scale), (interleaved, 0, 1.0), "{what}");
}

#[test]
fn the_reference_models_turn_as_their_notes_say() {
    for (name, dims, theta) in [
        ("qwen3_5_moe", 8, 1e7),
        ("qwen3_5_moe_vlm", 8, 1e7),
        ("qwen3_next", 8, 1e7),
        ("bailing_moe_linear", 8, 6e5),
        ("minimax", 16, 1e7),
        ("minimax_m1", 8, 1e7),
        ("olmo_hybrid", 16, 1e4),
    ] {
        let spec = describe(&fixture(name));
        assert_turns(name, attention(&spec, spec.layers.len() - 1).rope.as_ref(), dims, theta, false);
    }
    assert_turns("bamba", attention(&describe(&fixture("bamba")), 2).rope.as_ref(), 8, 1e4, false);
    for name in ["bailing_moe_linear", "bailing_moe_v2_5"] {
        assert_turns(name, recurrent(&describe(&fixture(name)), 0).rope.as_ref(), 8, 6e5, false);
    }
    // Latent attention turns pairs of neighbours, all of the rotary part.
    assert_turns("bailing_moe_v2_5", latent(&describe(&fixture("bailing_moe_v2_5")), 4).rope.as_ref(), 8, 6e5, true);
    assert_turns("bailing_hybrid", latent(&describe(&fixture("bailing_hybrid")), 5).rope.as_ref(), 8, 6e6, true);
    assert_eq!(latent(&describe(&fixture("kimi_linear")), 3).rope, None);
}

#[test]
fn a_share_in_every_spelling() {
    // The same eight of sixteen dimensions, as a share or as a number, on top or among the rope parameters.
    let minimax = fixture("minimax_m1");
    let bare = with(&minimax, "rotary_dim", Value::Null);
    let spellings = [
        with(&bare, "partial_rotary_factor", 0.5),
        with(&bare, "rope_parameters", json!({"partial_rotary_factor": 0.5, "rope_theta": 1e7})),
        with(&bare, "rope_parameters", json!({"rotary_dim": 8, "rope_type": "default"})),
        with(&bare, "rope_scaling", json!({"type": "default", "partial_rotary_factor": 0.5})),
        with(&minimax, "partial_rotary_factor", 0.5),
        with(&bare, "rotary_pct", 0.5),
        with(&bare, "rope_parameters", json!({"rotary_pct": 0.5, "rope_theta": 1e7})),
        with(&with(&bare, "rotary_pct", 0.5), "partial_rotary_factor", 0.5),
    ];
    for config in &spellings {
        assert_same(&config.to_string(), config, &minimax);
    }
    let whole = describe(&bare);
    assert_turns("no share", attention(&whole, 7).rope.as_ref(), 16, 1e7, false);
    assert_refused(&with(&minimax, "partial_rotary_factor", 1.0), &["rotary_dim", "partial_rotary_factor", "16"]);
    let two = with(&with(&bare, "rotary_pct", 0.25), "partial_rotary_factor", 0.5);
    assert_refused(&two, &["rotary_pct: makes it 4, but partial_rotary_factor makes it 8 of 16 dimensions"]);
    assert_refused(&with(&bare, "rotary_pct", 1.5), &["rotary_pct", "from 0 to 1"]);
    assert_refused(&with(&minimax, "rotary_dim", 7), &["rotary_dim", "pairs"]);
    assert_refused(&with(&minimax, "rotary_dim", 18), &["rotary_dim", "16 dimensions"]);
    // As transformers converts it: `rotary_dim` counts there too.
    let converted = with(&fixture("minimax"), "rotary_dim", 8);
    assert_turns("converted", attention(&describe(&converted), 7).rope.as_ref(), 8, 1e7, false);

    let bamba = fixture("bamba");
    let bare = with(&bamba, "rope_parameters", Value::Null);
    assert_same("bamba's defaults", &bare, &bamba);
    assert_same("bamba's top level", &with(&bare, "partial_rotary_factor", 0.5), &bamba);
    assert_same("bamba's releases", &with(&bare, "attn_rotary_emb", 8), &bamba);
    let quarter = with(&bamba, "rope_parameters.partial_rotary_factor", 0.25);
    assert_turns("a quarter", attention(&describe(&quarter), 2).rope.as_ref(), 4, 1e4, false);

    // In the Ring models the share is of linear and softmax layers alike.
    let quarter = describe(&with(&fixture("bailing_moe_linear"), "partial_rotary_factor", 0.25));
    assert_turns("linear", recurrent(&quarter, 0).rope.as_ref(), 4, 6e5, false);
    assert_turns("softmax", attention(&quarter, 4).rope.as_ref(), 4, 6e5, false);
}

#[test]
fn olmo_turns_only_with_a_theta() {
    let olmo = fixture("olmo_hybrid");
    let rope = |config: &Value| attention(&describe(config), 3).rope.clone();
    let bare = with(&olmo, "rope_parameters", Value::Null);
    assert_eq!(rope(&bare), None, "null");
    assert_eq!(rope(&with(&olmo, "rope_parameters.rope_theta", Value::Null)), None, "the type alone");
    let null = json!({"rope_type": "default", "rope_theta": null});
    assert_eq!(rope(&with(&olmo, "rope_parameters", null)), None, "theta is null");
    assert_eq!(rope(&with(&bare, "rope_parameters", json!({}))), None, "empty");
    assert_turns("on top", rope(&with(&bare, "rope_theta", 500.0)).as_ref(), 16, 500.0, false);
    let per_type = json!({"full_attention": {"rope_type": "default", "rope_theta": 500.0}});
    assert_turns("per type", rope(&with(&bare, "rope_parameters", per_type)).as_ref(), 16, 500.0, false);
}

/// Theta and the scaling may stand in different places.
#[test]
fn olmo_turns_wherever_its_theta_is() {
    let bare = with(&fixture("olmo_hybrid"), "rope_parameters", Value::Null);
    let linear = json!({"rope_type": "linear", "factor": 2.0});
    let all = json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0});
    let beside = |key: &str, value: Value| with(&with(&bare, "rope_theta", 500.0), key, value);
    let halved: Vec<f64> = frequencies(16, 500.0).iter().map(|f| f / 2.0).collect();
    for config in [
        beside("rope_scaling", linear.clone()),
        beside("rope_parameters", linear.clone()),
        beside("rope_parameters", json!({"full_attention": linear})),
        with(&bare, "rope_parameters", all.clone()),
        with(&bare, "rope_parameters", json!({"full_attention": all})),
        with(&bare, "rope_scaling", all),
        with(&with(&bare, "rope_parameters", json!({"rope_theta": 500.0})), "rope_scaling", linear.clone()),
    ] {
        let rope = attention(&describe(&config), 3).rope.clone().unwrap_or_else(|| panic!("{config} does not turn"));
        assert!(rope.inv_freq.iter().zip(&halved).all(|(got, want)| (got - want).abs() <= 1e-12 * want), "{config}");
        assert_eq!(rope.inv_freq.len(), 8, "{config}");
    }
    for key in ["rope_scaling", "rope_parameters"] {
        let refusal = format!("config.json: {key}.rope_theta: is missing, though a scaling is named");
        assert_refused(&with(&bare, key, linear.clone()), &[&refusal]);
    }
}

#[test]
fn the_rotary_part_of_latent_attention() {
    let ring = fixture("bailing_moe_v2_5");
    let halves = describe(&with(&ring, "rope_interleave", false));
    assert_turns("half-split", latent(&halves, 4).rope.as_ref(), 8, 6e5, false);
    // Linear layers and the rotary part turn alike.
    let words = ["qk_rope_head_dim", "is 8", "4 dimensions"];
    assert_refused(&with(&ring, "partial_rotary_factor", 0.25), &words);
    // Ling's rotary part turns whole, whatever share is named.
    let ling = fixture("bailing_hybrid");
    assert_same("a share", &with(&ling, "partial_rotary_factor", 0.5), &ling);
    let odd = with(&with(&ling, "qk_rope_head_dim", 7), "qk_head_dim", 23);
    assert_refused(&odd, &["qk_rope_head_dim", "is 7", "pairs"]);
    assert_refused(&with(&ling, "qk_head_dim", 25), &["qk_head_dim", "24"]);
    for name in ["kimi_linear", "bailing_hybrid", "bailing_moe_v2_5"] {
        for key in ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"] {
            assert_refused(&with(&fixture(name), key, Value::Null), &[&format!("{key}: is missing")]);
        }
    }
}

#[test]
fn queries_of_latent_attention_may_be_low_rank_or_not() {
    use hypic_model::spec::ProjectionSpec;
    let ling = describe(&fixture("bailing_hybrid"));
    let full = latent(&ling, 5);
    let ProjectionSpec::LowRank { down, up } = &full.query else { panic!("a low-rank query") };
    assert_eq!((down.rows(), up.rows(), full.query_norm.as_ref().unwrap().width), (24, 96, 24));
    let direct = describe(&with(&fixture("bailing_hybrid"), "q_lora_rank", Value::Null));
    let full = latent(&direct, 5);
    assert!(matches!(&full.query, ProjectionSpec::Direct(rows) if rows[0].name.ends_with("q_proj.weight")));
    assert!(full.query_norm.is_none());
    let kimi = describe(&with(&fixture("kimi_linear"), "q_lora_rank", 12));
    assert!(matches!(&latent(&kimi, 3).query, ProjectionSpec::LowRank { down, .. } if down.rows() == 12));
}

#[test]
fn yarn_stretches_the_softmax_of_latent_attention() {
    // DeepSeek's factor: (0.1 ln 4 + 1) squared.
    let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "mscale_all_dim": 1.0});
    let spec = describe(&with(&fixture("bailing_hybrid"), "rope_scaling", yarn));
    let stretched = 24f64.powf(-0.5) * (0.1 * 4f64.ln() + 1.0).powi(2);
    let got = f64::from(latent(&spec, 5).scale);
    assert!((got - stretched).abs() < 1e-7, "{got} instead of {stretched}");
}
