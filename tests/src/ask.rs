//! Asking a router as a client does, and judging what it answers.

use hypic_router::{
    Answer, Engine, Error, Event, FinishReason, Message, Mode, Part, Prompt, PromptOptions, Report, Request, Sampling,
    SegmentSource, TokenLogprobs,
};
use serde_json::Value;

/// Logits that are nearer than this are a tie as far as float32 can tell: sums in another order may break it otherwise.
const TIE: f32 = 2e-3;

/// One answer, whole.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    /// Its text; empty without a tokenizer.
    pub text: String,
    /// Its token ids.
    pub token_ids: Vec<u32>,
    /// Per token, if asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// Why it ended.
    pub finish: Option<FinishReason>,
}

/// All answers to a request, and what they cost.
#[derive(Clone, Debug)]
pub struct Complete {
    /// By index.
    pub choices: Vec<Choice>,
    /// What was told at the end.
    pub report: Report,
}

impl Complete {
    /// The only answer's token ids.
    pub fn ids(&self) -> &[u32] {
        assert_eq!(self.choices.len(), 1, "one answer was asked for");
        &self.choices[0].token_ids
    }
}

/// A greedy request with the demo model's way to put a prompt: a system text, documents as segments, a question.
pub fn documents(system: &str, documents: &[String], question: &str) -> Request {
    let part = |text: &str, segment| Part { text: text.to_string(), segment };
    let mut content: Vec<Part> = documents.iter().map(|d| part(d, true)).collect();
    content.push(part(question, false));
    let user = Message { role: "user".to_string(), content, parts: true };
    let mut request = conversation(&[("system", system)]);
    if let Prompt::Chat(messages) = &mut request.prompt {
        messages.push(user);
    }
    request
}

/// A greedy request of plain messages, (role, text).
pub fn conversation(messages: &[(&str, &str)]) -> Request {
    let message = |&(role, text): &(&str, &str)| Message {
        role: role.to_string(),
        content: vec![Part { text: text.to_string(), segment: false }],
        parts: false,
    };
    greedy(Prompt::Chat(messages.iter().map(message).collect()), true)
}

/// A greedy request of token ids; end tokens do not end the answer.
pub fn tokens(segments: Vec<Vec<u32>>, query: Vec<u32>, anchor: Vec<u32>) -> Request {
    let anchor = Some(anchor);
    greedy(Prompt::Tokens { segments, query, anchor }, false)
}

fn greedy(prompt: Prompt, stop_at_eos: bool) -> Request {
    Request {
        prompt,
        options: PromptOptions::default(),
        sampling: Sampling { temperature: Some(0.0), ..Sampling::default() },
        n: 1,
        max_tokens: Some(24),
        stop: Vec::new(),
        stop_at_eos,
        logprobs: Some(2),
        deadline: None,
        tenant: None,
    }
}

/// The same request in another mode.
pub fn in_mode(mut request: Request, mode: Mode) -> Request {
    request.options.mode = Some(mode);
    request
}

/// Ask, and wait for the end.
///
/// # Errors
/// The failure, whenever it came.
pub async fn ask(engine: &impl Engine, request: Request) -> Result<Complete, Error> {
    let n = request.n as usize;
    finish(engine.generate(request).await?, n).await
}

/// Wait for the end of `answer`, which has `n` choices.
///
/// # Errors
/// If it failed.
pub async fn finish(mut answer: Answer, n: usize) -> Result<Complete, Error> {
    let mut choices = vec![Choice::default(); n];
    let report = loop {
        match answer.events.recv().await.expect("the last event is a report or a failure") {
            Event::Delta(delta) => {
                let choice = &mut choices[delta.choice as usize];
                assert!(choice.finish.is_none(), "nothing follows the end of a choice");
                choice.text.extend(delta.text);
                choice.token_ids.extend(delta.token_ids);
                choice.logprobs.extend(delta.logprobs);
            }
            Event::Finished { choice, reason } => {
                let before = choices[choice as usize].finish.replace(reason);
                assert!(before.is_none(), "a choice ends once");
            }
            Event::Report(report) => break report,
            Event::Failed(error) => return Err(error),
        }
    };
    assert!(choices.iter().all(|c| c.finish.is_some()), "every choice has ended before the report");
    check_report(&report);
    let generated: usize = choices.iter().map(|c| c.token_ids.len()).sum();
    assert_eq!(report.usage.completion_tokens, generated as u64);
    Ok(Complete { choices, report })
}

/// What holds for every report: each token of the prompt counts once.
fn check_report(report: &Report) {
    let u = &report.usage;
    assert_eq!(u.exact_tokens + u.composed_tokens + u.seam_tokens + u.computed_tokens, u.prompt_tokens, "{report:?}");
    let segments: u64 = report.segments.iter().map(|s| s.tokens).sum();
    assert!(segments < u.prompt_tokens, "a query stands behind the segments: {report:?}");
    let reused: u64 = report.segments.iter().map(|s| s.reused).sum();
    assert!(reused <= u.exact_tokens + u.composed_tokens, "{report:?}");
    for s in &report.segments {
        assert!(s.reused <= s.tokens, "{s:?}");
        let somebody = s.source != SegmentSource::SeamOnly;
        assert_eq!(s.worker.is_some(), somebody, "who had the body, if there is one: {s:?}");
        assert!(s.source != SegmentSource::Prefix || s.reused == s.tokens, "a prefix state covers it whole: {s:?}");
        assert!(s.source != SegmentSource::SeamOnly || s.reused == 0, "{s:?}");
    }
    let t = &report.timings_ms;
    for (name, ms) in [("queue", t.queue), ("prefill", t.prefill), ("compose", t.compose)] {
        assert!(ms >= 0.0 && ms <= t.total, "{name}: {t:?}");
    }
    assert!(t.first_token <= t.total, "{t:?}");
}

/// Fails unless `got` is the greedy answer `want`, which has the two likeliest tokens with it. They may part at a tie;
/// true if they did not.
pub fn same_answer(what: &str, got: &[u32], want: &Choice) -> bool {
    let parting = got.iter().zip(&want.token_ids).position(|(a, b)| a != b);
    let Some(at) = parting else {
        assert_eq!(got.len(), want.token_ids.len(), "{what}: {got:?} instead of {:?}", want.token_ids);
        return true;
    };
    let top = &want.logprobs[at].top;
    let gap = top[0].logprob - top[1].logprob;
    assert!(gap < TIE, "{what}: {got:?} instead of {:?}, at token {at} by {gap}", want.token_ids);
    false
}

/// A prompt with known answers.
#[derive(Clone, Debug)]
pub struct Example {
    /// Its name.
    pub id: String,
    /// The system text.
    pub system: String,
    /// The documents.
    pub documents: Vec<String>,
    /// The question.
    pub question: String,
    /// An answer is right if it contains one of these.
    pub answers: Vec<String>,
}

impl Example {
    /// As a request.
    pub fn request(&self) -> Request {
        documents(&self.system, &self.documents, &self.question)
    }

    /// Whether `text` is a right answer.
    pub fn is_right(&self, text: &str) -> bool {
        self.answers.iter().any(|a| text.contains(a.as_str()))
    }
}

/// The demo model's held-out prompts.
pub fn examples() -> Vec<Example> {
    let path = crate::path("models/demo/eval.jsonl");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let example = |line: &str| {
        let value: Value = serde_json::from_str(line).expect("a line of JSON");
        let string = |key: &str| value[key].as_str().expect("a string").to_string();
        let strings = |key: &str| {
            let list = value[key].as_array().expect("a list").iter();
            list.map(|s| s.as_str().expect("a string").to_string()).collect()
        };
        Example {
            id: string("id"),
            system: string("system"),
            documents: strings("documents"),
            question: string("question"),
            answers: strings("answers"),
        }
    };
    text.lines().map(example).collect()
}

/// The examples whose name begins with `kind`.
pub fn examples_of(kind: &str) -> Vec<Example> {
    let mut examples = examples();
    examples.retain(|e| e.id.starts_with(kind));
    assert!(!examples.is_empty(), "no example of kind {kind}");
    examples
}
