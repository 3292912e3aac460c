//! The router: turns a request into token ids, a plan and jobs, and what comes back into text.

mod shared;

use std::sync::Arc;
use std::time::Instant;

use hypic_telemetry::{BreakerState, Observation, Stage, metrics, names};
use hypic_text::{ChatPrompt, RawPrompt, TextError, TextErrorKind, TextPipeline, TokenMemo, Tokenized};
use hypic_transport::SamplingParams;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, Span};

use crate::answer::{Ask, Running, TextSide};
use crate::api::{
    Anchor, Answer, Engine, Error, ErrorKind, Message, Mode, ModelCard, Progress, Prompt, Request, Sampling,
};
use crate::fleet::Fleet;
use crate::plan::{Avoid, PlanTimes, Planner, PromptTokens, Settings};
use crate::validate::{sampling_error, validate};
pub(crate) use shared::Core;
pub use shared::{RouterConfig, Served};

/// Answers requests by planning them over scatter workers and combiners.
pub struct Router {
    core: Arc<Core>,
    served: Served,
    text: Option<Arc<TextPipeline>>,
    memo: Arc<TokenMemo>,
    _observed: Vec<Observation>,
}

impl Router {
    /// A router for `served` over `fleet`; without `text` it takes token ids only.
    pub fn new(config: RouterConfig, served: Served, text: Option<Arc<TextPipeline>>, fleet: Arc<Fleet>) -> Self {
        let memo = Arc::new(TokenMemo::new(config.memo_bytes));
        let core = Arc::new(Core::new(config, served.space, fleet));
        let observed = BreakerState::ALL.iter().map(|&state| {
            let core = core.clone();
            hypic_telemetry::observe(&names::BREAKERS, &[state.into()], move || core.breakers_in(state))
        });
        let of = |metric, read: fn(&Core) -> u64| {
            let core = core.clone();
            hypic_telemetry::observe(metric, &[], move || read(&core))
        };
        let open = [
            of(&names::PLANS_OPEN, |core| core.fleet.all_plans() as u64),
            of(&names::DIRECTORY_ENTRIES, |core| core.fleet.index().entries() as u64),
            of(&names::JOBS_OUT, |core| core.jobs_out.count()),
            of(&names::BACKLOG, |core| core.fleet.balancer().whole_backlog().as_nanos().div_ceil(1_000_000) as u64),
        ];
        Router { _observed: observed.chain(open).collect(), core, served, text, memo }
    }

    /// The model that is served.
    pub fn served(&self) -> &Served {
        &self.served
    }

    /// Plan a request of token ids, behind no tenant, as it would be now, and hand nothing out: for measuring how long
    /// that takes.
    ///
    /// # Errors
    /// If its prompt is not of token ids, or not one that can be answered, or there is no combiner.
    pub fn rehearse(&self, request: &Request) -> Result<PlanTimes, Error> {
        let prompt = self.given(&request.prompt);
        let prompt = prompt.ok_or_else(|| Error::invalid("prompt", "only token ids are planned without an answer"))?;
        self.check(request, &prompt)?;
        let settings = self.settings(request, &prompt, Arc::new([]), None);
        let planner = Planner { core: &self.core };
        let planned = planner.plan(&settings, &prompt.tokens, &Avoid::default(), &CancellationToken::new());
        let planned = planned.ok_or_else(|| Error::new(ErrorKind::Unavailable, "no combiner is there"))?;
        Ok(planned.times)
    }

    /// A prompt that comes as token ids.
    fn given(&self, prompt: &Prompt) -> Option<PromptTokens> {
        let Prompt::Tokens { segments, query, anchor } = prompt else { return None };
        let tokens = Tokenized { segments: segments.clone(), query: query.clone(), message_ends: Vec::new() };
        let turn = self.text.as_ref().map(|text| text.raw_turn_anchor()).unwrap_or_default();
        Some(PromptTokens { tokens: without_empty(tokens), turn, anchor: anchor.clone() })
    }

    async fn tokenize(&self, request: &Request, salt: &Arc<[u8]>) -> Result<PromptTokens, Error> {
        if let Some(given) = self.given(&request.prompt) {
            return Ok(given);
        }
        let Some(text) = self.text.clone() else {
            let message =
                "this model has no tokenizer: send token ids, or serve a model directory with a tokenizer.json";
            return Err(Error::invalid("prompt", message));
        };
        let (prompt, options) = (request.prompt.clone(), request.options.clone());
        // A prompt of 100k tokens takes a while to encode.
        // What is remembered is shared as widely as entries are: its time could tell of another tenant's texts.
        let (memo, scope) = (self.memo.clone(), salt.clone());
        let encode = move || {
            let (separator, special_tokens) = (options.separator, options.special_tokens);
            let (segmented, turn) = match prompt {
                Prompt::Chat(messages) => {
                    let mut chat = ChatPrompt::new(messages.into_iter().map(text_message).collect());
                    (chat.separator, chat.special_tokens) = (separator, special_tokens);
                    (text.segment_chat(&chat)?, text.turn_anchor().to_vec())
                }
                Prompt::Raw { segments, query } => {
                    let raw = RawPrompt { segments, query, separator, special_tokens };
                    (text.segment_raw(&raw)?, text.raw_turn_anchor())
                }
                Prompt::Tokens { .. } => unreachable!("token ids need no encoding"),
            };
            let tokens = text.tokenize_with(&segmented, &memo, &scope)?;
            Ok(PromptTokens { tokens, turn, anchor: None })
        };
        let encoded = tokio::task::spawn_blocking(encode).await;
        encoded.map_err(|e| Error::new(ErrorKind::Internal, format!("tokenizing failed: {e}")))?.map_err(text_error)
    }

    fn check(&self, request: &Request, prompt: &PromptTokens) -> Result<usize, Error> {
        let Tokenized { segments, query, .. } = &prompt.tokens;
        if query.is_empty() {
            let message = "the query has no tokens: something must stand behind the last segment";
            return Err(Error::invalid("query", message));
        }
        let all = segments.iter().flatten().chain(query).chain(prompt.anchor.iter().flatten());
        let vocab = self.served.vocab;
        if let Some(id) = all.copied().find(|&id| id as usize >= vocab) {
            let message = format!("token id {id} is not in the vocabulary: ids are below {vocab}");
            return Err(Error::invalid("prompt", message));
        }
        let tokens = segments.iter().map(Vec::len).sum::<usize>() + query.len();
        let context = self.served.card.context as usize;
        let room = context.saturating_sub(tokens);
        let wanted = request.max_tokens.map_or(1, |n| n as usize);
        if wanted > room {
            let (param, what) = match room {
                0 => ("prompt", format!("the prompt has {tokens} tokens")),
                _ => ("max_tokens", format!("the prompt has {tokens} tokens and {wanted} more are asked for")),
            };
            return Err(Error::invalid(param, format!("{what}: the model's context is {context} tokens")));
        }
        let mode = request.options.mode.unwrap_or_default();
        if let Some(limit) = self.served.reusable.filter(|&limit| tokens > limit && mode != Mode::Full) {
            let message = format!(
                "the prompt has {tokens} tokens, and this model's rope scaling is dynamic: beyond {limit} tokens its rotary \
                 embeddings depend on the prompt's length, so mode {mode} has nothing to reuse: use mode full"
            );
            return Err(Error::invalid("mode", message));
        }
        Ok(request.max_tokens.map_or(room, |n| n as usize))
    }

    fn choices(&self, request: &Request) -> Result<Vec<SamplingParams>, Error> {
        let mut params = sampling_params(&request.sampling, &self.served.sampling);
        params.seed = request.sampling.seed.unwrap_or_else(rand::random);
        params.logprobs = request.logprobs.map(|n| n as usize);
        let checked = params.validate().and_then(|()| params.validate_vocabulary(self.served.vocab));
        checked.map_err(sampling_error)?;
        Ok((0..request.n).map(|choice| SamplingParams { choice, ..params.clone() }).collect())
    }

    fn settings(
        &self,
        request: &Request,
        prompt: &PromptTokens,
        salt: Arc<[u8]>,
        deadline: Option<Instant>,
    ) -> Settings {
        let options = &request.options;
        let anchor = match (&prompt.anchor, options.anchor.unwrap_or(self.core.config.anchor)) {
            (Some(ids), _) => ids.clone(),
            (None, Anchor::None) => Vec::new(),
            (None, Anchor::Turn) => prompt.turn.clone(),
            (None, Anchor::System) => prompt.tokens.segments.first().cloned().unwrap_or_default(),
        };
        Settings {
            request: format!("{:032x}", rand::random::<u128>()).into(),
            mode: options.mode.unwrap_or_default(),
            rule: options.compose.unwrap_or(self.served.compose),
            seam: options.seam.map_or(self.core.config.seam, |w| w as usize),
            anchor: anchor.into(),
            salt,
            deadline,
        }
    }
}

impl Engine for Router {
    async fn generate(&self, request: Request) -> Result<Answer, Error> {
        let arrived = Instant::now();
        validate(&request)?;
        let stops = hypic_text::StopMatcher::new(request.stop.clone()).map_err(text_error)?;
        let salt: Arc<[u8]> = salt(request.tenant.as_deref(), request.options.salt.as_deref()).into();
        let before = Instant::now();
        let prompt = self.tokenize(&request, &salt).await?;
        metrics().stage(Stage::Tokenize, before.elapsed());
        let max_tokens = self.check(&request, &prompt)?;
        let choices = self.choices(&request)?;
        let deadline = request.deadline.and_then(|d| arrived.checked_add(d));
        let settings = self.settings(&request, &prompt, salt, deadline);
        let span = Span::current();
        span.record(names::ATTRIBUTE_REQUEST, &*settings.request);
        span.record(names::ATTRIBUTE_MODE, tracing::field::display(settings.mode));
        let tokens = prompt.tokens;
        let penalized = choices.iter().any(|c| c.repetition_penalty != 1.0);
        let prompt_ids = if penalized {
            tokens.segments.iter().flatten().chain(&tokens.query).copied().collect()
        } else {
            Vec::new()
        };
        let eos = if request.stop_at_eos { self.served.eos.clone() } else { Arc::new([]) };
        let ask = Ask { settings, tokens, prompt_ids, choices, eos, max_tokens, arrived };

        let (events, receiver) = mpsc::channel(self.core.config.event_buffer);
        let text = TextSide::new(self.text.as_ref(), &stops, request.n as usize);
        let progress = Progress::default();
        let running = Running::start(self.core.clone(), ask, text, progress.clone())?;
        tokio::spawn(running.drive(events).instrument(span));
        Ok(Answer { events: receiver, progress })
    }

    fn model(&self) -> &ModelCard {
        &self.served.card
    }

    fn ready(&self) -> bool {
        // Workers are not needed: combiners can do all the work.
        self.core.fleet.view().combiners.iter().any(|combiner| combiner.is_running())
    }
}

/// What a request's keys are salted with: a request can narrow sharing, but never leave its tenant. Empty if there is
/// neither a tenant nor a salt of the request's.
fn salt(tenant: Option<&str>, own: Option<&str>) -> Vec<u8> {
    if tenant.is_none() && own.is_none() {
        return Vec::new();
    }
    let mut hasher = blake3::Hasher::new_derive_key("hypic salt v1");
    for field in [tenant, own] {
        // Absent and empty differ, and no two pairs give the same bytes.
        hasher.update(&[u8::from(field.is_some())]);
        let field = field.unwrap_or_default();
        hasher.update(&(field.len() as u64).to_le_bytes());
        hasher.update(field.as_bytes());
    }
    hasher.finalize().as_bytes().to_vec()
}

/// The sampler's settings: the request's, else the model's, else OpenAI's.
pub(crate) fn sampling_params(asked: &Sampling, model: &Sampling) -> SamplingParams {
    let d = SamplingParams::default();
    SamplingParams {
        temperature: asked.temperature.or(model.temperature).unwrap_or(d.temperature),
        top_k: asked.top_k.or(model.top_k).unwrap_or(d.top_k),
        top_p: asked.top_p.or(model.top_p).unwrap_or(d.top_p),
        min_p: asked.min_p.or(model.min_p).unwrap_or(d.min_p),
        presence_penalty: asked.presence_penalty.or(model.presence_penalty).unwrap_or(d.presence_penalty),
        frequency_penalty: asked.frequency_penalty.or(model.frequency_penalty).unwrap_or(d.frequency_penalty),
        repetition_penalty: asked.repetition_penalty.or(model.repetition_penalty).unwrap_or(d.repetition_penalty),
        logit_bias: asked.logit_bias.clone(),
        ..d
    }
}

/// A segment of no tokens is no segment.
fn without_empty(mut tokens: Tokenized) -> Tokenized {
    tokens.segments.retain(|s| !s.is_empty());
    tokens
}

fn text_message(message: Message) -> hypic_text::Message {
    let part = |p: crate::api::Part| hypic_text::Part { text: p.text, segment: p.segment };
    if message.parts {
        return hypic_text::Message::parts(message.role, message.content.into_iter().map(part).collect());
    }
    let text: String = message.content.into_iter().map(|p| p.text).collect();
    hypic_text::Message::text(message.role, text)
}

pub(crate) fn text_error(e: TextError) -> Error {
    let param = match e.kind() {
        TextErrorKind::Request => "query",
        TextErrorKind::Template => "messages",
        TextErrorKind::File | TextErrorKind::Tokenizer => return Error::new(ErrorKind::Internal, e.to_string()),
    };
    Error::invalid(param, e.to_string())
}

impl Mode {
    /// The number that tells the modes' prefix states apart; `None` if it keeps none.
    pub(crate) fn prefix_tag(self) -> Option<u8> {
        match self {
            Mode::Full => None,
            Mode::Prefix => Some(1),
            Mode::Hypic => Some(2),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_and_salts_share_nothing() {
        let pairs = [
            (None, None),
            (None, Some("")),
            (Some(""), None),
            (Some(""), Some("")),
            (Some("a"), None),
            (None, Some("a")),
            (Some("a"), Some("b")),
            (Some("b"), Some("a")),
            (Some("ab"), Some("")),
            (Some("ab"), None),
        ];
        let salts: Vec<Vec<u8>> = pairs.iter().map(|&(tenant, own)| salt(tenant, own)).collect();
        for (i, one) in salts.iter().enumerate() {
            assert_eq!(one.len(), if i == 0 { 0 } else { 32 });
            assert!(salts[..i].iter().all(|other| other != one), "{:?}", pairs[i]);
        }
        assert_eq!(salt(Some("a"), Some("b")), salt(Some("a"), Some("b")));
    }
}
