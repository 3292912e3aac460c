//! Help, wrong options, and what cannot be loaded.

use serde_json::json;

use crate::support::{Files, answer, assert_adds_up, fails, hypic, repository};

const MODEL: [&str; 6] = ["--model", "--dtype", "--workers", "--cache-bytes", "--seam", "--anchor"];

#[test]
fn every_command_has_help_on_every_option() {
    let generate = [
        "--system",
        "--document",
        "--query",
        "--raw",
        "--separator",
        "--token-segments",
        "--mode",
        "--compose",
        "--max-tokens",
        "--temperature",
        "--top-k",
        "--top-p",
        "--seed",
        "--stop",
        "--stop-at-eos",
        "--logprobs",
        "--repeat",
        "--special-tokens",
        "--json",
    ];
    let serve = ["--listen", "--grpc-listen", "--api-key-file", "--grace"];
    let commands: [(&[&str], Vec<&str>); 5] = [
        (&[], vec!["serve", "generate", "model", "--version"]),
        (&["generate"], [&MODEL[..], &generate].concat()),
        (&["serve"], [&MODEL[..], &serve].concat()),
        (&["model"], vec!["info"]),
        (&["model", "info"], vec!["[MODEL]", "--dtype", "--seam", "--json"]),
    ];
    for (command, words) in commands {
        for help in ["--help", "-h"] {
            let run = hypic(&[command, &[help]].concat());
            assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{command:?}");
            for word in &words {
                assert!(run.stdout.contains(word), "{command:?}: {word} is not in {}", run.stdout);
            }
        }
    }
    let run = hypic(&["--version"]);
    assert_eq!(run.code, Some(0));
    assert!(run.stdout.starts_with("hypic "));
}

#[test]
fn wrong_options_are_errors_of_usage() {
    for (args, words) in [
        (&["generate", "--mode", "fast"][..], &["--mode", "full, prefix, hypic"][..]),
        (&["generate", "--compose", "multiply"], &["--compose", "transition"]),
        (&["generate", "--anchor", "user"], &["--anchor", "none, turn, system"]),
        (&["generate", "--dtype", "fp8"], &["--dtype", "auto, f32 or bf16"]),
        (&["generate", "--seam", "-1"], &["--seam"]),
        (&["generate", "--seam", "4294967296"], &["--seam"]),
        (&["generate", "--max-tokens", "many"], &["--max-tokens"]),
        (&["generate", "--repeat", "0"], &["--repeat"]),
        (&["generate", "--workers", "0"], &["--workers", "1..=256"]),
        (&["generate", "--workers", "1000000"], &["--workers"]),
        (&["generate", "--cache-bytes", "lots"], &["--cache-bytes", "lots"]),
        (&["generate", "--cache-bytes", "-5"], &["--cache-bytes"]),
        (&["generate", "--no-such-option"], &["--no-such-option"]),
        (&["generate", "--query", "x", "--token-segments", "f"], &["--query", "--token-segments"]),
        (&["generate", "--stop-at-eos"], &["--token-segments"]),
        (&["serve", "--listen", "nowhere"], &["--listen"]),
        (&["model", "info", "--dtype", "int4"], &["--dtype"]),
        (&["model", "info", "a", "b"], &["'b'"]),
        (&["transmogrify"], &["transmogrify"]),
    ] {
        fails(2, args, words);
    }
}

#[test]
fn a_prompt_needs_something_to_answer() {
    fails(1, &["generate"], &["--query", "--document"]);
    fails(1, &["generate", "--system", "Be brief.", "--json"], &["--query", "--document"]);
    fails(1, &["generate", "--raw", "--query", ""], &["query", "no tokens"]);
}

#[test]
fn limits_are_told() {
    let ask = |more: &[&'static str]| [&["generate", "--query", "Question: Where?", "--json"], more].concat();
    fails(1, &ask(&["--max-tokens", "0"]), &["max_tokens", "at least 1"]);
    fails(1, &ask(&["--max-tokens", "1000000"]), &["1000000", "context", "32768"]);
    fails(1, &ask(&["--max-tokens", "4294967295"]), &["context"]);
    fails(1, &ask(&["--logprobs", "21"]), &["at most 20"]);
    fails(1, &ask(&["--temperature", "-1"]), &["temperature"]);
    fails(1, &ask(&["--temperature", "nan"]), &["temperature"]);
    fails(1, &ask(&["--top-p", "1.5"]), &["top_p"]);
    fails(1, &ask(&["--stop", ""]), &["stop"]);
    let one = answer(&ask(&["--max-tokens", "1"]));
    assert_eq!((one["token_ids"].as_array().unwrap().len(), &one["finish_reason"]), (1, &json!("length")));
}

#[test]
fn without_a_cache_the_answer_is_the_same() {
    let files = Files::new();
    let document =
        files.write("d.txt", "Document: Alma Berg. Alma Berg lives in Dover. She keeps a parrot.\n".repeat(4));
    let ask = |cache: &'static str| {
        let args = [
            "generate",
            "--document",
            &document,
            "--query",
            "Question: Where does Alma Berg live?",
            "--json",
            "--repeat",
            "2",
            "--cache-bytes",
            cache,
        ];
        crate::support::answers(&args)
    };
    let (cold, cached) = (ask("0"), ask("64MiB"));
    for (i, got) in cold.iter().enumerate() {
        assert_adds_up(got);
        assert_eq!(got["token_ids"], cached[i]["token_ids"]);
        assert_eq!(got["usage"]["composed_tokens"], json!(0), "{got}");
    }
    assert!(cached[1]["usage"]["composed_tokens"].as_u64() > Some(0));
}

#[test]
fn bad_token_segments_are_named() {
    let (files, model) = (Files::new(), repository("golden/qwen3_5"));
    let fails_with = |text: &str, words: &[&str]| {
        let file = files.write("prompt.json", text);
        fails(1, &["generate", "--model", &model, "--token-segments", &file, "--json"], words);
    };
    for text in ["", "{", "[]", "{}", "null", r#"{"segments": [[1]]}"#, r#"{"segments": [1], "query": [1]}"#] {
        fails_with(text, &["--token-segments", "prompt.json", "\"query\": [ids]"]);
    }
    fails_with(r#"{"query": [1], "qeury": [1]}"#, &["qeury", "unknown field"]);
    fails_with(r#"{"query": [-1]}"#, &["-1"]);
    fails_with(r#"{"query": [1.5]}"#, &["1.5"]);
    fails_with(r#"{"query": ["a"]}"#, &["\"a\""]);
    fails_with(r#"{"query": [4294967296]}"#, &["4294967296"]);
    fails_with(r#"{"query": []}"#, &["query", "no tokens"]);
    fails_with(r#"{"query": [256]}"#, &["256", "vocabulary"]);
    fails_with(r#"{"segments": [[1, 4294967295]], "query": [1]}"#, &["4294967295", "vocabulary"]);
    fails_with(r#"{"segments": [[1]], "query": [1], "anchor": [300]}"#, &["300", "vocabulary"]);
    let long = format!(r#"{{"query": {:?}}}"#, vec![1; 5000]);
    fails_with(&long, &["5000", "4096"]);
    let missing = format!("{}/missing.json", files.path());
    fails(1, &["generate", "--model", &model, "--token-segments", &missing], &["--token-segments", &missing]);
}

#[test]
fn models_that_cannot_be_loaded_are_named() {
    let files = Files::new();
    let nowhere = format!("{}/nowhere", files.path());
    fails(1, &["generate", "--model", &nowhere, "--query", "x"], &[&nowhere, "does not exist"]);
    let prompt = files.write("prompt.json", r#"{"query": [1]}"#);
    fails(1, &["generate", "--model", &prompt, "--token-segments", &prompt], &["prompt.json", "is a file"]);
    fails(1, &["generate", "--model", files.path(), "--token-segments", &prompt], &["config.json"]);
    // Text needs a tokenizer, and that is told before anything is loaded.
    let golden = repository("golden/qwen3_5");
    fails(1, &["generate", "--model", &golden, "--query", "x"], &["tokenizer.json", "--token-segments"]);

    let model = files.copy_of("golden/qwen3_5");
    let ask = ["generate", "--model", model.to_str().unwrap(), "--token-segments", &prompt, "--json"];
    let weights = model.join("model.safetensors");
    let whole = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &whole[..whole.len() - 100]).unwrap();
    fails(1, &ask, &["model.safetensors", "truncated", model.to_str().unwrap()]);
    std::fs::write(&weights, whole).unwrap();
    let generation = model.join("generation_config.json");
    std::fs::write(&generation, "{").unwrap();
    fails(1, &ask, &["generation_config.json", "JSON"]);
    for (key, value) in
        [("temperature", json!("hot")), ("temperature", json!(-1)), ("top_p", json!(7)), ("eos_token_id", json!([-1]))]
    {
        std::fs::write(&generation, json!({key: value}).to_string()).unwrap();
        fails(1, &ask, &["generation_config.json", key]);
    }
    std::fs::remove_file(&generation).unwrap();
    answer(&ask);
}

#[test]
fn a_tokenizer_of_another_model_is_refused() {
    let files = Files::new();
    let model = files.copy_of("golden/qwen3_5");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(repository(&format!("models/demo/{file}")), model.join(file)).unwrap();
    }
    let ask = ["generate", "--model", model.to_str().unwrap(), "--query", "x"];
    fails(1, &ask, &["tokenizer.json", "256 rows"]);
    std::fs::write(model.join("tokenizer.json"), "{").unwrap();
    fails(1, &ask, &["tokenizer.json"]);
}
