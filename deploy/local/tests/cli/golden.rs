//! Token ids in, token ids out: the answers are those of the reference program.

use std::collections::BTreeMap;

use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use crate::support::{Files, answer, answers, assert_adds_up, fails, repository};

/// How far a log-probability may be from the reference (tests/golden/README.md).
const TOLERANCE: f64 = 2e-4;
const STEPS: &str = "12";

struct Reference {
    cases: Vec<Value>,
    numbers: BTreeMap<String, Vec<f64>>,
}

/// The tensors of a file of the repository.
fn numbers(relative: &str) -> BTreeMap<String, Vec<f64>> {
    let bytes = std::fs::read(repository(relative)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let numbers = |data: &[u8], dtype: Dtype| -> Vec<f64> {
        match dtype {
            Dtype::F32 => data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b).into()).collect(),
            Dtype::I64 => data.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect(),
            other => panic!("reference data of dtype {other:?}"),
        }
    };
    file.tensors().into_iter().map(|(name, t)| (name, numbers(t.data(), t.dtype()))).collect()
}

impl Reference {
    fn open(name: &str) -> Self {
        let cases = std::fs::read(repository(&format!("golden/composition/{name}.json"))).unwrap();
        let cases: Value = serde_json::from_slice(&cases).unwrap();
        let numbers = numbers(&format!("golden/composition/{name}.safetensors"));
        Reference { cases: cases["cases"].as_array().unwrap().clone(), numbers }
    }

    fn ids(&self, name: &str) -> Vec<u64> {
        self.numbers[name].iter().map(|&id| id as u64).collect()
    }

    fn case(&self, name: &str) -> &Value {
        self.cases.iter().find(|c| c["name"] == name).unwrap()
    }

    /// The prompt of a case, as `--token-segments` takes it.
    fn prompt(&self, case: &Value) -> String {
        let segment = |i: &Value| self.ids(&format!("segment{i}.input_ids"));
        let segments: Vec<_> = case["order"].as_array().unwrap().iter().map(segment).collect();
        let mut prompt = json!({"segments": segments, "query": self.ids("query.input_ids")});
        if case["anchor"] == true {
            prompt["anchor"] = json!(self.ids("anchor.input_ids"));
        }
        prompt.to_string()
    }

    /// Log-probabilities of the first token after the prompt.
    fn first_logprobs(&self, case: &str) -> Vec<f64> {
        let logits = &self.numbers[&format!("{case}.logits")];
        let last = &logits[logits.len() - 256..];
        let max = last.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x));
        let log_sum = max + last.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
        last.iter().map(|x| x - log_sum).collect()
    }

    /// The answer is the reference's.
    fn check(&self, case: &str, got: &Value) {
        assert_eq!(got["token_ids"], json!(self.ids(&format!("{case}.greedy"))), "{case}");
        assert_eq!(got["text"], Value::Null, "{case}");
        assert_eq!(got["finish_reason"], "length", "{case}");
        assert_adds_up(got);
        let logprobs = got["logprobs"].as_array().unwrap();
        assert_eq!(logprobs.len(), got["token_ids"].as_array().unwrap().len(), "{case}");
        let want = self.first_logprobs(case);
        let first = logprobs[0].as_array().unwrap();
        assert_eq!(first.len(), 20, "{case}");
        let value = |t: &Value| t["logprob"].as_f64().unwrap();
        for pair in first.windows(2) {
            assert!(value(&pair[0]) >= value(&pair[1]), "{case}: best first");
        }
        for token in first {
            let want = want[token["token_id"].as_u64().unwrap() as usize];
            assert!((value(token) - want).abs() <= TOLERANCE, "{case}: {token} instead of {want}");
        }
        let mut best = want.clone();
        best.sort_by(|a, b| b.total_cmp(a));
        assert!((value(&first[19]) - best[19]).abs() <= TOLERANCE, "{case}: the 20 likeliest");
        for (token, step) in got["token_ids"].as_array().unwrap().iter().zip(logprobs) {
            assert_eq!(&step[0]["token_id"], token, "{case}: greedy takes the likeliest");
        }
    }
}

fn args<'a>(model: &'a str, prompt: &'a str, case: &'a Value, seam: &'a str) -> Vec<&'a str> {
    let mut args = vec!["generate", "--model", model, "--token-segments", prompt, "--json", "--temperature", "0"];
    args.extend(["--max-tokens", STEPS, "--logprobs", "20"]);
    match case["compose"].as_str().unwrap() {
        "full" => args.extend(["--mode", "full"]),
        rule => args.extend(["--compose", rule, "--seam", seam]),
    }
    args
}

fn check_all(name: &str) {
    let reference = Reference::open(name);
    let (files, model) = (Files::new(), repository(&format!("golden/{name}")));
    for case in &reference.cases {
        let name = case["name"].as_str().unwrap();
        let prompt = files.write("prompt.json", reference.prompt(case));
        let seam = case["seam"].to_string();
        reference.check(name, &answer(&args(&model, &prompt, case, &seam)));
    }
}

/// One test per reference checkpoint.
macro_rules! every_case_of {
    ($($name:ident),*) => {
        mod every_case_of {
            $(
                #[test]
                fn $name() {
                    super::check_all(stringify!($name));
                }
            )*
        }
    };
}

every_case_of!(
    qwen3_5,
    qwen3_5_vlm,
    qwen3_5_moe,
    qwen3_5_moe_vlm,
    qwen3_next,
    bailing_moe_linear,
    kimi_linear,
    minimax,
    minimax_m1,
    bailing_hybrid,
    bailing_moe_v2_5,
    olmo_hybrid,
    bamba
);

#[test]
fn the_number_of_workers_changes_nothing() {
    let reference = Reference::open("qwen3_5");
    let (files, model) = (Files::new(), repository("golden/qwen3_5"));
    for name in ["transition.w4", "anchored.short.w4", "repeated.w8"] {
        let case = reference.case(name);
        let prompt = files.write("prompt.json", reference.prompt(case));
        let seam = case["seam"].to_string();
        let mut first = None;
        for workers in ["1", "2", "4"] {
            let got = answer(&[args(&model, &prompt, case, &seam), vec!["--workers", workers]].concat());
            reference.check(name, &got);
            let logprobs = first.get_or_insert(got["logprobs"].clone());
            assert_eq!(&got["logprobs"], logprobs, "{name}: {workers} workers");
        }
    }
}

#[test]
fn asked_again_the_answer_is_the_same_and_most_of_it_is_reused() {
    let reference = Reference::open("qwen3_5");
    let (files, model) = (Files::new(), repository("golden/qwen3_5"));
    for (name, mode) in [("transition.w8", "hypic"), ("anchored.w8", "hypic"), ("full", "prefix"), ("full", "full")] {
        let case = reference.case(name);
        let prompt = files.write("prompt.json", reference.prompt(case));
        let seam = case["seam"].to_string();
        let mut args = args(&model, &prompt, case, &seam);
        args.retain(|&arg| arg != "--mode" && arg != "full");
        let rounds = answers(&[args, vec!["--mode", mode, "--repeat", "3"]].concat());
        assert_eq!(rounds.len(), 3);
        for (round, got) in rounds.iter().enumerate() {
            reference.check(name, got);
            let sources: Vec<&str> =
                got["segments"].as_array().unwrap().iter().map(|s| s["source"].as_str().unwrap()).collect();
            let usage = |key: &str| got["usage"][key].as_u64().unwrap();
            let reused = usage("exact_tokens") + usage("composed_tokens");
            if round == 0 || mode == "full" {
                assert!(sources.iter().all(|s| ["computed", "seam_only"].contains(s)), "{name} {mode}: {sources:?}");
                assert_eq!(reused, 0, "{name} {mode}");
                continue;
            }
            let what = format!("{name} {mode} round {round}: {} {sources:?}", got["usage"]);
            assert!(sources.iter().all(|s| ["memory", "prefix", "seam_only"].contains(s)), "{what}");
            assert!(sources.iter().any(|s| ["memory", "prefix"].contains(s)), "{what}");
            assert!(reused >= 130, "{what}");
            // Only rows before the first body are exact: a segment of 5 tokens and the seam of the next.
            assert_eq!(usage("exact_tokens"), if mode == "hypic" { 5 + 8 } else { reused }, "{what}");
        }
    }
}

#[test]
fn end_tokens_end_only_what_shall_end() {
    let reference = Reference::open("qwen3_5");
    let files = Files::new();
    let model = files.copy_of("golden/qwen3_5");
    let greedy = reference.ids("transition.w8.greedy");
    let end = greedy[4];
    let stop = greedy.iter().position(|&id| id == end).unwrap();
    std::fs::write(model.join("generation_config.json"), json!({"eos_token_id": [end]}).to_string()).unwrap();
    let case = reference.case("transition.w8");
    let prompt = files.write("prompt.json", reference.prompt(case));
    let args = args(model.to_str().unwrap(), &prompt, case, "8");
    reference.check("transition.w8", &answer(&args));
    let got = answer(&[args, vec!["--stop-at-eos"]].concat());
    assert_eq!(got["token_ids"], json!(greedy[..=stop]));
    assert_eq!(got["finish_reason"], "stop");
    assert_adds_up(&got);
}

#[test]
fn a_query_alone_and_segments_of_no_tokens() {
    let reference = Reference::open("qwen3_5");
    let (files, model) = (Files::new(), repository("golden/qwen3_5"));
    let query = reference.ids("query.input_ids");
    let run = |prompt: Value, mode: &str| {
        let prompt = files.write("prompt.json", prompt.to_string());
        answer(&[
            "generate",
            "--model",
            &model,
            "--token-segments",
            &prompt,
            "--json",
            "--max-tokens",
            "4",
            "--temperature",
            "0",
            "--mode",
            mode,
        ])
    };
    let alone = run(json!({"query": query}), "hypic");
    assert_adds_up(&alone);
    assert_eq!(alone["segments"], json!([]));
    assert_eq!(alone["logprobs"], json!([]));
    for mode in ["full", "prefix", "hypic"] {
        let got = run(json!({"segments": [[], []], "query": query}), mode);
        assert_adds_up(&got);
        assert_eq!(got["token_ids"], alone["token_ids"], "{mode}");
        assert_eq!(got["segments"], json!([]), "{mode}: what has no tokens is not there");
    }
}

#[test]
fn bf16_is_computed_when_asked_for() {
    let reference = Reference::open("qwen3_5");
    let (files, model) = (Files::new(), repository("golden/qwen3_5"));
    let case = reference.case("transition.w8");
    let prompt = files.write("prompt.json", reference.prompt(case));
    let first = |dtype: &str| {
        let got = answer(&[args(&model, &prompt, case, "8"), vec!["--dtype", dtype]].concat());
        assert_adds_up(&got);
        got["logprobs"][0][0].clone()
    };
    let (auto, f32, bf16) = (first("auto"), first("f32"), first("bf16"));
    assert_eq!(auto, f32, "the checkpoint is in f32");
    let (f32, bf16) = (f32["logprob"].as_f64().unwrap(), bf16["logprob"].as_f64().unwrap());
    assert!(f32 != bf16 && (f32 - bf16).abs() < 0.2, "{f32} {bf16}");
}

/// Rope scaling that depends on the length: beyond the original maximum mode full serves, and reuse is refused by name.
#[test]
fn dynamic_scaling_is_served_in_full() {
    let numbers = numbers("golden/granitemoehybrid/golden.dynamic.safetensors");
    let ids = |name: &str| -> Vec<u64> { numbers[name].iter().map(|&id| id as u64).collect() };
    let files = Files::new();
    let model = files.copy_of("golden/granitemoehybrid");
    std::fs::rename(model.join("config.dynamic.json"), model.join("config.json")).unwrap();
    let model = model.to_str().unwrap();
    let (short, long) = (ids("short.input_ids"), ids("long.input_ids"));
    let ask = |segments: Value, query: &[u64], steps: &str, mode: &str| {
        let prompt = files.write("prompt.json", json!({"segments": segments, "query": query}).to_string());
        let args = ["generate", "--model", model, "--token-segments", &prompt, "--json", "--temperature", "0"];
        let args = [&args[..], &["--max-tokens", steps, "--mode", mode]].concat();
        args.into_iter().map(str::to_string).collect::<Vec<_>>()
    };
    let greedy = ids("greedy.tokens");
    let steps = greedy.len().to_string();
    let got = answer(&borrowed(&ask(json!([&short[..20]]), &short[20..], &steps, "full")));
    assert_eq!(got["token_ids"], json!(greedy));
    assert_adds_up(&got);
    for mode in ["prefix", "hypic"] {
        let refused = ask(json!([&short[..20]]), &short[20..], &steps, mode);
        fails(1, &borrowed(&refused), &["37 tokens", "dynamic", "beyond 24", &format!("mode {mode}"), "mode full"]);
    }
    // Up to the original maximum everything is as ever, and the answer may go beyond it. A seam as long as the segment
    // leaves nothing to be composed.
    let within = |mode: &str| {
        let args = ask(json!([&short[..20]]), &short[20..24], "16", mode);
        answer(&[borrowed(&args), vec!["--seam", "20"]].concat())["token_ids"].clone()
    };
    let full = within("full");
    assert_eq!(full.as_array().unwrap().len(), 16);
    assert_eq!((within("prefix"), within("hypic")), (full.clone(), full));
    let beyond = ask(json!([]), &long[..90], "7", "full");
    fails(1, &borrowed(&beyond), &["90 tokens and 7 more", "context is 96"]);
    let info = answer(&["model", "info", model, "--json"]);
    assert_eq!((&info["max_positions"], &info["reusable_positions"]), (&json!(96), &json!(24)));
}

fn borrowed(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}
