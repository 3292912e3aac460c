//! The reference models: their descriptions name exactly the tensors that their files have.

use std::collections::BTreeMap;

use hypic_kernels::{Activation, Form};
use hypic_model::spec::{ChannelOrder, DecaySpec, LayerSpec, MixerSpec, Residual, WriteSpec};
use hypic_state::ComposeRule;
use safetensors::SafeTensors;

use crate::support::*;

/// Shapes of a file's tensors, leading axes folded and extents of 1 left out.
fn stored(name: &str) -> BTreeMap<String, Vec<usize>> {
    let bytes = std::fs::read(golden(&format!("{name}/model.safetensors"))).expect("reference data");
    let tensors = SafeTensors::deserialize(&bytes).expect("reference data");
    tensors.tensors().into_iter().map(|(name, t)| (name, folded(t.shape()))).collect()
}

fn folded(shape: &[usize]) -> Vec<usize> {
    let large: Vec<usize> = shape.iter().copied().filter(|&n| n != 1).collect();
    match large.split_last() {
        Some((columns, rows)) if !rows.is_empty() => vec![rows.iter().product(), *columns],
        _ => large,
    }
}

#[test]
fn descriptions_name_the_tensors_that_files_have() {
    for name in FIXTURES {
        let spec = describe(&fixture(name));
        let stored = stored(name);
        let fused = stored.keys().any(|tensor| tensor.ends_with("experts.gate_up_proj"));
        assert_eq!(fused, name == "qwen3_5_moe_vlm", "{name}");
        let wanted = spec.tensors(fused);
        for (tensor, shape) in &wanted {
            assert_eq!(stored.get(tensor), Some(&folded(shape)), "{name}: {tensor}");
        }
        let left: Vec<&String> = stored.keys().filter(|t| !wanted.contains_key(*t)).collect();
        let known = |tensor: &&String| {
            let any_layer: Vec<&str> =
                tensor.split('.').map(|p| if p.parse::<usize>().is_ok() { "*" } else { p }).collect();
            let names = [tensor.to_string(), any_layer.join(".")];
            let ignored = spec.ignored.iter().any(|prefix| names.iter().any(|name| name.starts_with(prefix.as_str())));
            let decays = |layer: &LayerSpec| match &layer.mixer.body {
                MixerSpec::Recurrent(m) => match &m.decay {
                    DecaySpec::Fixed { log, stored: Some(name) } => name == *tensor && stored[name] == [log.len()],
                    _ => false,
                },
                _ => false,
            };
            ignored || spec.layers.iter().any(decays)
        };
        assert!(left.iter().all(known), "{name}: {left:?}");
        assert_eq!(left.is_empty(), !["qwen3_5_vlm", "qwen3_5_moe_vlm", "minimax"].contains(&name), "{name}");
    }
}

#[test]
fn layers_and_widths_are_those_of_the_reference() {
    let hybrid = ComposeRule::Transition;
    for (name, layers, feed, form, rule) in [
        ("qwen3_5", "LLLFLLLF", "dddddddd", Form::Dense, hybrid),
        ("qwen3_5_vlm", "LLLF", "dddd", Form::Dense, hybrid),
        ("qwen3_5_moe", "LLLF", "EEEE", Form::Dense, hybrid),
        ("qwen3_5_moe_vlm", "LLLF", "EEEE", Form::Dense, hybrid),
        ("qwen3_next", "LLLF", "EEEE", Form::Dense, hybrid),
        ("bailing_moe_linear", "LLLLF", "dEEEE", Form::Scalar, hybrid),
        ("bailing_moe_v2_5", "LLLLF", "dEEEE", Form::Scalar, hybrid),
        ("bailing_hybrid", "LLLLLF", "ddEEEE", Form::Dense, hybrid),
        ("kimi_linear", "LLLF", "dEEE", Form::Dense, hybrid),
        ("minimax", "LLLLLLLF", "EEEEEEEE", Form::Scalar, hybrid),
        ("minimax_m1", "LLLLLLLF", "EEEEEEEE", Form::Scalar, hybrid),
        ("olmo_hybrid", "LLLF", "dddd", Form::Dense, hybrid),
        ("bamba", "LLFL", "dddd", Form::Scalar, ComposeRule::Last),
        ("granitemoehybrid", "LLFL", "EEEE", Form::Scalar, ComposeRule::Last),
        ("nemotron_h", "LLFL", "d-d-", Form::Scalar, ComposeRule::Last),
        ("nemotron_h_moe", "LLFL", "E-Ed", Form::Scalar, ComposeRule::Last),
        ("nemotron_h_latent_moe", "LLFL", "E-Ed", Form::Scalar, ComposeRule::Last),
    ] {
        let spec = describe(&fixture(name));
        assert_eq!((pattern(&spec).as_str(), feeds(&spec).as_str()), (layers, feed), "{name}");
        assert_eq!((spec.vocab, spec.hidden, spec.max_positions), (256, 64, 4096), "{name}");
        assert_eq!((spec.compose, recurrent(&spec, 0).form()), (rule, form), "{name}");
        let tied = ["qwen3_5_vlm", "granitemoehybrid"].contains(&name);
        assert_eq!(spec.head.is_none(), tied, "{name}");
        assert_eq!(spec.tied_head.as_deref(), tied.then_some("lm_head.weight"), "{name}");
        let factors = if name == "granitemoehybrid" { (1.5, 2.0) } else { (1.0, 1.0) };
        assert_eq!((spec.embed_scale, spec.logit_scale), factors, "{name}");
    }
}

#[test]
fn states_are_those_of_the_reference() {
    for name in FIXTURES {
        let spec = describe(&fixture(name));
        let golden = json(&format!("{name}/golden.json"));
        let shape = |key: &str| golden["tensors"].get(key).map(|t| t["shape"].clone());
        for layer in 0..spec.layers.len() {
            let at = format!("short.layer{layer}");
            let Some(recurrent_shape) = shape(&format!("{at}.recurrent")) else {
                assert_eq!(&pattern(&spec)[layer..=layer], "F", "{name} {layer}");
                continue;
            };
            let m = recurrent(&spec, layer);
            let (heads, d_k, d_v) = (m.shape.heads, m.shape.d_k, m.shape.d_v);
            // Mamba2's reference keeps the transposed state.
            let want = if spec.compose == ComposeRule::Last { [heads, d_v, d_k] } else { [heads, d_k, d_v] };
            assert_eq!(recurrent_shape, serde_json::json!(want), "{name} {layer}");
            let conv = m.conv.as_ref().map(|conv| serde_json::json!([m.channels(), conv.kernel]));
            assert_eq!(shape(&format!("{at}.conv")), conv, "{name} {layer}");
        }
    }
}

/// What the notes of the reference say of each family.
#[test]
fn conventions_are_those_of_the_notes() {
    for name in ["qwen3_5", "qwen3_5_moe_vlm", "qwen3_next"] {
        let spec = describe(&fixture(name));
        assert!(spec.final_norm.zero_centred && spec.layers.iter().all(|l| l.mixer.norm.zero_centred), "{name}");
        let (linear, full) = (recurrent(&spec, 0), attention(&spec, 3));
        assert!(!linear.norm.zero_centred && full.q_norm.as_ref().unwrap().zero_centred, "{name}");
        assert!(linear.unit && full.gated && linear.gate_activation == Activation::Silu, "{name}");
        assert_eq!((linear.q_scale, linear.norm_group), (0.25, 32), "{name}");
        assert_eq!(full.rope.as_ref().unwrap().inv_freq.len(), 4, "{name}");
    }
    for name in ["bailing_moe_linear", "bailing_moe_v2_5"] {
        let spec = describe(&fixture(name));
        let linear = recurrent(&spec, 0);
        assert_eq!((linear.shape.key_heads, linear.norm.width, linear.norm_group), (4, 64, 32), "{name}");
        assert_eq!((linear.q_scale, linear.activation, linear.unit), (0.25, None, false), "{name}");
        assert!(linear.rope.is_some() && linear.gate_activation == Activation::Sigmoid && !linear.gate_first, "{name}");
        assert_eq!(spec.embed, "model.word_embeddings.weight", "{name}");
    }
    for name in ["kimi_linear", "bailing_hybrid"] {
        let spec = describe(&fixture(name));
        let linear = recurrent(&spec, 0);
        assert_eq!((linear.norm_group, linear.gate_activation, linear.unit), (16, Activation::Sigmoid, true), "{name}");
        let lower = match linear.decay {
            DecaySpec::Channel { lower, .. } => lower,
            _ => panic!("{name}"),
        };
        assert_eq!(lower, (name == "bailing_hybrid").then_some(-5.0), "{name}");
        let full = latent(&spec, spec.layers.len() - 1);
        // The latent's norm has an epsilon of its own; Kimi's others have 1e-5.
        assert_eq!((full.latent_norm.eps, full.scale), (1e-6, 24f32.powf(-0.5)), "{name}");
        assert_eq!((full.gate.is_some(), full.rope.is_some()), (name == "bailing_hybrid", name == "bailing_hybrid"));
    }
    assert_eq!(describe(&fixture("kimi_linear")).final_norm.eps, 1e-5);
    for name in ["minimax", "minimax_m1"] {
        let spec = describe(&fixture(name));
        let linear = recurrent(&spec, 0);
        assert_eq!((linear.q_scale, linear.activation), (1.0, Some(Activation::Silu)), "{name}");
        assert_eq!((linear.rope.clone(), linear.norm.eps, linear.norm_group), (None, 1e-6, 64), "{name}");
        // Rows of a head are [q | k | v].
        assert_eq!(linear.channels.iter().map(|s| taken(s)[16]).collect::<Vec<_>>(), [48, 64, 80], "{name}");
        let residuals = [spec.layers[0].mixer.residual, spec.layers[7].mixer.residual];
        let normed = |keep, add| Residual::Normed { keep, add };
        assert_eq!(residuals, [normed(1.5, 1.1), normed(1.6, 0.9)], "{name}");
        assert_eq!(spec.layers[0].feed.as_ref().unwrap().residual, normed(1.3, 0.8), "{name}");
    }
    let olmo = describe(&fixture("olmo_hybrid"));
    let linear = recurrent(&olmo, 0);
    assert!(matches!(linear.write, WriteSpec::Delta { scale: 2.0, .. }));
    assert_eq!((linear.norm.eps, linear.gate_activation), (1e-5, Activation::Silu));
    assert_eq!((olmo.layers[0].mixer.residual, olmo.layers[3].mixer.residual), (Residual::PLAIN, Residual::Post));
    assert_eq!((attention(&olmo, 3).q_norm.as_ref().unwrap().width, attention(&olmo, 3).head_dim), (64, 16));
    let granite = describe(&fixture("granitemoehybrid"));
    let residual = Residual::Pre { keep: 1.0, add: 0.75 };
    let feed = granite.layers[2].feed.as_ref().unwrap();
    assert_eq!((granite.layers[2].mixer.residual, feed.residual), (residual, residual));
    assert_eq!((attention(&granite, 2).scale, recurrent(&granite, 0).norm_group), (0.1875, 128));
    let nemotron = describe(&fixture("nemotron_h"));
    assert_eq!((recurrent(&nemotron, 0).norm_group, attention(&nemotron, 2).rope.is_none()), (48, true));
    let names =
        [&nemotron.layers[1].mixer.norm, &nemotron.layers[2].feed.as_ref().unwrap().norm].map(|n| n.name.as_str());
    assert_eq!(names, ["backbone.layers.2.norm.weight", "backbone.layers.4.norm.weight"], "blocks have the numbers");
    let bamba = describe(&fixture("bamba"));
    let linear = recurrent(&bamba, 0);
    assert!(matches!(linear.write, WriteSpec::Step) && linear.gate_first && linear.skip.is_some());
    assert_eq!((linear.order, linear.q_scale, linear.unit), (ChannelOrder::ValueKeyQuery, 1.0, false));
    assert_eq!((linear.shape.key_heads, linear.shape.heads, linear.norm_group), (2, 8, 64));
    assert!(linear.conv.as_ref().unwrap().bias.is_some());
}

/// Qwen3-Next's fused projections, by the row: per key head `[q | k | v | z]` and `[b | a]`.
#[test]
fn rows_of_fused_projections() {
    let spec = describe(&fixture("qwen3_next"));
    let linear = recurrent(&spec, 0);
    // Two key heads of 16, four value heads of 32: 16 + 16 + 64 + 64 rows a key head.
    let rows: Vec<Vec<usize>> = linear.channels.iter().map(taken).collect();
    assert_eq!(rows[0], [(0..16).collect::<Vec<_>>(), (160..176).collect()].concat());
    assert_eq!(rows[1], [(16..32).collect::<Vec<_>>(), (176..192).collect()].concat());
    assert_eq!(rows[2], [(32..96).collect::<Vec<_>>(), (192..256).collect()].concat());
    let hypic_model::spec::ProjectionSpec::Direct(gate) = &linear.gate else { panic!("one matrix") };
    assert_eq!(taken(&gate[0]), [(96..160).collect::<Vec<_>>(), (256..320).collect()].concat());
    let WriteSpec::Delta { b, .. } = &linear.write else { panic!("a delta rule") };
    assert_eq!(taken(&b[0]), [0, 1, 4, 5]);
    let DecaySpec::Head { x, .. } = &linear.decay else { panic!("a decay per head") };
    assert_eq!(taken(&x[0]), [2, 3, 6, 7]);
    // Fused experts: the gate rows of an expert come first.
    let fused = experts(&spec, 0).fused.as_ref().unwrap();
    assert_eq!(taken(&fused[3].gate_up[0]), (96..128).collect::<Vec<_>>());
    assert_eq!(taken(&fused[3].down), (192..256).collect::<Vec<_>>());
    // Bamba: [gate | x | B | C | dt].
    let bamba = describe(&fixture("bamba"));
    let linear = recurrent(&bamba, 0);
    assert_eq!(taken(&linear.channels[0]), (128..352).collect::<Vec<_>>());
    let DecaySpec::Head { x, limit, .. } = &linear.decay else { panic!("a decay per head") };
    assert_eq!((taken(&x[0]), *limit), ((352..360).collect::<Vec<_>>(), (0.0, f32::INFINITY)));
}
