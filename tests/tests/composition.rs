//! The reference compositions: every case's logits and greedy tokens, and the entries' tensors.

use hypic_kernels::Backend;
use hypic_state::{ComposeRule, DType, LayerPart, Transition};
use hypic_tests::drive::Rig;
use hypic_tests::golden::{Golden, argmax, assert_close};
use hypic_tests::on_each_backend;
use hypic_tests::tolerance::Tolerance;
use serde_json::Value;

fn check<B: Backend>(rig: &Rig<B>, name: &str, t: Tolerance) {
    let golden = Golden::open(&format!("golden/composition/{name}.safetensors"));
    let text = std::fs::read_to_string(hypic_tests::path(&format!("golden/composition/{name}.json")));
    let described: Value = serde_json::from_str(&text.expect("the cases are there")).expect("the cases are JSON");
    let cases = described["cases"].as_array().expect("a list of cases");
    assert!(cases.len() >= 17, "all published cases");
    for case in cases {
        check_case(rig, &golden, name, case, t);
    }
    for (key, anchored) in [("entry1.w8", false), ("entry1.anchored.w8", true)] {
        check_entry(rig, &golden, key, anchored, t);
    }
}

fn anchor(golden: &Golden, anchored: bool) -> Vec<u32> {
    if anchored { golden.get("anchor.input_ids").ids() } else { Vec::new() }
}

fn check_case<B: Backend>(rig: &Rig<B>, golden: &Golden, name: &str, case: &Value, t: Tolerance) {
    let case_name = case["name"].as_str().expect("a name");
    let seam = case["seam"].as_u64().expect("a width") as usize;
    let order = case["order"].as_array().expect("an order").iter().map(|i| i.as_u64().expect("an index"));
    let segments: Vec<Vec<u32>> = order.map(|i| golden.get(&format!("segment{i}.input_ids")).ids()).collect();
    let query = golden.get("query.input_ids").ids();
    let what = |part: &str| format!("{name} {case_name}.{part}");

    let composed = match case["compose"].as_str().expect("a rule") {
        "full" => {
            let mut all = rig.forward(&[segments.concat(), query.clone()].concat());
            all.logits.drain(..all.logits.len() - query.len());
            all
        }
        rule => {
            let rule: ComposeRule = rule.parse().expect("a known rule");
            let anchor = anchor(golden, case["anchor"].as_bool().expect("a truth value"));
            rig.compose(&rig.segments(&segments, seam, &anchor), seam, rule, &query)
        }
    };
    let want = &golden.get(&format!("{case_name}.logits")).values;
    assert_close(&what("logits"), &composed.logits.concat(), want, t.logits);
    let want = golden.get(&format!("{case_name}.greedy")).ids();
    let (tokens, _) = rig.greedy(composed, want.len());
    assert_eq!(tokens, want, "{}", what("greedy"));
}

fn check_entry<B: Backend>(rig: &Rig<B>, golden: &Golden, key: &str, anchored: bool, t: Tolerance) {
    let tokens = golden.get("segment1.input_ids").ids();
    let entry = rig.entry(&tokens, 8, &anchor(golden, anchored)).expect("a body");
    for (layer, part) in entry.parts().iter().enumerate() {
        let name = |part: &str| format!("{key}.layer{layer}.{part}");
        let close = |part: &str, got: &[f64]| {
            let want = golden.get(&name(part));
            assert_close(&name(part), got, &want.values, t.entry * want.largest());
        };
        match &**part {
            LayerPart::Recurrent(part) => {
                close("S", &rig.numbers(&part.state));
                close("tail", &rig.numbers(part.tail.as_ref().expect("a convolution")));
                let Transition::Dense(dense) = &part.transition else { panic!("gated delta operators are dense") };
                let want = golden.get(&name("T"));
                let blocks = rig.numbers(&dense.blocks);
                let size = want.values.len() / dense.heads;
                let mut whole = vec![0.0; want.values.len()];
                for (block, &head) in blocks.chunks(size).zip(&dense.kept) {
                    whole[head as usize * size..][..size].copy_from_slice(block);
                }
                close("T", &whole);
            }
            LayerPart::Attention(kv) => {
                let host = rig.backend.kv_download(kv);
                close("v", &host.v.to_f64());
                let want = golden.get(&name("k"));
                let rotated = rotate(&want.values, want.shape[1], want.shape[2], 8, 10_000_000.0, 8);
                assert_close(&name("k"), &host.k.to_f64(), &rotated, t.entry * want.largest());
            }
        }
    }
}

/// Half-split rotation of the first `rotated` dimensions of `[tokens, heads, d]`, token i standing at `first + i`.
fn rotate(values: &[f64], heads: usize, d: usize, rotated: usize, theta: f64, first: usize) -> Vec<f64> {
    let mut out = values.to_vec();
    for (i, head) in out.chunks_mut(d).enumerate() {
        let position = (first + i / heads) as f64;
        for pair in 0..rotated / 2 {
            let (sin, cos) = (position * theta.powf(-2.0 * pair as f64 / rotated as f64)).sin_cos();
            let (a, b) = (head[pair], head[pair + rotated / 2]);
            head[pair] = a * cos - b * sin;
            head[pair + rotated / 2] = b * cos + a * sin;
        }
    }
    out
}

#[test]
fn qwen3_5() {
    on_each_backend!("golden/qwen3_5", |rig, tolerance| check(&rig, "qwen3_5", tolerance));
}

#[test]
fn qwen3_5_vlm() {
    on_each_backend!("golden/qwen3_5_vlm", |rig, tolerance| check(&rig, "qwen3_5_vlm", tolerance));
}

/// bf16 weights: near the float32 logits, by about what the reference measured for it (0.2 to 0.3).
#[test]
fn bf16_stays_near() {
    let golden = Golden::open("golden/qwen3_5/golden.safetensors");
    let rig = Rig::load(hypic_kernels::Cpu::new(2), "golden/qwen3_5", DType::Bf16);
    let forward = rig.forward(&golden.get("long.input_ids").ids());
    assert_close("bf16 long.logits", &forward.logits.concat(), &golden.get("long.logits").values, 0.5);
    let agree = forward.logits.iter().zip(golden.get("long.logits").values.chunks(256));
    let same = agree.filter(|(got, want)| argmax(got) == argmax(want)).count();
    assert!(same >= 135, "{same} of 150 most likely tokens are the same");
}
