//! The prompt of an HTTP request and its segments. Text that a client did not mark stays together:
//! nothing is split by guesswork.

use serde_json::Value;

use super::fields::{Fields, convert};
use crate::api::{Error, Message, Part, Prompt};

/// `messages`, with the parts that are segments marked.
pub(super) fn chat(body: &mut Fields, hypic: &mut Fields) -> Result<Prompt, Error> {
    let all_parts = match hypic.value("segments") {
        None => false,
        Some(Value::String(s)) if s == "parts" => true,
        Some(_) => {
            let message = "hypic.segments is \"parts\" for chats; lists of segments belong to /v1/completions";
            return Err(Error::invalid("hypic.segments", message));
        }
    };
    let messages = match body.value("messages") {
        Some(Value::Array(messages)) => messages,
        Some(_) => return Err(Error::invalid("messages", "messages must be a list of messages")),
        None => {
            return Err(Error::invalid("messages", "messages is missing: send at least one message"));
        }
    };
    let last = messages.len().saturating_sub(1);
    let read = |(index, value)| {
        let default = all_parts.then_some(if index == last { Unmarked::AllButLast } else { Unmarked::All });
        message(format!("messages[{index}]"), value, default)
    };
    messages.into_iter().enumerate().map(read).collect::<Result<_, _>>().map(Prompt::Chat)
}

/// Which parts of a message are segments although they do not say so.
#[derive(Clone, Copy, PartialEq)]
enum Unmarked {
    All,
    AllButLast,
}

fn message(path: String, value: Value, unmarked: Option<Unmarked>) -> Result<Message, Error> {
    let mut fields = Fields::object(path, value)?;
    for refused in ["tool_calls", "function_call", "audio"] {
        let name = fields.name(refused);
        match fields.value(refused) {
            None => {}
            Some(Value::Array(list)) if list.is_empty() => {}
            Some(_) => return Err(Error::invalid(&name, format!("{name} is not supported"))),
        }
    }
    let role_name = fields.name("role");
    let role = match fields.take::<String>("role")? {
        // OpenAI's newer name of the same thing; templates know the older one.
        Some(role) if role == "developer" => "system".to_owned(),
        Some(role) => role,
        None => return Err(Error::invalid(&role_name, format!("{role_name} is missing"))),
    };
    let path = fields.name("content");
    let (content, parts) = match fields.value("content") {
        None => (Vec::new(), false),
        Some(Value::String(text)) => (vec![Part { text, segment: false }], false),
        Some(Value::Array(list)) => (content_parts(&path, list, unmarked)?, true),
        Some(_) => {
            return Err(Error::invalid(&path, format!("{path} must be a text or a list of parts")));
        }
    };
    Ok(Message { role, content, parts })
}

fn content_parts(path: &str, list: Vec<Value>, unmarked: Option<Unmarked>) -> Result<Vec<Part>, Error> {
    let last = list.len().saturating_sub(1);
    let read = |(index, value)| {
        let default = match unmarked {
            None => false,
            Some(Unmarked::All) => true,
            Some(Unmarked::AllButLast) => index != last,
        };
        part(format!("{path}[{index}]"), value, default)
    };
    list.into_iter().enumerate().map(read).collect()
}

fn part(path: String, value: Value, default: bool) -> Result<Part, Error> {
    if let Value::String(text) = value {
        return Ok(Part { text, segment: default });
    }
    let mut fields = Fields::object(path, value)?;
    let type_name = fields.name("type");
    match fields.take::<String>("type")?.as_deref() {
        Some("text") | None => {}
        Some(other) => {
            return Err(Error::invalid(
                &type_name,
                format!("{type_name}: parts of type '{other}' are not supported, only 'text'"),
            ));
        }
    }
    let text_name = fields.name("text");
    let text = fields.take("text")?.ok_or_else(|| Error::invalid(&text_name, format!("{text_name} is missing")))?;
    let Some(mut hypic) = fields.fields("hypic")? else {
        return Ok(Part { text, segment: default });
    };
    let segment = hypic.take("segment")?.unwrap_or(default);
    match hypic.leftover() {
        Some(name) => Err(Error::invalid(&name, format!("unknown field {name}: a part's 'hypic' has only segment"))),
        None => Ok(Part { text, segment }),
    }
}

/// `hypic.segments` and `prompt`.
pub(super) fn completion(body: &mut Fields, hypic: &mut Fields) -> Result<Prompt, Error> {
    let query = query(body.value("prompt"))?;
    let segments = match hypic.value("segments") {
        None => Vec::new(),
        Some(Value::Array(segments)) => segments,
        Some(_) => {
            let message = "hypic.segments must be a list of texts, or of lists of token ids";
            return Err(Error::invalid("hypic.segments", message));
        }
    };
    let path = |index| format!("hypic.segments[{index}]");
    match query {
        Query::Text(query) => {
            let text = |(index, value)| match value {
                Value::String(text) => Ok(text),
                _ => Err(Error::invalid(path(index), format!("{} must be text, as prompt is", path(index)))),
            };
            let segments = segments.into_iter().enumerate().map(text).collect::<Result<_, _>>()?;
            Ok(Prompt::Raw { segments, query })
        }
        Query::Tokens(query) => {
            let ids = |(index, value)| match value {
                ids @ Value::Array(_) => convert(&path(index), ids),
                _ => Err(Error::invalid(path(index), format!("{} must be token ids, as prompt is", path(index)))),
            };
            let segments = segments.into_iter().enumerate().map(ids).collect::<Result<_, _>>()?;
            Ok(Prompt::Tokens { segments, query, anchor: None })
        }
    }
}

enum Query {
    Text(String),
    Tokens(Vec<u32>),
}

fn query(prompt: Option<Value>) -> Result<Query, Error> {
    let invalid = |message| Err(Error::invalid("prompt", message));
    match prompt {
        None => invalid("prompt is missing: send a text or a list of token ids"),
        Some(Value::String(text)) if text.is_empty() => invalid("prompt is empty: it needs at least one token"),
        Some(Value::String(text)) => Ok(Query::Text(text)),
        Some(Value::Array(mut list)) => match list.first() {
            None => invalid("prompt is empty: it needs at least one token"),
            Some(Value::Number(_)) => convert("prompt", Value::Array(list)).map(Query::Tokens),
            Some(Value::String(_) | Value::Array(_)) if list.len() == 1 => query(list.pop()),
            Some(_) => invalid("several prompts in one request are not supported: send one request for each"),
        },
        Some(_) => invalid("prompt must be a text or a list of token ids"),
    }
}
