//! Text in, text out, with the model that is in the program.

use serde_json::Value;

use crate::support::{Files, answer, answers, assert_adds_up, fails, hypic, repository};

struct Question {
    system: String,
    documents: Vec<String>,
    question: String,
    answers: Vec<String>,
}

fn questions(kind: &str, count: usize) -> Vec<Question> {
    let text = |v: &Value| v.as_str().expect("a text").to_string();
    let texts = |v: &Value| v.as_array().expect("texts").iter().map(text).collect();
    let lines = std::fs::read_to_string(repository("models/demo/eval.jsonl")).expect("the demo model's questions");
    lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("a line of JSON"))
        .filter(|q| text(&q["id"]).starts_with(kind))
        .take(count)
        .map(|q| Question {
            system: text(&q["system"]),
            documents: texts(&q["documents"]),
            question: text(&q["question"]),
            answers: texts(&q["answers"]),
        })
        .collect()
}

/// Options for a question, its documents written to files.
fn options(files: &Files, q: &Question) -> Vec<String> {
    let mut options = vec!["generate".to_string(), "--system".to_string(), q.system.clone()];
    for (i, document) in q.documents.iter().enumerate() {
        options.extend(["--document".to_string(), files.write(&format!("{i}.txt"), document)]);
    }
    options.extend(["--query".to_string(), q.question.clone()]);
    options
}

fn with<'a>(options: &'a [String], more: &[&'a str]) -> Vec<&'a str> {
    options.iter().map(String::as_str).chain(more.iter().copied()).collect()
}

fn is_right(q: &Question, got: &Value) -> bool {
    let text = got["text"].as_str().expect("a text");
    q.answers.iter().any(|a| text.contains(a.as_str()))
}

#[test]
fn questions_about_documents_are_answered() {
    let files = Files::new();
    for q in questions("short", 6).into_iter().chain(questions("medium", 2)) {
        let options = options(&files, &q);
        for more in [&["--json", "--dtype", "f32"][..], &["--json"], &["--json", "--mode", "full", "--dtype", "bf16"]] {
            let got = answer(&with(&options, more));
            assert!(is_right(&q, &got), "{more:?}: {got}, not {:?}", q.answers);
            assert_eq!(got["finish_reason"], "stop");
            assert_adds_up(&got);
        }
    }
}

#[test]
fn every_document_is_a_segment_and_is_reused() {
    let files = Files::new();
    let q = &questions("medium", 1)[0];
    let rounds = answers(&with(&options(&files, q), &["--json", "--repeat", "2", "--workers", "2"]));
    let (cold, warm) = (&rounds[0], &rounds[1]);
    // What the template writes before the first document is one more.
    assert_eq!(cold["segments"].as_array().unwrap().len(), q.documents.len() + 1, "{cold}");
    assert_eq!(cold["text"], warm["text"]);
    assert_eq!(cold["token_ids"], warm["token_ids"]);
    assert!(is_right(q, cold));
    let usage = |got: &Value, key: &str| got["usage"][key].as_u64().unwrap();
    assert_eq!(usage(cold, "composed_tokens"), 0, "{cold}");
    assert!(usage(warm, "composed_tokens") * 10 >= usage(warm, "prompt_tokens") * 8, "{warm}");
    assert_adds_up(warm);
    for settings in
        [["--compose", "add"], ["--compose", "last"], ["--anchor", "none"], ["--anchor", "system"], ["--seam", "0"]]
    {
        let got = answer(&with(&options(&files, q), &[&settings[..], &["--json"]].concat()));
        assert_adds_up(&got);
    }
}

#[test]
fn a_seam_wider_than_every_document_is_an_ordinary_forward() {
    let files = Files::new();
    for q in &questions("short", 2) {
        let options = options(&files, q);
        let full = answer(&with(&options, &["--json", "--mode", "full", "--dtype", "f32"]));
        for seam in ["100000", "4294967295"] {
            let got = answer(&with(&options, &["--json", "--seam", seam, "--dtype", "f32"]));
            assert_eq!(got["token_ids"], full["token_ids"]);
            assert!(got["segments"].as_array().unwrap().iter().all(|s| s["source"] == "seam_only"), "{got}");
            assert_adds_up(&got);
        }
    }
}

#[test]
fn raw_prompts_have_no_template() {
    let files = Files::new();
    let document = files.write("d.txt", "Document: Alma Berg. Alma Berg lives in Dover.\n");
    let got = answer(&["generate", "--raw", "--document", &document, "--query", "Question: Where", "--json"]);
    assert_eq!(got["segments"].as_array().unwrap().len(), 1, "{got}");
    let with_system = answer(&[
        "generate",
        "--raw",
        "--system",
        "S",
        "--document",
        &document,
        "--query",
        "Question: Where",
        "--json",
    ]);
    assert_eq!(with_system["segments"].as_array().unwrap().len(), 2, "{with_system}");
    for got in [&got, &with_system] {
        assert_adds_up(got);
    }
    let templated = answer(&["generate", "--document", &document, "--query", "Question: Where", "--json"]);
    let prompt = |v: &Value| v["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(prompt(&templated) > prompt(&got));
    fails(1, &["generate", "--raw", "--document", &document], &["query", "no tokens"]);
}

#[test]
fn a_separator_splits_text() {
    let (a, b) = ("Document: Alma Berg. Alma Berg lives in Dover.\n", "Document: Otto Hansen. He keeps a parrot.\n");
    let question = "Question: Where does Alma Berg live?";
    let joined = format!("{a}<cut>{b}<cut>{question}");
    let split = answer(&["generate", "--query", &joined, "--separator", "<cut>", "--json"]);
    let files = Files::new();
    let (a, b) = (files.write("a.txt", a), files.write("b.txt", b));
    let declared = answer(&["generate", "--document", &a, "--document", &b, "--query", question, "--json"]);
    let tokens = |v: &Value| -> Vec<u64> {
        v["segments"].as_array().unwrap().iter().map(|s| s["tokens"].as_u64().unwrap()).collect()
    };
    // Declared documents are segments of their own; before the first separator the template's opening is in, too.
    let [opening, first, second] = tokens(&declared)[..] else { panic!("{declared}") };
    assert_eq!(tokens(&split), [opening + first, second]);
    for got in [&split, &declared] {
        assert!(got["text"].as_str().unwrap().contains("Dover"), "{got}");
        assert_adds_up(got);
    }
    // Not asked for, it is text like any other.
    let whole = answer(&["generate", "--query", &joined, "--json"]);
    assert!(tokens(&whole).len() < tokens(&split).len(), "{whole}");
    fails(1, &["generate", "--query", "x", "--separator", ""], &["separator", "empty"]);
}

#[test]
fn documents_are_taken_byte_for_byte() {
    let files = Files::new();
    let crlf = files.write("crlf.txt", "Document: A.\r\n\r\n\tB \u{e9}\u{1f980}<|im_end|>\n");
    let empty = files.write("empty.txt", "");
    let got = answer(&["generate", "--document", &crlf, "--document", &empty, "--query", "Question: x?", "--json"]);
    assert_adds_up(&got);
    let plain = answer(&["generate", "--document", &crlf, "--query", "Question: x?", "--json"]);
    let prompt = |v: &Value| v["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(prompt(&got), prompt(&plain), "an empty document has no tokens");
    assert_eq!(got["token_ids"], plain["token_ids"]);
    // The template's own tokens in a document are text, unless asked for.
    let special = answer(&["generate", "--document", &crlf, "--query", "Question: x?", "--special-tokens", "--json"]);
    assert!(prompt(&special) < prompt(&plain));

    let binary = files.write("binary.bin", b"ok so far\xff\xfe");
    fails(1, &["generate", "--document", &binary, "--query", "x"], &["--document", &binary, "UTF-8", "byte 9"]);
    let missing = format!("{}/missing.txt", files.path());
    fails(1, &["generate", "--document", &missing, "--query", "x", "--json"], &["--document", &missing]);
    fails(1, &["generate", "--document", files.path(), "--query", "x"], &["--document", files.path()]);
}

#[test]
fn sampling_is_repeatable_by_seed() {
    let args = |seed: &'static str| {
        [
            "generate",
            "--query",
            "Question: Where?",
            "--json",
            "--temperature",
            "2",
            "--max-tokens",
            "12",
            "--seed",
            seed,
        ]
    };
    let first = answer(&args("1"))["token_ids"].clone();
    assert_eq!(first, answer(&args("1"))["token_ids"]);
    assert!((2..8).any(|seed| answer(&args(["2", "3", "4", "5", "6", "7"][seed - 2]))["token_ids"] != first));
}

#[test]
fn without_json_there_is_the_answer_and_a_table() {
    let files = Files::new();
    let q = &questions("short", 1)[0];
    let run = hypic(&with(&options(&files, q), &["--repeat", "2"]));
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let lines: Vec<&str> = run.stdout.lines().collect();
    assert_eq!(lines.len(), 2, "an answer a line: {:?}", run.stdout);
    assert!(lines.iter().all(|line| q.answers.iter().any(|a| line.contains(a.as_str()))), "{lines:?}");
    for word in ["round 2 of 2", "segment", "computed", "first token", "composed"] {
        assert!(run.stderr.contains(word), "{word} is not in {}", run.stderr);
    }
}
