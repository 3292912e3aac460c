//! Ids to text and back, on byte-level, byte-fallback and unigram tokenizers; files and templates.

mod support;

use std::sync::Arc;

use hypic_text::{ChatPrompt, Detokenizer, Message, RawPrompt, TextErrorKind, TextFiles, TextPipeline, Tokenizer};
use serde_json::{Map, json};
use support::*;

const ALPHABET: [&str; 16] =
    ["the", " ", "  ", "a", "b", "é", "日本", "😀", "\n", "\t", ".", "</s>", "<unk>", "\u{FFFD}", "ß", "x<0x41>"];

fn tokenizer(json: Vec<u8>) -> Arc<Tokenizer> {
    Arc::new(Tokenizer::new(&files(json, json!({"bos_token": "<s>"}), None)).unwrap())
}

fn all() -> [Arc<Tokenizer>; 4] {
    let demo = demo();
    [
        Arc::clone(demo.tokenizer()),
        tokenizer(byte_level_json()),
        tokenizer(byte_fallback_json()),
        tokenizer(unigram_json()),
    ]
}

fn stream(tokenizer: &Arc<Tokenizer>, ids: &[u32], keep_special: bool) -> String {
    let mut decoder = Detokenizer::new(Arc::clone(tokenizer), keep_special);
    let mut text = String::new();
    for id in ids {
        text.push_str(&decoder.push(*id).unwrap());
    }
    text + &decoder.finish().unwrap()
}

#[test]
fn streamed_text_equals_the_decode_of_all_ids() {
    let mut random = Random(11);
    for tokenizer in all() {
        for _ in 0..200 {
            let text = random.text(&ALPHABET, 12);
            let ids = tokenizer.encode_text(&text).unwrap();
            assert_eq!(stream(&tokenizer, &ids, false), tokenizer.decode(&ids, false).unwrap(), "{text:?}");
            // Any ids, invalid bytes and special and unknown ones too.
            let ids: Vec<u32> =
                (0..random.below(20)).map(|_| random.below(tokenizer.vocab_size() + 3) as u32).collect();
            for keep_special in [false, true] {
                let whole = tokenizer.decode(&ids, keep_special).unwrap();
                assert_eq!(stream(&tokenizer, &ids, keep_special), whole, "{ids:?}");
            }
        }
    }
}

#[test]
fn text_survives_encoding_and_decoding() {
    let mut random = Random(5);
    let [demo, byte_level, byte_fallback, _] = all();
    for _ in 0..200 {
        let text = random.text(&ALPHABET, 12);
        for tokenizer in [&demo, &byte_level, &byte_fallback] {
            let ids = tokenizer.encode_text(&text).unwrap();
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
            assert!(ids.iter().all(|id| !tokenizer.is_special(*id)), "{text:?}");
        }
        for tokenizer in [&demo, &byte_level] {
            let ids = tokenizer.encode_text(&text).unwrap();
            let bytes: Vec<u8> = ids.iter().flat_map(|id| tokenizer.token_bytes(*id)).collect();
            assert_eq!(bytes, text.as_bytes());
        }
    }
}

#[test]
fn no_half_character_is_emitted() {
    let tokenizer = tokenizer(byte_level_json());
    let mut decoder = Detokenizer::new(Arc::clone(&tokenizer), false);
    let ids = tokenizer.encode_text("a😀").unwrap();
    let steps: Vec<String> = ids.iter().map(|id| decoder.push(*id).unwrap()).collect();
    assert_eq!(steps, ["a", "", "", "", "😀"]);
    assert_eq!(decoder.push(ids[1]).unwrap() + &decoder.push(ids[2]).unwrap(), "");
    assert_eq!(decoder.finish().unwrap(), "\u{FFFD}");
}

#[test]
fn special_tokens_are_silent_unless_kept() {
    let demo = demo();
    let ids = [vec![1], demo.tokenizer().encode_text("user").unwrap(), vec![2]].concat();
    assert_eq!(stream(demo.tokenizer(), &ids, false), "user");
    assert_eq!(stream(demo.tokenizer(), &ids, true), "<|im_start|>user<|im_end|>");
}

#[test]
fn token_bytes_are_those_of_the_text() {
    let fallback = tokenizer(byte_fallback_json());
    let bytes = |token: &str| fallback.token_bytes(fallback.token_to_id(token).unwrap());
    assert_eq!(bytes("<0x0A>"), b"\n");
    assert_eq!(bytes("▁the"), b" the");
    assert_eq!(bytes("</s>"), b"</s>");
    assert_eq!(fallback.token_bytes(999_999), b"");
    let demo = demo();
    assert_eq!(demo.tokenizer().token_bytes(2), b"<|im_end|>");
    assert_eq!(demo.tokenizer().vocab_size(), 1746);
    // Every byte has its token in the byte-level vocabulary.
    let byte_level = tokenizer(byte_level_json());
    assert!((0..=255u8).all(|byte| byte_level.token_bytes(u32::from(byte)) == [byte]));
}

#[test]
fn a_vocabulary_that_holds_the_added_tokens_does_not_make_them_of_text() {
    let unigram = tokenizer(unigram_json());
    let end = unigram.token_to_id("</s>").unwrap();
    let ids = unigram.encode_text("the</s></s>the </s>").unwrap();
    assert!(!ids.contains(&end), "{ids:?}");
    assert_eq!(unigram.decode(&ids, true).unwrap(), "the</s></s>the </s>");
    // The word before and after it is encoded as ever.
    assert_eq!(ids[0], unigram.token_to_id("▁the").unwrap());
}

#[test]
fn the_bos_token_begins_raw_prompts_of_models_that_want_it() {
    let files = files(byte_fallback_json(), json!({"bos_token": {"content": "<s>"}}), None);
    let text = TextPipeline::new(&files).unwrap();
    assert_eq!((text.bos(), text.turn_anchor().to_vec()), (Some(1), vec![1]));
    let alone = text.raw(&RawPrompt { query: "the".into(), ..RawPrompt::default() }).unwrap();
    let the = text.tokenizer().encode_text("the").unwrap();
    assert_eq!(alone.query, [vec![1], the.clone()].concat());
    let segments = vec!["the".to_owned()];
    let behind = text.raw(&RawPrompt { segments, query: "the".into(), ..RawPrompt::default() }).unwrap();
    assert_eq!((behind.segments, behind.query), (vec![vec![1], the.clone()], the));
    assert!(text.chat(&ChatPrompt::new(vec![])).unwrap_err().to_string().contains("chat_template.jinja"));
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let error = TextFiles::from_dir(directory.path()).unwrap_err();
    assert!(error.to_string().contains("tokenizer.json"), "{error}");
    std::fs::write(directory.path().join("tokenizer.json"), b"{}").unwrap();
    let error = TextPipeline::from_dir(directory.path()).unwrap_err();
    assert_eq!(error.kind(), TextErrorKind::File);
    assert!(error.to_string().contains("tokenizer.json"), "{error}");
    std::fs::write(directory.path().join("tokenizer.json"), byte_level_json()).unwrap();
    std::fs::write(directory.path().join("tokenizer_config.json"), b"[").unwrap();
    let error = TextPipeline::from_dir(directory.path()).unwrap_err();
    assert!(error.to_string().contains("tokenizer_config.json"), "{error}");
    std::fs::write(directory.path().join("tokenizer_config.json"), b"{\"chat_template\": \"{% if %}\"}").unwrap();
    let error = TextPipeline::from_dir(directory.path()).unwrap_err();
    assert!(error.to_string().contains("chat template"), "{error}");
}

#[test]
fn the_template_file_wins_and_the_default_of_named_ones_is_taken() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &[u8]| std::fs::write(directory.path().join(name), content).unwrap();
    let source = || TextPipeline::from_dir(directory.path()).unwrap().template().unwrap().source().to_owned();
    write("tokenizer.json", &byte_level_json());
    let named = json!([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]);
    write("tokenizer_config.json", json!({"chat_template": named}).to_string().as_bytes());
    assert_eq!(source(), "d");
    write("chat_template.json", b"{\"chat_template\": \"j\"}");
    assert_eq!(source(), "j");
    write("chat_template.jinja", b"file");
    assert_eq!(source(), "file");
}

#[test]
fn templates_render_as_the_reference_library_does() {
    let render = |template: &str, messages: serde_json::Value| plain(&with_template(template), messages, &Map::new());
    let none = || json!([]);
    // Blocks on lines of their own leave nothing behind.
    assert_eq!(render("a\n  {% if true %}\nb\n  {% endif %}\nc\n", none()), "a\nb\nc");
    assert_eq!(render("{{ true }} {{ none }} {{ missing }}|{{ 1.0 }}", none()), "True None |1.0");
    assert_eq!(render("{{ strftime_now('%d %b %Y') }}", none()), "04 Jul 2026");
    let call = json!([{"z": "<é>&'\"\n", "a": [1, 2.5, null, true], "e": {}, "l": []}]);
    let expected = r#"{"z": "<é>&'\"\n", "a": [1, 2.5, null, true], "e": {}, "l": []}"#;
    assert_eq!(render("{{ messages[0] | tojson }}", call.clone()), expected);
    let indented = "{{ {'b': [1], 'a': {}} | tojson(indent=2) }}";
    assert_eq!(render(indented, none()), "{\n  \"b\": [\n    1\n  ],\n  \"a\": {}\n}");
    let loops = "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 4 %}{% break %}{% endif %}{{ i }}{% endfor %}";
    assert_eq!(render(loops, none()), "0134");
    assert_eq!(render("{%- generation -%} x {%- endgeneration %}{% generation %}y{% endgeneration %}", none()), "xy");
    assert_eq!(render("{{ bos_token + eos_token }}", none()), "<s><|im_end|>");
    let methods = "{{ ' a-b '.strip().upper().split('-')[::-1] | join('+') }}{% for k, v in {'x': 1}.items() %}{{ k }}{{ v }}{% endfor %}";
    assert_eq!(render(methods, none()), "B+Ax1");
    assert_eq!(render("{% if tools %}t{% else %}-{% endif %}{{ '<b>' }}", none()), "-<b>");
    let macros =
        "{%- macro show(x, n=1) -%}{{ x * n }}{%- endmacro -%}{{ show('ab', n=2) }}{{ messages[1:] | length }}";
    assert_eq!(render(macros, json!([{}, {}])), "abab1");
}

#[test]
fn contents_may_be_null_and_fields_reach_the_template() {
    let text = with_template(
        "{% for m in messages %}{{ m.role }}:{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}",
    );
    let mut message = Message { role: "assistant".into(), content: None, extra: Map::new() };
    message.extra.insert("tool_calls".into(), json!([{"function": {"name": "f", "arguments": {"q": "é"}}}]));
    let prompt = ChatPrompt::new(vec![message, Message::text("tool", "4")]);
    assert_eq!(joined(&text, &prompt), "assistant:{\"q\": \"é\"};tool:4;");
}

#[test]
fn added_tokens_of_normalized_text_are_cut_where_the_template_writes_them() {
    let mut json: serde_json::Value = serde_json::from_slice(&byte_level_json()).unwrap();
    json["normalizer"] = json!({"type": "Lowercase"});
    let tokens = json["added_tokens"].as_array_mut().unwrap();
    let id = tokens.last().unwrap()["id"].as_u64().unwrap() + 1;
    tokens.push(json!({"id": id, "content": "[DAY]", "single_word": false, "lstrip": false, "rstrip": true,
        "normalized": true, "special": false}));
    let template = "[Day]  {{ messages[0].content }}[DAY]";
    let files = files(serde_json::to_vec(&json).unwrap(), json!({}), Some(template));
    let text = TextPipeline::new(&files).unwrap();
    let count = |content: &str| {
        let ids = text.chat(&ChatPrompt::new(vec![Message::text("user", content)])).unwrap().query;
        ids.iter().filter(|known| u64::from(**known) == id).count()
    };
    assert_eq!(count("x"), 2);
    assert_eq!(count("[day] [DAY] [dAy] [da"), 2, "the template's own");
}

#[test]
fn many_roles_and_hostile_text_take_no_time() {
    let text = with_template(THINKING);
    let begin = std::time::Instant::now();
    let messages = (0..300).map(|index| Message::parts(format!("r{index}"), vec![]));
    text.segment_chat(&ChatPrompt::new(messages.collect())).unwrap();
    let hostile = "<|im_end|><think></think>".repeat(2000);
    text.chat(&ChatPrompt::new(vec![Message::text("user", hostile.clone()), Message::text("assistant", hostile)]))
        .unwrap();
    let unigram = tokenizer(unigram_json());
    unigram.encode_text(&"a</s>".repeat(5000)).unwrap();
    assert!(begin.elapsed().as_secs() < 20, "{:?}", begin.elapsed());
}
