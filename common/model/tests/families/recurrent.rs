//! Recurrent layers: slopes, gates, groups and heads.

use hypic_kernels::Activation;
use hypic_model::spec::{DecaySpec, ModelSpec, ProjectionSpec, Residual, WriteSpec};
use serde_json::{Value, json};

use crate::support::*;

/// Less the log decays of a layer.
fn rates(spec: &ModelSpec, layer: usize) -> Vec<f64> {
    match &recurrent(spec, layer).decay {
        DecaySpec::Fixed { log, .. } => log.iter().map(|decay| -decay).collect(),
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn assert_near(what: &str, got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}: {got:?}");
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() <= 1e-14 * want.abs(), "{what}: {got} instead of {want}");
    }
}

/// Exponents by hand: -8 (h + 1) / p for the largest power of two p not above H, then the first, third, ... of the
/// list for 2p.
const SLOPES: [(usize, &[f64]); 9] = [
    (1, &[-8.0]),
    (2, &[-4.0, -8.0]),
    (3, &[-4.0, -8.0, -2.0]),
    (4, &[-2.0, -4.0, -6.0, -8.0]),
    (5, &[-2.0, -4.0, -6.0, -8.0, -1.0]),
    (6, &[-2.0, -4.0, -6.0, -8.0, -1.0, -3.0]),
    (7, &[-2.0, -4.0, -6.0, -8.0, -1.0, -3.0, -5.0]),
    (8, &[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0]),
    (12, &[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0, -0.5, -1.5, -2.5, -3.5]),
];

#[test]
fn slopes_of_any_number_of_heads() {
    for (heads, exponents) in SLOPES {
        let slopes: Vec<f64> = exponents.iter().map(|e| e.exp2()).collect();
        let scaled = |factor: f64| slopes.iter().map(|slope| slope * factor).collect::<Vec<_>>();
        let of = |name: &str| {
            let config = with(&fixture(name), "num_attention_heads", heads);
            describe(&with(&config, "num_key_value_heads", heads))
        };
        // Five layers, counted from 1 in the publisher's code: the first decays faster than the slopes say.
        for name in ["bailing_moe_linear", "bailing_moe_v2_5"] {
            let spec = of(name);
            for (layer, factor) in [(0, 1.25001), (1, 1.00001), (2, 0.75001), (3, 0.50001)] {
                assert_near(&format!("{name}, {heads} heads, layer {layer}"), &rates(&spec, layer), &scaled(factor));
            }
        }
        // Eight layers, counted from 0.
        let spec = of("minimax_m1");
        for layer in 0..7 {
            let factor = 1.0 - layer as f64 / 7.0 + 1e-5;
            assert_near(&format!("minimax_m1, {heads} heads, layer {layer}"), &rates(&spec, layer), &scaled(factor));
        }
        let spec = of("minimax");
        let factor = 1.0 - 6.0 / 7.00001 + 1e-5;
        assert_near(&format!("minimax, {heads} heads"), &rates(&spec, 6), &scaled(factor));
    }
    // Nothing decays upwards, and a lone layer is no division by nothing.
    let lone = with(&with(&fixture("minimax_m1"), "num_hidden_layers", 1), "attn_type_list", json!([0]));
    assert_near("one layer", &rates(&describe(&lone), 0), &[-2f64, -4.0, -6.0, -8.0].map(|e| e.exp2() * 1.00001));
}

#[test]
fn groups_that_do_not_divide_are_refused() {
    for name in ["bailing_moe_linear", "bailing_moe_v2_5"] {
        let config = fixture(name);
        let group = |groups: u64| recurrent(&describe(&with(&config, "group_norm_size", groups)), 0).norm_group;
        assert_eq!([group(1), group(4), group(64)], [64, 16, 1], "{name}: the number of groups, not their size");
        assert_refused(&with(&config, "group_norm_size", 3), &["is 64, which is no multiple of group_norm_size = 3"]);
        assert_refused(&with(&config, "group_norm_size", Value::Null), &["group_norm_size: is missing"]);
        assert_refused(&with(&config, "group_norm_size", 0), &["group_norm_size", "from 1"]);
    }
    let bamba = fixture("bamba");
    let group = |groups: u64| recurrent(&describe(&with(&bamba, "mamba_n_groups", groups)), 0).norm_group;
    assert_eq!([group(1), group(4), group(8)], [128, 32, 16]);
    assert_refused(
        &with(&bamba, "mamba_n_groups", 3),
        &["mamba_n_heads: is 8, which is no multiple of mamba_n_groups = 3"],
    );
    for name in ["qwen3_5_moe", "qwen3_next", "olmo_hybrid"] {
        let config = with(&fixture(name), "linear_num_key_heads", 3);
        assert_refused(&config, &["linear_num_value_heads: is 4", "linear_num_key_heads = 3"]);
    }
    for name in ["bailing_moe_linear", "minimax", "bamba", "olmo_hybrid", "qwen3_next"] {
        let config = with(&fixture(name), "num_key_value_heads", 3);
        assert_refused(&config, &["num_attention_heads: is 4", "num_key_value_heads = 3"]);
    }
}

#[test]
fn ring_may_lack_norms_and_have_silu() {
    for name in ["bailing_moe_linear", "bailing_moe_v2_5"] {
        let normed = describe(&fixture(name));
        assert_eq!(recurrent(&normed, 0).q_norm.as_ref().map(|norm| norm.width), Some(16), "{name}");
        let bare = describe(&with(&fixture(name), "use_qk_norm", false));
        assert!(recurrent(&bare, 0).q_norm.is_none() && recurrent(&bare, 0).k_norm.is_none(), "{name}");
        let silu = describe(&with(&fixture(name), "linear_silu", true));
        assert_eq!(recurrent(&silu, 0).activation, Some(Activation::Silu), "{name}");
        let renamed = with(&with(&fixture(name), "linear_silu", Value::Null), "use_linear_silu", true);
        assert_same(name, &renamed, &with(&fixture(name), "linear_silu", true));
        let both = with(&fixture(name), "use_linear_silu", true);
        assert_refused(&both, &["use_linear_silu: differs from linear_silu"]);
    }
    let bare = describe(&with(&fixture("bailing_moe_linear"), "use_qk_norm", false));
    assert!(attention(&bare, 4).q_norm.is_none() && attention(&bare, 4).k_norm.is_none());
    // Linear layers have as many key heads as query heads, whatever the softmax layers have.
    let one = describe(&with(&fixture("bailing_moe_linear"), "num_key_value_heads", 1));
    assert_eq!((recurrent(&one, 0).shape.key_heads, attention(&one, 4).kv_heads), (4, 1));
}

#[test]
fn gates_of_kimi_delta_attention() {
    let lower = |config: &Value| match recurrent(&describe(config), 0).decay {
        DecaySpec::Channel { lower, .. } => lower,
        ref other => panic!("{other:?}"),
    };
    let ling = fixture("bailing_hybrid");
    assert_eq!(lower(&with(&ling, "kda_lower_bound", -3.5)), Some(-3.5));
    assert_eq!(lower(&with(&ling, "kda_lower_bound", Value::Null)), Some(-5.0));
    assert_eq!(lower(&with(&ling, "kda_safe_gate", false)), None);
    for bound in [0.0, 5.0] {
        assert_refused(&with(&ling, "kda_lower_bound", bound), &["kda_lower_bound", "below 0"]);
    }
    let kimi = describe(&with(&fixture("kimi_linear"), "linear_attn_config.num_heads", 6));
    let linear = recurrent(&kimi, 0);
    assert_eq!((linear.shape.heads, latent(&kimi, 3).heads), (6, 4), "heads of their own");
    let ProjectionSpec::LowRank { down, up } = &linear.gate else { panic!("a low-rank gate") };
    assert_eq!((down.rows(), up.rows()), (16, 96));
    let kernel = describe(&with(&fixture("kimi_linear"), "linear_attn_config.short_conv_kernel_size", 3));
    assert_eq!(recurrent(&kernel, 0).conv.as_ref().unwrap().kernel, 3);
}

#[test]
fn olmos_beta_may_be_bounded_by_one() {
    let beta = |config: &Value| match recurrent(&describe(config), 0).write {
        WriteSpec::Delta { scale, .. } => scale,
        ref other => panic!("{other:?}"),
    };
    let olmo = fixture("olmo_hybrid");
    assert_eq!(beta(&with(&olmo, "linear_allow_neg_eigval", false)), 1.0);
    assert_eq!(beta(&with(&olmo, "linear_allow_neg_eigval", Value::Null)), 2.0);
}

#[test]
fn mamba_heads_and_steps() {
    let bamba = fixture("bamba");
    let auto = with(&bamba, "mamba_d_head", "auto");
    assert_same("mamba_d_head = auto", &auto, &bamba);
    assert_same("no mamba_d_head", &with(&bamba, "mamba_d_head", Value::Null), &bamba);
    assert_same("no mamba_expand", &with(&bamba, "mamba_expand", Value::Null), &bamba);
    assert_refused(
        &with(&bamba, "mamba_d_head", 8),
        &["mamba_d_head", "8 heads of 8", "mamba_expand * hidden_size = 128"],
    );
    assert_refused(&with(&auto, "mamba_n_heads", 6), &["no multiple of mamba_n_heads = 6"]);
    let plain = describe(&with(&bamba, "mamba_conv_bias", false));
    assert_eq!(recurrent(&plain, 0).conv.as_ref().unwrap().bias, None);
    let limit = |value: Value| match recurrent(&describe(&with(&bamba, "time_step_limit", value)), 0).decay {
        DecaySpec::Head { limit, .. } => limit,
        ref other => panic!("{other:?}"),
    };
    let unlimited = (0.0, f32::INFINITY);
    assert_eq!(limit(Value::Null), unlimited);
    assert_eq!(limit(json!([0.0, {"__float__": "Infinity"}])), unlimited);
    assert_eq!(limit(json!([0.0, "Infinity"])), unlimited);
    assert_eq!(limit(json!([0.25, 2])), (0.25, 2.0));
    for wrong in [json!([1.0, 0.5]), json!([-1.0, 0.5]), json!([0.5]), json!("x"), json!([0.0, "x"]), json!([0, null])]
    {
        assert_refused(&with(&bamba, "time_step_limit", wrong), &["config.json: time_step_limit", "two numbers"]);
    }
}

/// In the publisher's code steps are within `time_step_limit`; `time_step_min` is of initial weights.
#[test]
fn nemotrons_steps_are_within_the_limit() {
    let nemotron = fixture("nemotron_h");
    let limit = |config: &Value| match recurrent(&describe(config), 0).decay {
        DecaySpec::Head { limit, .. } => limit,
        ref other => panic!("{other:?}"),
    };
    assert_eq!(limit(&nemotron), (0.0, f32::INFINITY));
    assert_same("time_step_min", &with(&nemotron, "time_step_min", 0.25), &nemotron);
    let bare = with(&nemotron, "time_step_limit", Value::Null);
    assert_same("no limit", &bare, &nemotron);
    for key in ["time_step_limit", "mamba_dt_limit"] {
        assert_eq!(limit(&with(&bare, key, json!([0.25, 2]))), (0.25, 2.0));
    }
    // Two spellings of one number.
    assert_same("both", &with(&nemotron, "mamba_dt_limit", json!([0.0, "Infinity"])), &nemotron);
}

#[test]
fn nemotrons_mamba_has_two_key_sets() {
    let nemotron = fixture("nemotron_h");
    for (key, other, different) in [
        ("n_groups", "mamba_n_groups", json!(4)),
        ("conv_kernel", "mamba_d_conv", json!(3)),
        ("use_conv_bias", "mamba_conv_bias", json!(false)),
        ("time_step_limit", "mamba_dt_limit", json!([0.0, 1.0])),
    ] {
        let renamed = with(&with(&nemotron, key, Value::Null), other, nemotron[key].clone());
        assert_same(other, &renamed, &nemotron);
        assert_refused(&with(&nemotron, other, different), &[&format!("{other}: differs from {key}")]);
    }
    let groups = |key: &str| recurrent(&describe(&with(&nemotron, key, Value::Null)), 0).shape.key_heads;
    assert_eq!((groups("unknown"), groups("n_groups")), (2, 8), "the default");
    let plain = with(&with(&nemotron, "use_conv_bias", Value::Null), "mamba_conv_bias", false);
    assert_eq!(recurrent(&describe(&plain), 0).conv.as_ref().unwrap().bias, None);
}

#[test]
fn minimax_residuals() {
    let minimax = fixture("minimax_m1");
    let spec = describe(&with(&minimax, "postnorm", false));
    let pre = |keep, add| Residual::Pre { keep, add };
    assert_eq!(spec.layers[7].mixer.residual, pre(1.6, 0.9), "the layer's input is the residual");
    assert_eq!(spec.layers[7].feed.as_ref().unwrap().residual, pre(1.3, 0.8));
    assert_refused(&with(&minimax, "postnorm", Value::Null), &["postnorm: is missing"]);
    let bare = with(&with(&minimax, "layernorm_mlp_alpha", Value::Null), "layernorm_mlp_beta", Value::Null);
    let normed = Residual::Normed { keep: 1.0, add: 1.0 };
    assert_eq!(describe(&bare).layers[0].feed.as_ref().unwrap().residual, normed);
    assert_refused(&with(&minimax, "mlp_alpha_factor", 2.0), &["mlp_alpha_factor", "differs from layernorm_mlp_alpha"]);
    assert_refused(&with(&minimax, "layernorm_mlp_alpha", "x"), &["layernorm_mlp_alpha", "a number"]);
}
