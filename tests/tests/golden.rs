//! The reference numbers of ordinary forwards: logits, every hidden state, recurrent states, windows, K and V or
//! latents, greedy tokens.

use hypic_kernels::Backend;
use hypic_model::{Item, Logits, Pass, Progress, RunningState, Sequence, Workspace};
use hypic_state::{DType, LayerKind};
use hypic_tests::checkpoints::Reference;
use hypic_tests::drive::Rig;
use hypic_tests::golden::{Golden, assert_close, columns, deinterleave, transpose};
use hypic_tests::tolerance::Tolerance;
use hypic_tests::{for_each_checkpoint, on_each_backend};

fn check_states<B: Backend>(
    rig: &Rig<B>,
    golden: &Golden,
    reference: &Reference,
    length: &str,
    state: &RunningState<B>,
    t: Tolerance,
) {
    for (layer, kind) in rig.model.layout().iter().enumerate() {
        let name = |part: &str| format!("{length}.layer{layer}.{part}");
        match kind {
            LayerKind::Recurrent => {
                let (s, window) = state.recurrent(layer).expect("a recurrent layer");
                let want = golden.get(&name("recurrent"));
                let values = match reference.transposed {
                    true => transpose(&want.values, want.shape[1], want.shape[2], 1),
                    false => want.values.clone(),
                };
                assert_close(&name("recurrent"), &rig.numbers(s), &values, t.state * want.largest());
                let want = golden.find(&name("conv"));
                assert_eq!(window.is_some(), want.is_some(), "{}", name("conv"));
                if let (Some(window), Some(want)) = (window, want) {
                    // [channels, 4], newest last, against [3, channels].
                    let (channels, taps) = (want.shape[0], want.shape[1]);
                    let last = &transpose(&want.values, channels, taps, 1)[channels..];
                    assert_close(&name("conv"), &rig.numbers(window), last, t.hidden);
                }
            }
            LayerKind::Attention => {
                let host = rig.backend.kv_download(state.own_kv(layer).expect("an attention layer"));
                let Some(latent) = golden.find(&name("kv_latent")) else {
                    for (part, got) in [("k", host.k), ("v", host.v)] {
                        let (tokens, heads, d) = (got.shape()[0], got.shape()[1], got.shape()[2]);
                        let got = transpose(&got.to_f64(), tokens, heads, d);
                        assert_close(&name(part), &got, &golden.get(&name(part)).values, t.hidden);
                    }
                    continue;
                };
                let (got, width, rank) = (host.k.to_f64(), host.k.shape()[2], latent.shape[2]);
                assert_close(&name("kv_latent"), &columns(&got, width, 0..rank), &latent.values, t.hidden);
                let mut k_pe = columns(&got, width, rank..width);
                if reference.rotary.is_some() {
                    k_pe = deinterleave(&k_pe, width - rank);
                }
                assert_close(&name("k_pe"), &k_pe, &golden.get(&name("k_pe")).values, t.hidden);
            }
        }
    }
}

fn check_forward<B: Backend>(mut rig: Rig<B>, reference: &Reference, file: &str, t: Tolerance) {
    let name = reference.name;
    let golden = Golden::open(&format!("golden/{name}/{file}"));
    for (length, chunk) in [("short", 512), ("long", 512), ("long", 64)] {
        rig.chunk = chunk;
        let forward = rig.forward(&golden.get(&format!("{length}.input_ids")).ids());
        let logits = &golden.get(&format!("{length}.logits")).values;
        assert_close(&format!("{name} {length}.logits, chunk {chunk}"), &forward.logits.concat(), logits, t.logits);
        check_states(&rig, &golden, reference, length, &forward.state, t);
        if length == "short" {
            let (tokens, logits) = rig.greedy(forward, 24);
            assert_eq!(tokens, golden.get("greedy.tokens").ids(), "{name} greedy.tokens");
            let want = &golden.get("greedy.logits").values;
            assert_close(&format!("{name} greedy.logits"), &logits.concat(), want, t.logits);
        }
    }
    check_hidden(&rig, &golden, name, t);
}

fn check_hidden<B: Backend>(rig: &Rig<B>, golden: &Golden, name: &str, t: Tolerance) {
    let close = |part: &str, got: &B::Tensor| {
        let want = golden.get(&format!("short.hidden.{part}"));
        assert_close(&format!("{name} hidden.{part}"), &rig.numbers(got), &want.values, t.hidden);
    };
    let mut ws = Workspace::new(&rig.backend);
    let ids = golden.get("short.input_ids").ids();
    let mut buffer = rig.backend.zeros(&[0, 0]);
    rig.model.embed(&rig.backend, &ids, &mut ws, &mut buffer);
    close("embed", &buffer);
    let state = rig.empty().of_prompt(ids.len());
    let items = vec![Item::Run(ids)];
    let mut pass = Pass::new(vec![Sequence { state, items, capture: None, logits: Logits::All }]);
    for layer in 0.. {
        let progress = pass.advance(&rig.backend, &rig.model, &mut ws).expect("no parts are needed");
        let hidden = pass.hidden().expect("the pass has begun");
        close(&format!("layer{layer}"), hidden);
        if progress == Progress::Done {
            assert_eq!(layer + 1, rig.model.layout().len());
            rig.model.final_norm(&rig.backend, hidden, &mut buffer);
            return close("final_norm", &buffer);
        }
    }
}

fn check(reference: &Reference) {
    let file = "golden.safetensors";
    on_each_backend!(&reference.folder(), |rig, tolerance| check_forward(rig, reference, file, tolerance));
}

for_each_checkpoint!(check);

/// Another configuration file that describes the same weights gives the same model.
#[test]
fn other_spellings_of_a_config() {
    for (name, config, tolerance) in [
        // The releases divide by L - 1 in their slopes, the reference for these numbers by L - 1 + 1e-5.
        ("minimax", "config.release_names.json", 5e-6),
        ("kimi_linear", "config.save_pretrained.json", 1e-6),
        ("bailing_hybrid", "config.save_pretrained.json", 1e-6),
    ] {
        let rig = Rig::load(hypic_kernels::Reference::<f64>::new(), &format!("golden/{name}/{config}"), DType::F64);
        let golden = Golden::open(&format!("golden/{name}/golden.safetensors"));
        let forward = rig.forward(&golden.get("long.input_ids").ids());
        let want = &golden.get("long.logits").values;
        assert_close(&format!("{name} {config} long.logits"), &forward.logits.concat(), want, tolerance);
    }
}

/// Prompts beyond the original maximum, and what is decoded behind them.
#[test]
fn dynamic_ntk() {
    let (config, file) = ("golden/granitemoehybrid/config.dynamic.json", "golden.dynamic.safetensors");
    let reference = hypic_tests::checkpoints::named("granitemoehybrid");
    on_each_backend!(config, |rig, tolerance| check_forward(rig, reference, file, tolerance));
}

/// What a model answers, without the states on the way.
fn check_answers(checkpoint: &str, file: &str) {
    let golden = Golden::open(file);
    on_each_backend!(checkpoint, |rig, tolerance| {
        for length in ["short", "long"] {
            let forward = rig.forward(&golden.get(&format!("{length}.input_ids")).ids());
            let want = &golden.get(&format!("{length}.logits")).values;
            assert_close(&format!("{file} {length}.logits"), &forward.logits.concat(), want, tolerance.logits);
            if length == "short" {
                assert_eq!(rig.greedy(forward, 24).0, golden.get("greedy.tokens").ids(), "{file}");
            }
        }
        check_hidden(&rig, &golden, file, tolerance);
    });
}

/// MLPs whose factors have limits, of experts and of the shared one, in some layers.
#[test]
fn bounded_swiglu() {
    check_answers("golden/bailing_hybrid/config.bounded.json", "golden/bailing_hybrid/golden.bounded.safetensors");
}

/// Decays that are stored, and are others than those of a release with as many heads.
#[test]
fn stored_decays() {
    check_answers("golden/minimax_six", "golden/minimax_six/golden.safetensors");
}
