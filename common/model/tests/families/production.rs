//! The production models, from their published configurations. Where only a part is known, the test states the rest.

use hypic_kernels::MlpForm;
use serde_json::{Value, json};

use crate::support::*;

fn production(name: &str) -> Value {
    json(&format!("production_configs/{name}.json"))
}

fn completed(name: &str, more: &Value) -> Value {
    let fields = more.as_object().expect("an object");
    fields.iter().fold(production(name), |config, (key, value)| {
        assert!(config.get(key).is_none(), "{name} has {key}");
        with(&config, key, value.clone())
    })
}

/// Numbers in a model's tensors, in units of 10^9.
fn billions(config: &Value) -> f64 {
    let numbers: usize = describe(config).tensors(true).values().map(|shape| shape.iter().product::<usize>()).sum();
    numbers as f64 / 1e9
}

#[track_caller]
fn assert_about(what: &str, got: f64, want: f64) {
    assert!((got / want - 1.0).abs() < 0.03, "{what}: {got} instead of {want}");
}

/// The sizes in their names are those of the descriptions.
#[test]
fn models_are_as_large_as_their_names_say() {
    // The release counts the vision tower too.
    assert_about("Qwen3.5-35B-A3B", billions(&production("Qwen3.5-35B-A3B")), 34.7);
    assert_about("Qwen3.5-122B-A10B", billions(&production("Qwen3.5-122B-A10B")), 122.0);
    assert_about("Qwen3-Next-80B-A3B", billions(&production("Qwen3-Next-80B-A3B")), 80.0);
    assert_about("Kimi-Linear-48B-A3B", billions(&production("Kimi-Linear-48B-A3B")), 48.5);
    assert_about("MiniMax-M1", billions(&production("MiniMax-M1")), 456.0);
    assert_about("Ring-mini-linear-2.0", billions(&production("Ring-mini-linear-2.0")), 16.4);
    assert_about("Ring-flash-linear-2.0", billions(&ring_flash()), 104.0);
}

fn ring_flash() -> Value {
    completed("Ring-flash-linear-2.0", &json!({"group_norm_size": 8, "rope_theta": 600_000}))
}

#[test]
fn layers_of_the_production_models() {
    let qwen = describe(&production("Qwen3.5-35B-A3B"));
    assert_eq!(pattern(&qwen), "LLLF".repeat(10));
    let linear = recurrent(&qwen, 0);
    assert_eq!((linear.shape.key_heads, linear.shape.heads, linear.shape.d_k, linear.shape.d_v), (16, 32, 128, 128));
    assert_eq!((attention(&qwen, 3).rope.as_ref().unwrap().inv_freq.len(), qwen.eos.as_slice()), (32, &[248_044][..]));
    assert_eq!((experts(&qwen, 39).experts.len(), experts(&qwen, 39).route.top_k), (256, 8));
    assert_eq!(pattern(&describe(&production("Qwen3.5-122B-A10B"))), "LLLF".repeat(12));

    let next = describe(&production("Qwen3-Next-80B-A3B"));
    assert_eq!((pattern(&next), feeds(&next)), ("LLLF".repeat(12), "E".repeat(48)));
    assert_eq!((next.max_positions, attention(&next, 3).rope.as_ref().unwrap().inv_freq.len()), (262_144, 32));

    let ring = describe(&production("Ring-mini-linear-2.0"));
    assert_eq!((pattern(&ring), feeds(&ring)), ("LLLLF".repeat(4), format!("d{}", "E".repeat(19))));
    assert_eq!((recurrent(&ring, 0).norm_group, recurrent(&ring, 0).shape.heads), (512, 16));
    assert_eq!(recurrent(&ring, 0).rope.as_ref().unwrap().inv_freq.len(), 32);
    let flash = describe(&ring_flash());
    assert_eq!(pattern(&flash), "LLLLLLLF".repeat(4));
    assert_refused(&production("Ring-flash-linear-2.0"), &["group_norm_size: is missing"]);

    let kimi = describe(&production("Kimi-Linear-48B-A3B"));
    assert_eq!(pattern(&kimi), format!("{}LLF", "LLLF".repeat(6)), "the last group is short");
    assert_eq!((kimi.max_positions, latent(&kimi, 26).rank, latent(&kimi, 26).rope.is_none()), (1 << 20, 512, true));

    let minimax = describe(&production("MiniMax-M1"));
    assert_eq!(pattern(&minimax), "LLLLLLLF".repeat(10));
    assert_eq!(attention(&minimax, 7).rope.as_ref().unwrap().inv_freq.len(), 32, "half of each head");
    assert_eq!((recurrent(&minimax, 0).shape.heads, minimax.max_positions), (64, 10_240_000));

    let ling = describe(&production("Ling-3.0-flash"));
    assert_eq!((pattern(&ling), feeds(&ling)), ("LLLLLF".repeat(7), format!("dd{}", "E".repeat(40))));
    assert_eq!(
        (ling.ignored.as_slice(), experts(&ling, 2).experts.len()),
        (&["model.layers.42.".to_string()][..], 512)
    );
    assert_eq!(latent(&ling, 5).rope.as_ref().unwrap().inv_freq.len(), 32, "the whole rotary part");
    // Two lists that the reference data leaves out: the late layers of the release have limits.
    let list = |limits: &dyn Fn(usize) -> f64| (0..42).map(limits).collect::<Vec<f64>>();
    let experts_list = list(&|l| if l >= 35 { 4.0 } else { 0.0 });
    let shared_list = list(&|l| {
        if l >= 40 {
            7.0
        } else if l >= 34 {
            5.0
        } else {
            0.0
        }
    });
    let bounded = with(&production("Ling-3.0-flash"), "expert_swiglu_limit_list", experts_list);
    let bounded = describe(&with(&bounded, "share_expert_swiglu_limit_list", shared_list));
    let forms = |l: usize| (experts(&bounded, l).experts[511].form, experts(&bounded, l).shared.as_ref().unwrap().form);
    let limit = |limit: f32| MlpForm::BoundedSwiGlu { limit };
    assert_eq!(forms(33), (MlpForm::SwiGlu, MlpForm::SwiGlu));
    assert_eq!((forms(34), forms(41)), ((MlpForm::SwiGlu, limit(5.0)), (limit(4.0), limit(7.0))));
}

/// Of Ring-2.5-1T only the attention is known: the rest is made up here, and refused where it is missing.
#[test]
fn a_partial_configuration_is_refused_until_it_is_completed() {
    let mut more = json!({
        "q_lora_rank": 1536, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_experts": 256,
        "num_experts_per_tok": 8, "num_shared_experts": 1, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 4,
        "routed_scaling_factor": 2.5
    });
    let ring = describe(&completed("Ring-2.5-1T", &more));
    assert_eq!((pattern(&ring), ring.max_positions), ("LLLLLLLF".repeat(10), 131_072));
    assert_eq!((latent(&ring, 7).rope.as_ref().unwrap().inv_freq.len(), recurrent(&ring, 0).norm_group), (32, 1024));
    for key in ["intermediate_size", "num_experts", "num_experts_per_tok", "first_k_dense_replace"] {
        let value = more[key].take();
        assert_refused(&completed("Ring-2.5-1T", &more), &[key, "missing"]);
        more[key] = value;
    }
}
