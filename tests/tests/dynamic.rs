//! Dynamic NTK scaling in every place where embeddings are used: full, partial and latent attention, and recurrent layers
//! that rotate. Up to the original maximum a model is the plain one; beyond it a prompt is that of a plain model of a
//! larger base, and sequences of other lengths beside it change nothing.

use hypic_kernels::{Backend, Cpu, Reference};
use hypic_model::{Item, Logits, Pass, Sequence, Workspace};
use hypic_state::DType;
use hypic_tests::checkpoints::named;
use hypic_tests::drive::Rig;
use hypic_tests::golden::{Golden, assert_close};
use serde_json::{Value, json};

const ORIGINAL: usize = 40;
const FACTOR: f64 = 3.0;

/// Full rotation, a share of a head, recurrent layers that rotate, and latent attention beside such layers.
const FAMILIES: [&str; 6] = ["olmo_hybrid", "qwen3_5", "minimax_m1", "bamba", "bailing_moe_linear", "bailing_moe_v2_5"];

/// `name` with this base, wherever its configuration names one, and this scaling.
fn rig<B: Backend>(backend: B, name: &str, base: f64, scaling: Option<Value>, dtype: DType) -> Rig<B> {
    let folder = hypic_tests::path(&format!("golden/{name}"));
    let text = std::fs::read(folder.join("config.json")).expect("a configuration");
    let mut config: Value = serde_json::from_slice(&text).expect("an object");
    config["rope_theta"] = json!(base);
    config["max_position_embeddings"] = json!(ORIGINAL);
    if let Some(parameters) = config.get_mut("rope_parameters").and_then(Value::as_object_mut) {
        parameters.insert("rope_theta".into(), json!(base));
        parameters.remove("rope_type");
    }
    config["rope_scaling"] = json!(scaling);
    Rig::with_config(backend, &folder, serde_json::to_vec(&config).expect("JSON"), dtype)
}

fn dynamic<B: Backend>(backend: B, name: &str, dtype: DType) -> Rig<B> {
    let base = named(name).rotary.expect("it rotates").1;
    let scaling = json!({"rope_type": "dynamic", "factor": FACTOR});
    rig(backend, name, base, Some(scaling), dtype)
}

/// A plain model of the base that a prompt of `tokens` tokens has.
fn plain<B: Backend>(backend: B, name: &str, tokens: usize, dtype: DType) -> Rig<B> {
    let (dimensions, base) = named(name).rotary.expect("it rotates");
    let d = dimensions as f64;
    let alpha = (FACTOR * tokens.max(ORIGINAL) as f64 / ORIGINAL as f64) - (FACTOR - 1.0);
    rig(backend, name, base * alpha.powf(d / (d - 2.0)), None, dtype)
}

fn prompt(name: &str) -> Vec<u32> {
    Golden::open(&format!("golden/{name}/golden.safetensors")).get("long.input_ids").ids()
}

#[test]
fn a_long_prompt_is_one_of_a_larger_base() {
    for name in FAMILIES {
        let ids = prompt(name);
        let mut dynamic = dynamic(Reference::<f64>::new(), name, DType::F64);
        for tokens in [ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 3 * ORIGINAL] {
            let plain = plain(Reference::<f64>::new(), name, tokens, DType::F64);
            let want = plain.forward(&ids[..tokens]).logits.concat();
            for chunk in [512, 64] {
                dynamic.chunk = chunk;
                let got = dynamic.forward(&ids[..tokens]).logits.concat();
                assert_close(&format!("{name} of {tokens} tokens, chunk {chunk}"), &got, &want, 1e-9);
            }
        }
        // The scaling is no trifle.
        let unscaled = plain(Reference::<f64>::new(), name, ORIGINAL, DType::F64);
        let far = |rig: &Rig<_>| rig.forward(&ids[..3 * ORIGINAL]).logits.concat();
        let apart = far(&unscaled).iter().zip(far(&dynamic)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(apart > 1e-2, "{name}: {apart}");
    }
}

/// Sequences of several lengths in one pass, and each alone: the same bits, in prompts and in decoding.
#[test]
fn lengths_do_not_mix() {
    for name in FAMILIES {
        let ids = prompt(name);
        let rig = dynamic(Cpu::new(2), name, DType::F32);
        let starts = [5, ORIGINAL, ORIGINAL + 9, 2 * ORIGINAL];
        let sequence = |tokens: usize| Sequence {
            state: rig.empty().of_prompt(tokens),
            items: vec![Item::Run(ids[..tokens].to_vec())],
            capture: None,
            logits: Logits::Last,
        };
        let step = |output: hypic_model::SequenceOutput<Cpu>, token: u32| Sequence {
            state: output.state,
            items: vec![Item::Run(vec![token])],
            capture: None,
            logits: Logits::Last,
        };
        // Two steps of decoding: the one at the original maximum goes beyond it.
        let run = |sequences: Vec<Sequence<Cpu>>| {
            let mut ws = Workspace::new(&rig.backend);
            let mut output = Pass::new(sequences).run(&rig.backend, &rig.model, &mut ws).expect("no parts");
            let mut rows = vec![rig.matrix(&output.logits.take().expect("logits"))];
            for token in [7, 200] {
                let next = output.sequences.into_iter().map(|s| step(s, token)).collect();
                output = Pass::new(next).run(&rig.backend, &rig.model, &mut ws).expect("no parts");
                rows.push(rig.matrix(&output.logits.take().expect("logits")));
            }
            rows
        };
        let together = run(starts.map(sequence).into());
        for (i, tokens) in starts.into_iter().enumerate() {
            let alone = run(vec![sequence(tokens)]);
            for (round, rows) in alone.iter().enumerate() {
                assert_eq!(rows[0], together[round][i], "{name}: {tokens} tokens, round {round}");
            }
        }
    }
}
