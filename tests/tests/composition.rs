//! The reference compositions: every case's logits and greedy tokens, and the entries' tensors.

use hypic_kernels::Backend;
use hypic_state::{ComposeRule, DECAYED, DType, LayerPart, Transition};
use hypic_tests::checkpoints::Reference;
use hypic_tests::drive::Rig;
use hypic_tests::golden::{Golden, argmax, assert_close, columns, deinterleave};
use hypic_tests::tolerance::Tolerance;
use hypic_tests::{for_each_checkpoint, on_each_backend};
use serde_json::Value;

/// Seam of the stored entries.
const SEAM: usize = 8;

fn check(reference: &Reference) {
    on_each_backend!(&reference.folder(), |rig, tolerance| check_compositions(&rig, reference, tolerance));
}

for_each_checkpoint!(check, composed);

fn check_compositions<B: Backend>(rig: &Rig<B>, reference: &Reference, t: Tolerance) {
    let name = reference.name;
    let golden = Golden::open(&format!("golden/composition/{name}.safetensors"));
    let text = std::fs::read_to_string(hypic_tests::path(&format!("golden/composition/{name}.json")));
    let described: Value = serde_json::from_str(&text.expect("the cases are there")).expect("the cases are JSON");
    let cases = described["cases"].as_array().expect("a list of cases");
    assert!(cases.len() >= 17, "all published cases");
    for case in cases {
        check_case(rig, &golden, name, case, t);
    }
    for (key, anchored) in [("entry1.w8", false), ("entry1.anchored.w8", true)] {
        check_entry(rig, &golden, reference, key, anchored, t);
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

fn check_entry<B: Backend>(
    rig: &Rig<B>,
    golden: &Golden,
    reference: &Reference,
    key: &str,
    anchored: bool,
    t: Tolerance,
) {
    let tokens = golden.get("segment1.input_ids").ids();
    let entry = rig.entry(&tokens, SEAM, &anchor(golden, anchored)).expect("a body");
    for (layer, part) in entry.parts().iter().enumerate() {
        let name = |part: &str| format!("{} {key}.layer{layer}.{part}", reference.name);
        let find = |part: &str| golden.find(&format!("{key}.layer{layer}.{part}"));
        let get = |part: &str| find(part).unwrap_or_else(|| panic!("no {} in the reference data", name(part)));
        let near = |part: &str, got: &[f64], want: &[f64]| {
            assert_close(&name(part), got, want, t.entry * get(part).largest());
        };
        let close = |part: &str, got: &[f64]| near(part, got, &get(part).values);
        let rotated = |part: &str, heads: usize, d: usize| match reference.rotary {
            Some((dimensions, base)) => rotate(&get(part).values, heads, d, dimensions, base, SEAM),
            None => get(part).values.clone(),
        };
        match &**part {
            LayerPart::Recurrent(part) => {
                close("S", &rig.numbers(&part.state));
                assert_eq!(part.tail.is_some(), find("tail").is_some(), "{}", name("tail"));
                if let Some(tail) = &part.tail {
                    close("tail", &rig.numbers(tail));
                }
                let scalar = matches!(part.transition, Transition::Scalar(_));
                assert_eq!(scalar, find("T_scalar").is_some(), "{}: an operator has its smallest form", name("T"));
                if scalar {
                    close("T_scalar", &rig.numbers(part.transition.tensor()));
                }
                let (heads, d_k) = (get("T").shape[0], get("T").shape[1]);
                let mut want = get("T").values.clone();
                if let Transition::Dense(dense) = &part.transition {
                    let omitted = |head: &usize| !dense.kept.contains(&(*head as u32));
                    for head in (0..heads).filter(omitted) {
                        let block = &mut want[head * d_k * d_k..][..d_k * d_k];
                        let norm = block.iter().map(|x| x * x).sum::<f64>().sqrt();
                        assert!(
                            norm <= 1.001 * DECAYED * (d_k as f64).sqrt(),
                            "{}: head {head} is left out",
                            name("T")
                        );
                        block.fill(0.0);
                    }
                }
                near("T", &whole(rig, &part.transition, heads, d_k), &want);
            }
            LayerPart::Attention(kv) => {
                let host = rig.backend.kv_download(kv);
                let (k, width) = (host.k.to_f64(), host.k.shape()[2]);
                let Some(latent) = find("kv_latent") else {
                    close("v", &host.v.to_f64());
                    near("k", &k, &rotated("k", host.k.shape()[1], width));
                    continue;
                };
                let rank = latent.shape[1];
                close("kv_latent", &columns(&k, width, 0..rank));
                let k_pe = columns(&k, width, rank..width);
                match reference.rotary {
                    Some(_) => near("k_pe", &deinterleave(&k_pe, width - rank), &rotated("k_pe", 1, width - rank)),
                    None => close("k_pe", &k_pe),
                }
            }
        }
    }
}

/// An operator as matrices `[heads, d_k, d_k]`.
fn whole<B: Backend>(rig: &Rig<B>, transition: &Transition<B::Tensor>, heads: usize, d_k: usize) -> Vec<f64> {
    let (square, numbers) = (d_k * d_k, rig.numbers(transition.tensor()));
    let mut whole = vec![0.0; heads * square];
    match transition {
        Transition::Scalar(_) => {
            (0..heads * d_k).for_each(|i| whole[i / d_k * square + i % d_k * (d_k + 1)] = numbers[i / d_k])
        }
        Transition::Diagonal(_) => {
            (0..heads * d_k).for_each(|i| whole[i / d_k * square + i % d_k * (d_k + 1)] = numbers[i])
        }
        Transition::Dense(dense) => {
            for (block, &head) in numbers.chunks(square).zip(&dense.kept) {
                whole[head as usize * square..][..square].copy_from_slice(block);
            }
        }
    }
    whole
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
