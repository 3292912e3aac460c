//! What a client asks. Only kept here: what cannot be is refused where a request is taken in.

use std::time::Duration;

use hypic_state::ComposeRule;

/// One prompt to answer, `n` times.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt.
    pub prompt: Prompt,
    /// How the prompt is prefilled.
    pub options: PromptOptions,
    /// How tokens are chosen; unset fields take the model's defaults.
    pub sampling: Sampling,
    /// Number of answers.
    pub n: u32,
    /// Tokens an answer may have at most; `None`: as many as the context has room for.
    pub max_tokens: Option<u32>,
    /// An answer ends before the first of these texts.
    pub stop: Vec<String>,
    /// Whether an end token ends an answer.
    pub stop_at_eos: bool,
    /// Report this many most likely tokens for every generated one.
    pub logprobs: Option<u32>,
    /// The request fails when its answer is not complete by then.
    pub deadline: Option<Duration>,
    /// Whose request it is, as the front found out; nothing that a client says sets it. Tenants share no cached work.
    pub tenant: Option<String>,
}

/// What a prompt consists of.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// Chat messages, to be rendered through the model's chat template.
    Chat(Vec<Message>),
    /// Text without a template: segments, then the query.
    Raw {
        /// The segments, in order.
        segments: Vec<String>,
        /// The query.
        query: String,
    },
    /// Token ids.
    Tokens {
        /// The segments, in order.
        segments: Vec<Vec<u32>>,
        /// The query.
        query: Vec<u32>,
        /// The anchor of every segment but the first; `None`: the one that the options name.
        anchor: Option<Vec<u32>>,
    },
}

/// A chat message.
#[derive(Clone, Debug)]
pub struct Message {
    /// `system`, `user`, `assistant`, ...
    pub role: String,
    /// Its text, in parts.
    pub content: Vec<Part>,
    /// Whether the client sent a list of parts rather than a string.
    pub parts: bool,
}

/// A stretch of a message's text.
#[derive(Clone, Debug)]
pub struct Part {
    /// The text.
    pub text: String,
    /// Whether it is a segment of its own.
    pub segment: bool,
}

/// How a prompt is split and prefilled.
#[derive(Clone, Debug, Default)]
pub struct PromptOptions {
    /// How cached work is used; `None`: the server's default.
    pub mode: Option<Mode>,
    /// Rule of composition; `None`: the model's default.
    pub compose: Option<ComposeRule>,
    /// Width of the seam; `None`: the server's default.
    pub seam: Option<u32>,
    /// Which anchor; `None`: the server's default.
    pub anchor: Option<Anchor>,
    /// Narrows sharing of cached entries to the tenant's requests with the same salt.
    pub salt: Option<String>,
    /// Split text at this separator.
    pub separator: Option<String>,
    /// Read added tokens in the user's text as such instead of as ordinary text.
    pub special_tokens: bool,
}

/// How cached work is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Ordinary forward of the whole prompt; nothing is reused.
    Full,
    /// Exact reuse of a prefix only.
    Prefix,
    /// Cached segments composed at any position.
    #[default]
    Hypic,
}

/// What stands before a segment in its isolated prefill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Anchor {
    /// Nothing.
    None,
    /// What the chat template puts before a user's content.
    #[default]
    Turn,
    /// The prompt's first piece.
    System,
}

macro_rules! named {
    ($type:ty, $what:literal, $($name:literal => $value:expr),+) => {
        impl std::str::FromStr for $type {
            type Err = String;
            fn from_str(s: &str) -> Result<Self, String> {
                match s {
                    $($name => Ok($value),)+
                    _ => Err(format!(concat!("unknown ", $what, " '{}': use one of {}"), s, [$($name),+].join(", "))),
                }
            }
        }
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                $(if *self == $value { return f.write_str($name); })+
                unreachable!("every value has a name")
            }
        }
    };
}
named!(Mode, "mode", "full" => Mode::Full, "prefix" => Mode::Prefix, "hypic" => Mode::Hypic);
named!(Anchor, "anchor", "none" => Anchor::None, "turn" => Anchor::Turn, "system" => Anchor::System);

/// How tokens are chosen. Unset fields take the model's `generation_config.json`, else OpenAI's defaults.
#[derive(Clone, Debug, Default)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: Option<u32>,
    /// Keep the most likely tokens up to this mass.
    pub top_p: Option<f32>,
    /// Keep tokens at least this likely relative to the likeliest.
    pub min_p: Option<f32>,
    /// Subtracted from logits of tokens that the answer has.
    pub presence_penalty: Option<f32>,
    /// Subtracted per occurrence in the answer.
    pub frequency_penalty: Option<f32>,
    /// Divides (multiplies, if negative) logits of tokens in prompt or answer.
    pub repetition_penalty: Option<f32>,
    /// Added to the logits of given tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Same seed, same answer; `None`: drawn at random.
    pub seed: Option<u64>,
}
