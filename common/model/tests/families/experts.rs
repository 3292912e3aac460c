//! How experts are chosen, and what else serves a row.

use hypic_kernels::{Activation, MlpForm, RouteSpec, Score};
use serde_json::{Value, json};

use crate::support::*;

fn route(config: &Value) -> RouteSpec {
    let spec = describe(config);
    experts(&spec, spec.layers.len() - 1).route
}

#[test]
fn routers_are_those_of_the_reference() {
    let softmax = RouteSpec {
        experts: 8,
        top_k: 2,
        score: Score::Softmax,
        groups: 1,
        top_groups: 1,
        renormalise: true,
        renormalise_eps: 0.0,
        scale: 1.0,
    };
    for name in ["qwen3_5_moe", "qwen3_5_moe_vlm", "qwen3_next", "minimax", "minimax_m1"] {
        assert_eq!(route(&fixture(name)), softmax, "{name}");
    }
    let sigmoid = RouteSpec { score: Score::Sigmoid, renormalise_eps: 1e-20, ..softmax };
    for name in ["bailing_moe_linear", "bailing_moe_v2_5", "bailing_hybrid"] {
        assert_eq!(route(&fixture(name)), RouteSpec { groups: 4, top_groups: 2, scale: 2.5, ..sigmoid }, "{name}");
    }
    assert_eq!(route(&fixture("kimi_linear")), RouteSpec { scale: 2.446, ..sigmoid });
    let nemotron = |name: &str| experts(&describe(&fixture(name)), 2).route;
    assert_eq!(nemotron("nemotron_h_moe"), RouteSpec { scale: 2.5, ..sigmoid });
    assert_eq!(nemotron("nemotron_h_latent_moe"), RouteSpec { groups: 4, top_groups: 2, scale: 2.5, ..sigmoid });
    assert!(!route(&with(&fixture("qwen3_next"), "norm_topk_prob", false)).renormalise);
    assert!(!route(&with(&fixture("bailing_hybrid"), "norm_topk_prob", false)).renormalise);
    assert!(!route(&with(&fixture("kimi_linear"), "moe_renormalize", false)).renormalise);
}

#[test]
fn counts_that_do_not_fit_are_refused() {
    let refused = |name: &str, changes: &[(&str, u64)], words: &[&str]| {
        let config = changes.iter().fold(fixture(name), |config, (key, value)| with(&config, key, *value));
        assert_refused(&config, words);
    };
    for name in ["bailing_moe_linear", "bailing_moe_v2_5", "bailing_hybrid"] {
        refused(name, &[("n_group", 3)], &["num_experts: is 8, which is no multiple of n_group = 3"]);
        refused(name, &[("topk_group", 5)], &["topk_group: is 5, of n_group = 4"]);
        refused(name, &[("n_group", 8)], &["n_group", "1 expert a group"]);
        refused(name, &[("topk_group", 1), ("num_experts_per_tok", 3)], &["topk_group", "leaves 2 experts for the 3"]);
        refused(name, &[("num_experts_per_tok", 9)], &["num_experts_per_tok: is 9, of num_experts = 8"]);
    }
    refused("kimi_linear", &[("num_expert_group", 3)], &["num_experts: is 8", "num_expert_group = 3"]);
    refused("qwen3_next", &[("num_experts_per_tok", 9)], &["num_experts_per_tok: is 9, of num_experts = 8"]);
    refused("minimax", &[("num_experts_per_tok", 9)], &["num_experts_per_tok: is 9, of num_local_experts = 8"]);
    // All groups are kept: how many experts one has does not matter.
    let all = with(&with(&fixture("bailing_moe_linear"), "n_group", 8), "topk_group", 8);
    assert_eq!(route(&all).top_groups, 8);
    let grouped = with(&with(&fixture("kimi_linear"), "num_expert_group", 4), "topk_group", 2);
    assert_eq!(route(&grouped).groups, 4);
    assert_refused(&with(&grouped, "use_grouped_topk", false), &["use_grouped_topk", "only true"]);
    for name in ["bailing_moe_linear", "kimi_linear"] {
        let missing = with(&fixture(name), "routed_scaling_factor", Value::Null);
        assert_refused(&missing, &["routed_scaling_factor: is missing"]);
        let infinite = with(&fixture(name), "routed_scaling_factor", 1e300);
        assert_refused(&infinite, &["routed_scaling_factor", "range"]);
    }
}

#[test]
fn biases_and_shared_experts() {
    let bailing = fixture("bailing_moe_linear");
    let of = |config: &Value| experts(&describe(config), 4).clone();
    assert_eq!(of(&bailing).bias.as_deref(), Some("model.layers.4.mlp.gate.expert_bias"));
    assert_eq!(of(&with(&bailing, "moe_router_enable_expert_bias", false)).bias, None);
    let shared = |config: &Value| of(config).shared.map(|mlp| mlp.inner);
    assert_eq!(shared(&bailing), Some(16));
    assert_eq!(shared(&with(&bailing, "num_shared_experts", 3)), Some(48), "one MLP three times as wide");
    assert_eq!(shared(&with(&bailing, "num_shared_experts", 0)), None);
    assert_eq!(shared(&with(&bailing, "num_shared_experts", Value::Null)), None);
    let wide = with(&bailing, "moe_shared_expert_intermediate_size", 24);
    assert_eq!(shared(&with(&wide, "num_shared_experts", 2)), Some(48));
    for count in [1u64 << 20, u64::MAX] {
        assert_refused(&with(&bailing, "num_shared_experts", count), &["num_shared_experts", "wider than"]);
    }
    assert_refused(&with(&bailing, "n_group", Value::Null), &["n_group: is missing", "num_expert_group"]);
    let kimi = describe(&fixture("kimi_linear"));
    let bias = experts(&kimi, 1).bias.as_deref();
    assert_eq!(bias, Some("model.layers.1.block_sparse_moe.gate.e_score_correction_bias"));
    assert_eq!(experts(&kimi, 1).experts[7].down.name, "model.layers.1.block_sparse_moe.experts.7.w2.weight");
    let qwen = describe(&fixture("qwen3_next"));
    assert_eq!(experts(&qwen, 0).shared.as_ref().map(|mlp| mlp.inner), Some(48));
    assert!(experts(&qwen, 0).shared_gate.is_some() && experts(&qwen, 0).bias.is_none());
    let minimax = describe(&fixture("minimax"));
    assert!(experts(&minimax, 0).shared.is_none() && experts(&minimax, 0).fused.is_none());
}

#[test]
fn granite_may_have_no_experts_and_no_rotation() {
    let granite = fixture("granitemoehybrid");
    let dense = describe(&with(&granite, "num_local_experts", 0));
    assert_eq!(feeds(&dense), "dddd");
    let own = experts(&describe(&granite), 0).clone();
    assert_eq!((own.experts.len(), own.shared.map(|mlp| mlp.inner), own.fused.is_none()), (8, Some(48), true));
    assert_eq!(taken(&own.experts[3].gate_up[0]), (96..128).collect::<Vec<_>>());
    for nothing in [json!("nope"), Value::Null] {
        assert_eq!(attention(&describe(&with(&granite, "position_embedding_type", nothing)), 2).rope, None);
    }
    assert_refused(
        &with(&granite, "position_embedding_type", "alibi"),
        &["position_embedding_type", "alibi", "served"],
    );
    assert_refused(&with(&granite, "logits_scaling", 0), &["logits_scaling", "is 0"]);
    assert_refused(&with(&granite, "layer_types", Value::Null), &["layer_types", "missing"]);
    let short = json!(["mamba", "mamba", "attention", "mamba"]);
    assert_same("short words", &with(&granite, "layer_types", short), &granite);
}

#[test]
fn experts_have_one_key_under_several_names() {
    let kimi = fixture("kimi_linear");
    for (key, other) in [
        ("num_experts", "num_local_experts"),
        ("num_experts", "n_routed_experts"),
        ("num_experts_per_token", "num_experts_per_tok"),
        ("num_expert_group", "n_group"),
        ("moe_renormalize", "norm_topk_prob"),
        ("num_shared_experts", "n_shared_experts"),
    ] {
        let renamed = with(&with(&kimi, key, Value::Null), other, kimi[key].clone());
        assert_same(other, &renamed, &kimi);
        let both = with(&kimi, other, kimi[key].clone());
        assert_same(other, &both, &kimi);
        let different = if kimi[key].is_boolean() { json!(false) } else { json!(6) };
        assert_refused(&with(&kimi, other, different), &[other, "differs from", key]);
    }
}

/// Experts and the shared one of Nemotron have no gate; in the larger models experts see a projection of the rows.
#[test]
fn nemotrons_experts_have_no_gate() {
    let plain = MlpForm::Plain(Activation::SquaredRelu);
    let spec = describe(&fixture("nemotron_h_moe"));
    let of = experts(&spec, 0);
    let shared = of.shared.as_ref().expect("one that serves every row");
    assert_eq!((of.experts[3].form, of.experts[3].inner, shared.form, shared.inner), (plain, 24, plain, 40));
    assert_eq!(of.experts[3].gate_up.len(), 1);
    assert_eq!(of.experts[3].gate_up[0].name, "backbone.layers.1.mixer.experts.3.up_proj.weight");
    let stacked = &of.fused.as_ref().expect("the other layout")[3];
    assert_eq!(stacked.gate_up[0].name, "backbone.layers.1.mixer.experts.up_proj");
    assert_eq!(taken(&stacked.gate_up[0]), (72..96).collect::<Vec<_>>());
    assert!(of.narrow.is_none());

    let config = fixture("nemotron_h_latent_moe");
    let spec = describe(&config);
    let of = experts(&spec, 0);
    let [down, up] = of.narrow.as_ref().expect("a projection");
    assert_eq!((down.rows(), up.rows(), of.router.rows()), (20, 64, 8));
    assert_eq!(of.experts[0].down.rows(), 20);
    assert_refused(&with(&config, "moe_latent_size", 0), &["moe_latent_size", "0"]);
    assert_refused(&with(&config, "mlp_hidden_act", "silu"), &["mlp_hidden_act", "relu2"]);
    assert_refused(&with(&config, "n_routed_experts", Value::Null), &["missing"]);
    assert_same("one is the default", &with(&config, "n_shared_experts", Value::Null), &config);
    let none = describe(&with(&config, "n_shared_experts", 0));
    assert!(experts(&none, 0).shared.is_none());
}

/// Limits of Ling's experts are per layer, null and 0 being none; a layer without experts has none to bound.
#[test]
fn lings_experts_may_be_bounded() {
    let config = json("bailing_hybrid/config.bounded.json");
    let spec = describe(&config);
    let form = |limit: f32| if limit > 0.0 { MlpForm::BoundedSwiGlu { limit } } else { MlpForm::SwiGlu };
    for (layer, routed, shared) in [(2, 0.28, 0.0), (3, 0.28, 0.42), (4, 0.0, 0.28), (5, 0.28, 0.0)] {
        let of = experts(&spec, layer);
        assert!(of.experts.iter().all(|e| e.form == form(routed)), "layer {layer}");
        assert_eq!(of.shared.as_ref().map(|mlp| mlp.form), Some(form(shared)), "layer {layer}");
    }
    // One entry more, for a layer that predicts ahead.
    let longer = json!([0, 0, 0.28, 0.28, 0, 0.28, 9.0]);
    assert_same("a longer list", &with(&config, "expert_swiglu_limit_list", longer), &config);
    let dense = json!([0.5, 0, 0.28, 0.28, 0, 0.28]);
    assert_refused(&with(&config, "expert_swiglu_limit_list", dense), &["expert_swiglu_limit_list", "layer 0"]);
    assert_refused(&with(&config, "num_shared_experts", 0), &["share_expert_swiglu_limit_list", "layer 3"]);
}
