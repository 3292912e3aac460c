//! Small tokenizers and templates, and the demo model's files.
#![allow(dead_code)]

use std::borrow::Cow;
use std::path::PathBuf;

use hypic_text::{ChatPrompt, TextFiles, TextPipeline};
use serde_json::{Map, Value, json};

pub fn demo() -> TextPipeline {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/models/demo");
    TextPipeline::from_dir(&directory).unwrap()
}

fn added(id: usize, content: &str, special: bool) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": special})
}

/// The characters that stand for bytes in byte-level BPE, by byte.
pub fn byte_characters() -> Vec<char> {
    let itself = |byte: u32| (0x21..=0x7E).contains(&byte) || (0xA1..=0xAC).contains(&byte) || byte >= 0xAE;
    let mut next = 0x100;
    (0..256u32)
        .map(|byte| {
            let code = if itself(byte) { byte } else { next };
            next += u32::from(!itself(byte));
            char::from_u32(code).unwrap()
        })
        .collect()
}

pub const SPECIAL: [&str; 6] = ["<s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|x|>"];
pub const PLAIN: [&str; 4] = ["<think>", "</think>", "<tool_response>", "</tool_response>"];

/// Byte-level BPE without regular expression: any neighbours could merge. Ids: bytes, then merges, then added tokens.
pub fn byte_level_json() -> Vec<u8> {
    let characters = byte_characters();
    let mut vocabulary = Map::new();
    for (id, character) in characters.iter().enumerate() {
        vocabulary.insert(character.to_string(), json!(id));
    }
    let newline = characters[usize::from(b'\n')];
    let merges =
        [format!("{newline} {newline}"), "e r".to_owned(), "< |".to_owned(), "| >".to_owned(), "t h".to_owned()];
    for merge in &merges {
        let id = vocabulary.len();
        vocabulary.insert(merge.replace(' ', ""), json!(id));
    }
    let mut tokens = Vec::new();
    for (special, contents) in [(true, &SPECIAL[..]), (false, &PLAIN[..])] {
        for content in contents {
            tokens.push(added(vocabulary.len() + tokens.len(), content, special));
        }
    }
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": tokens, "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": merges}
    });
    serde_json::to_vec(&tokenizer).unwrap()
}

/// Sentencepiece-like BPE with byte fallback, and a post-processor that adds BOS.
pub fn byte_fallback_json() -> Vec<u8> {
    let mut vocabulary = Map::new();
    for token in ["<unk>", "<s>", "</s>"] {
        vocabulary.insert(token.to_owned(), json!(vocabulary.len()));
    }
    for byte in 0..256 {
        vocabulary.insert(format!("<0x{byte:02X}>"), json!(vocabulary.len()));
    }
    for character in "▁abcdefghijklmnopqrstuvwxyz.,</>".chars() {
        vocabulary.insert(character.to_string(), json!(vocabulary.len()));
    }
    let merges = ["t h", "th e", "▁ the", "▁ a", "▁ ▁", "< /", "</ s", "</s >"];
    for merge in merges {
        let id = vocabulary.len();
        vocabulary.entry(merge.replace(' ', "")).or_insert(json!(id));
    }
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(0, "<unk>", true), added(1, "<s>", true), added(2, "</s>", true)],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocabulary, "merges": merges}
    });
    serde_json::to_vec(&tokenizer).unwrap()
}

/// Unigram whose vocabulary holds the end token with the best score of all.
pub fn unigram_json() -> Vec<u8> {
    let mut vocabulary = vec![json!(["<unk>", 0.0]), json!(["</s>", 0.0])];
    for character in "▁abcdefghijklmnopqrstuvwxyz</>".chars() {
        vocabulary.push(json!([character.to_string(), -5.0]));
    }
    vocabulary.push(json!(["▁the", -3.0]));
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(0, "<unk>", true), added(1, "</s>", true)],
        "normalizer": null,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false},
        "post_processor": null,
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false},
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": false, "vocab": vocabulary}
    });
    serde_json::to_vec(&tokenizer).unwrap()
}

pub fn files(tokenizer: Vec<u8>, config: Value, template: Option<&str>) -> TextFiles {
    TextFiles {
        origin: "test-model".to_owned(),
        tokenizer_json: Cow::Owned(tokenizer),
        tokenizer_config: Some(Cow::Owned(serde_json::to_vec(&config).unwrap())),
        chat_template: template.map(|text| Cow::Owned(text.to_owned())),
    }
}

/// The byte-level tokenizer behind a template.
pub fn with_template(template: &str) -> TextPipeline {
    let config = json!({"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>", "add_bos_token": false});
    TextPipeline::new(&files(byte_level_json(), config, Some(template))).unwrap()
}

/// All text of a prompt, the pieces put together.
pub fn joined(text: &TextPipeline, prompt: &ChatPrompt) -> String {
    let segmented = text.segment_chat(prompt).unwrap();
    segmented.segments.iter().chain([&segmented.query]).map(|piece| piece.text.as_str()).collect()
}

/// A plain rendering of messages given as JSON.
pub fn plain(text: &TextPipeline, messages: Value, variables: &Map<String, Value>) -> String {
    let now = chrono::NaiveDate::from_ymd_opt(2026, 7, 4).unwrap().and_hms_opt(12, 0, 0).unwrap();
    let input = hypic_text::RenderInput { messages: &messages, add_generation_prompt: true, variables, now };
    text.template().unwrap().render(input).unwrap()
}

/// A small deterministic generator.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % bound
    }

    pub fn text(&mut self, alphabet: &[&str], longest: usize) -> String {
        let length = self.below(longest + 1);
        (0..length).map(|_| alphabet[self.below(alphabet.len())]).collect()
    }
}

/// Chat markup around trimmed contents; strings or lists.
pub const TRIMMING: &str = "{%- for m in messages %}
    {%- if m.content is string %}
        {%- set body = m.content | trim %}
    {%- else %}
        {%- set ns = namespace(body='') %}
        {%- for part in m.content %}
            {%- if part.type == 'text' %}{%- set ns.body = ns.body + part.text %}{%- endif %}
        {%- endfor %}
        {%- set body = ns.body.strip() %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\n' + body + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Only concatenates strings; writes BOS.
pub const STRINGS_ONLY: &str = "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}";

/// Prints whatever a content is.
pub const PRINTING: &str = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] ";

/// Knows lists of parts only.
pub const PARTS_ONLY: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Wants user and assistant to alternate.
pub const ORDERED: &str = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant/...') }}{% endif %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}";

/// Drops the thinking of earlier answers, looks for tool answers in user messages.
pub const THINKING: &str = "{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set body = m.content %}
        {%- set thoughts = '' %}
        {%- if '</think>' in body %}
            {%- set thoughts = body.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set body = body.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last %}{{- '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' }}{%- endif %}
        {{- body + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}";
