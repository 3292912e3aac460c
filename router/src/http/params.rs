//! What a request's body says, apart from its prompt: which fields are understood, which are refused
//! by name because ignoring them would change the answer, and which are let pass because it would
//! not. Fields inside `hypic` are ours alone, so unknown ones are typing errors and refused.

use axum::http::StatusCode;
use serde_json::{Map, Value};

use super::Shape;
use super::error::Failure;
use super::fields::{Fields, convert};
use super::prompt;
use crate::api::{Error, ErrorKind, PromptOptions, Request, Sampling};
use crate::validate::MAX_LOGPROBS;

/// OpenAI's default length of an answer to `/v1/completions`.
const COMPLETION_TOKENS: u32 = 16;

/// Fields that would change the answer if they were ignored, with the values (as JSON) that ask for nothing. `null`,
/// `false`, and empty text, lists and objects always do.
const REFUSED: &[(&str, &[&str])] = &[
    ("tools", &[]),
    ("tool_choice", &["\"none\"", "\"auto\""]),
    ("functions", &[]),
    ("function_call", &["\"none\"", "\"auto\""]),
    ("response_format", &["{\"type\":\"text\"}"]),
    ("audio", &[]),
    ("modalities", &["[\"text\"]"]),
    ("prediction", &[]),
    ("web_search_options", &[]),
    ("reasoning_effort", &["\"none\""]),
    ("verbosity", &["\"medium\""]),
    ("echo", &[]),
    ("suffix", &[]),
    ("use_beam_search", &[]),
    ("length_penalty", &["1"]),
    ("typical_p", &["1"]),
    ("min_tokens", &["0"]),
    ("stop_token_ids", &[]),
    ("bad_words", &[]),
    ("prompt_logprobs", &[]),
    ("truncate_prompt_tokens", &[]),
    ("continue_final_message", &[]),
    ("add_generation_prompt", &["true"]),
    ("chat_template", &[]),
    ("chat_template_kwargs", &[]),
    ("documents", &[]),
    ("structured_outputs", &[]),
    ("guided_json", &[]),
    ("guided_regex", &[]),
    ("guided_choice", &[]),
    ("guided_grammar", &[]),
    ("grammar", &[]),
    ("json_schema", &[]),
];

/// A request as it came over HTTP.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) request: Request,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    /// The name under which the token limit was sent.
    limit: &'static str,
    shape: Shape,
}

impl Call {
    /// What is wrong with a field of the request, under the name that the field has in the body.
    pub(super) fn named(&self) -> impl Fn(Error) -> Error + use<> {
        let (limit, shape) = (self.limit, self.shape);
        move |mut error| {
            let name = match (error.param.as_deref(), shape) {
                (Some("query" | "prompt"), Shape::Chat) => "messages",
                (Some("query"), Shape::Completion) => "prompt",
                (Some("separator"), _) => "hypic.separator",
                (Some("mode"), _) => "hypic.mode",
                (Some("max_tokens"), _) => {
                    error.message = error.message.replacen("max_tokens", limit, 1);
                    limit
                }
                _ => return error,
            };
            error.param = Some(name.to_owned());
            error
        }
    }
}

/// Read the body of a request for the model `served`.
pub(super) fn read_call(body: Value, shape: Shape, served: &str) -> Result<Call, Failure> {
    let mut body = Fields::body(body)?;
    check_model(&mut body, served)?;
    let n = body.take("n")?.unwrap_or(1);
    refuse_unsupported(&mut body, n)?;
    let stream = body.take("stream")?.unwrap_or(false);
    let include_usage = match body.fields("stream_options")? {
        Some(mut options) => options.take("include_usage")?.unwrap_or(false),
        None => false,
    };
    let mut hypic = match body.fields("hypic")? {
        Some(fields) => fields,
        None => Fields::object("hypic".into(), Value::Object(Map::new()))?,
    };
    let prompt = match shape {
        Shape::Chat => prompt::chat(&mut body, &mut hypic)?,
        Shape::Completion => prompt::completion(&mut body, &mut hypic)?,
    };
    let options = options(&mut hypic)?;
    if let Some(name) = hypic.leftover() {
        let message = format!(
            "unknown field {name}: 'hypic' has segments, separator, mode, compose, seam, anchor, salt and special_tokens"
        );
        return Err(Error::invalid(name, message).into());
    }
    let (max_tokens, limit) = max_tokens(&mut body, shape)?;
    let request = Request {
        prompt,
        options,
        sampling: sampling(&mut body)?,
        n,
        max_tokens,
        stop: stop(&mut body)?,
        stop_at_eos: !body.take("ignore_eos")?.unwrap_or(false),
        logprobs: logprobs(&mut body, shape)?,
        deadline: None,
        tenant: None,
    };
    Ok(Call { request, stream, include_usage, limit, shape })
}

/// The failure for any model but the one that is served.
pub(super) fn unknown_model(id: &str, served: &str) -> Failure {
    let message = format!("the model '{id}' does not exist: this server has '{served}'");
    let error = Error { param: Some("model".into()), ..Error::new(ErrorKind::NotFound, message) };
    Failure::from(error).with_status(StatusCode::NOT_FOUND).with_code("model_not_found")
}

fn check_model(body: &mut Fields, served: &str) -> Result<(), Failure> {
    match body.take::<String>("model")? {
        Some(id) if id != served => Err(unknown_model(&id, served)),
        _ => Ok(()),
    }
}

fn refuse_unsupported(body: &mut Fields, n: u32) -> Result<(), Error> {
    for (name, neutral) in REFUSED {
        let Some(value) = body.value(name) else { continue };
        let harmless = is_empty(&value) || neutral.iter().any(|text| same(&value, text));
        if !harmless {
            return Err(Error::invalid(*name, format!("{name} is not supported: leave it out")));
        }
    }
    // The best of as many answers as are returned is all of them.
    match body.take::<u32>("best_of")? {
        Some(best_of) if best_of != 1 && best_of != n => {
            Err(Error::invalid("best_of", "best_of other than n is not supported: leave it out"))
        }
        _ => Ok(()),
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(s) => s.is_empty(),
        Value::Array(a) => a.is_empty(),
        Value::Object(o) => o.is_empty(),
        Value::Bool(true) | Value::Number(_) => false,
    }
}

fn same(value: &Value, json: &str) -> bool {
    let neutral: Value = serde_json::from_str(json).expect("the table holds JSON");
    match (value.as_f64(), neutral.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => *value == neutral,
    }
}

fn options(hypic: &mut Fields) -> Result<PromptOptions, Error> {
    Ok(PromptOptions {
        mode: hypic.parse("mode")?,
        compose: hypic.parse("compose")?,
        seam: hypic.take("seam")?,
        anchor: hypic.parse("anchor")?,
        salt: hypic.take("salt")?,
        separator: hypic.take("separator")?,
        special_tokens: hypic.take("special_tokens")?.unwrap_or(false),
    })
}

fn sampling(body: &mut Fields) -> Result<Sampling, Error> {
    Ok(Sampling {
        temperature: body.take("temperature")?,
        top_k: top_k(body)?,
        top_p: body.take("top_p")?,
        min_p: body.take("min_p")?,
        presence_penalty: body.take("presence_penalty")?,
        frequency_penalty: body.take("frequency_penalty")?,
        repetition_penalty: body.take("repetition_penalty")?,
        logit_bias: logit_bias(body)?,
        // A negative seed is as good as any other.
        seed: body.take::<i64>("seed")?.map(i64::cast_unsigned),
    })
}

/// Elsewhere -1 keeps all tokens, here 0 does; both are understood.
fn top_k(body: &mut Fields) -> Result<Option<u32>, Error> {
    let Some(k) = body.take::<i64>("top_k")? else {
        return Ok(None);
    };
    if k == -1 {
        return Ok(Some(0));
    }
    let message = || Error::invalid("top_k", format!("top_k is {k}: it must be 0 (all) or a number of tokens"));
    u32::try_from(k).map(Some).map_err(|_| message())
}

fn logit_bias(body: &mut Fields) -> Result<Vec<(u32, f32)>, Error> {
    let Some(biases) = body.take::<Map<String, Value>>("logit_bias")? else {
        return Ok(Vec::new());
    };
    let entry = |(key, value): (String, Value)| {
        let name = format!("logit_bias.{key}");
        let id = key.parse().map_err(|_| Error::invalid(&name, format!("'{key}' in logit_bias is no token id")))?;
        Ok((id, convert(&name, value)?))
    };
    biases.into_iter().map(entry).collect()
}

/// The limit, and the name under which it was sent.
fn max_tokens(body: &mut Fields, shape: Shape) -> Result<(Option<u32>, &'static str), Error> {
    const OLD: &str = "max_tokens";
    const NEW: &str = "max_completion_tokens";
    match (body.take(OLD)?, body.take(NEW)?, shape) {
        (Some(a), Some(b), _) if a != b => {
            Err(Error::invalid(OLD, format!("{OLD} is {a} and {NEW} is {b}: send one of them")))
        }
        (None, None, Shape::Completion) => Ok((Some(COMPLETION_TOKENS), OLD)),
        (None, Some(new), _) => Ok((Some(new), NEW)),
        (old, ..) => Ok((old, OLD)),
    }
}

fn stop(body: &mut Fields) -> Result<Vec<String>, Error> {
    match body.value("stop") {
        None => Ok(Vec::new()),
        Some(Value::String(stop)) => Ok(vec![stop]),
        Some(list @ Value::Array(_)) => convert("stop", list),
        Some(_) => Err(Error::invalid("stop", "stop must be a text or a list of texts")),
    }
}

fn logprobs(body: &mut Fields, shape: Shape) -> Result<Option<u32>, Error> {
    let (name, count) = match shape {
        Shape::Completion => ("logprobs", completion_logprobs(body)?),
        Shape::Chat => {
            let wanted = body.take("logprobs")?.unwrap_or(false);
            match body.take::<u32>("top_logprobs")? {
                Some(top) if top > 0 && !wanted => {
                    return Err(Error::invalid("top_logprobs", "top_logprobs needs logprobs to be true"));
                }
                top => ("top_logprobs", wanted.then_some(top.unwrap_or(0))),
            }
        }
    };
    match count {
        Some(k) if k > MAX_LOGPROBS => {
            Err(Error::invalid(name, format!("{name} is {k}: ask for at most {MAX_LOGPROBS}")))
        }
        count => Ok(count),
    }
}

fn completion_logprobs(body: &mut Fields) -> Result<Option<u32>, Error> {
    match body.value("logprobs") {
        None | Some(Value::Bool(false)) => Ok(None),
        Some(Value::Bool(true)) => Err(Error::invalid("logprobs", "logprobs is a number here: 0 to 20")),
        Some(count) => convert("logprobs", count).map(Some),
    }
}
