//! The reference numbers of ordinary forwards: logits, every hidden state, recurrent states, windows, K and V, greedy tokens.

use hypic_kernels::Backend;
use hypic_model::{Item, Logits, Pass, Progress, Sequence, Workspace};
use hypic_state::LayerKind;
use hypic_tests::drive::Rig;
use hypic_tests::golden::{Golden, assert_close};
use hypic_tests::on_each_backend;
use hypic_tests::tolerance::Tolerance;

fn transpose(values: &[f64], tokens: usize, heads: usize) -> Vec<f64> {
    let d = values.len() / tokens / heads;
    let at = |h: usize, t: usize| &values[(t * heads + h) * d..][..d];
    (0..heads).flat_map(|h| (0..tokens).flat_map(move |t| at(h, t))).copied().collect()
}

fn check_states<B: Backend>(
    rig: &Rig<B>,
    golden: &Golden,
    length: &str,
    state: &hypic_model::RunningState<B>,
    t: Tolerance,
) {
    for (layer, kind) in rig.model.layout().iter().enumerate() {
        let name = |part: &str| format!("{length}.layer{layer}.{part}");
        match kind {
            LayerKind::Recurrent => {
                let (s, window) = state.recurrent(layer).expect("a recurrent layer");
                let want = golden.get(&name("recurrent"));
                assert_close(&name("recurrent"), &rig.numbers(s), &want.values, t.state * want.largest());
                // [channels, 4], newest last, against [3, channels].
                let want = golden.get(&name("conv"));
                let (channels, taps) = (want.shape[0], want.shape[1]);
                let last: Vec<f64> = (1..taps)
                    .flat_map(|i| (0..channels).map(move |c| (c, i)))
                    .map(|(c, i)| want.values[c * taps + i])
                    .collect();
                assert_close(&name("conv"), &rig.numbers(window), &last, t.hidden);
            }
            LayerKind::Attention => {
                let host = rig.backend.kv_download(state.own_kv(layer).expect("an attention layer"));
                for (part, got) in [("k", host.k), ("v", host.v)] {
                    let want = golden.get(&name(part));
                    let got = transpose(&got.to_f64(), got.shape()[0], got.shape()[1]);
                    assert_close(&name(part), &got, &want.values, t.hidden);
                }
            }
        }
    }
}

fn check<B: Backend>(mut rig: Rig<B>, name: &str, t: Tolerance) {
    let golden = Golden::open(&format!("golden/{name}/golden.safetensors"));
    for (length, chunk) in [("short", 512), ("long", 512), ("long", 64)] {
        rig.chunk = chunk;
        let forward = rig.forward(&golden.get(&format!("{length}.input_ids")).ids());
        let logits = &golden.get(&format!("{length}.logits")).values;
        assert_close(&format!("{name} {length}.logits, chunk {chunk}"), &forward.logits.concat(), logits, t.logits);
        check_states(&rig, &golden, length, &forward.state, t);
        if length == "short" {
            let (tokens, logits) = rig.greedy(forward, 24);
            assert_eq!(tokens, golden.get("greedy.tokens").ids(), "{name} greedy.tokens");
            assert_close(
                &format!("{name} greedy.logits"),
                &logits.concat(),
                &golden.get("greedy.logits").values,
                t.logits,
            );
        }
    }
    check_hidden(&rig, &golden, name, t);
}

fn check_hidden<B: Backend>(rig: &Rig<B>, golden: &Golden, name: &str, t: Tolerance) {
    let mut ws = Workspace::new(&rig.backend);
    let items = vec![Item::Run(golden.get("short.input_ids").ids())];
    let mut pass = Pass::new(vec![Sequence { state: rig.empty(), items, capture: None, logits: Logits::All }]);
    for layer in 0.. {
        let progress = pass.advance(&rig.backend, &rig.model, &mut ws).expect("no parts are needed");
        let hidden = rig.numbers(pass.hidden().expect("the pass has begun"));
        let want = golden.get(&format!("short.hidden.layer{layer}"));
        assert_close(&format!("{name} hidden.layer{layer}"), &hidden, &want.values, t.hidden);
        if progress == Progress::Done {
            assert_eq!(layer + 1, rig.model.layout().len());
            break;
        }
    }
}

#[test]
fn qwen3_5() {
    on_each_backend!("golden/qwen3_5", |rig, tolerance| check(rig, "qwen3_5", tolerance));
}

#[test]
fn qwen3_5_vlm() {
    on_each_backend!("golden/qwen3_5_vlm", |rig, tolerance| check(rig, "qwen3_5_vlm", tolerance));
}
