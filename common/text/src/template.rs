//! Chat templates: Jinja as model releases use it.
//!
//! The environment is the one that the reference library sets up: trimmed blocks, loop controls, Python's string and
//! dict methods, `raise_exception`, `strftime_now`, `tojson` without HTML escapes, `{% generation %}` blocks. What can
//! go wrong: a template that does not parse, and one that refuses the messages (its own text is passed on).

use std::fmt::Write as _;

use chrono::NaiveDateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior, Value};
use serde_json::Value as Json;

use crate::error::TextError;
use crate::pyjson::tojson;

const TEMPLATE: &str = "chat_template";

/// Depth of nested calls and blocks after which a template is taken to run in circles.
const RECURSION_LIMIT: usize = 200;

/// A model's chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    special_tokens: Vec<(String, String)>,
}

/// What a rendering is made of.
#[derive(Clone, Copy, Debug)]
pub struct RenderInput<'a> {
    /// The messages, as an array of objects.
    pub messages: &'a Json,
    /// Whether the template opens the assistant's turn at the end.
    pub add_generation_prompt: bool,
    /// Further variables; they may not replace `messages`.
    pub variables: &'a serde_json::Map<String, Json>,
    /// The local time that `strftime_now` shows.
    pub now: NaiveDateTime,
}

impl ChatTemplate {
    /// Compiles a template. `special_tokens`: by name (`bos_token`, ...), as the template refers to them.
    ///
    /// # Errors
    /// When the source does not parse; `origin` names the model in the message.
    pub fn new(source: &str, special_tokens: &[(String, String)], origin: &str) -> Result<Self, TextError> {
        let mut environment = Environment::new();
        environment
            .set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(internal)?);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_recursion_limit(RECURSION_LIMIT);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|out, state, value| match value.kind() {
            ValueKind::Bool => Ok(out.write_str(if value.is_true() { "True" } else { "False" })?),
            ValueKind::None => Ok(out.write_str("None")?),
            _ => minijinja::escape_formatter(out, state, value),
        });
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, format!("{REFUSAL}{message}")))
        });
        environment.add_template_owned(TEMPLATE, without_generation_blocks(source)).map_err(|error| {
            TextError::file(format!("the chat template of {origin} does not parse: {error:#}; fix the template's text"))
        })?;
        Ok(Self { environment, source: source.to_owned(), special_tokens: special_tokens.to_vec() })
    }

    /// The template's source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// When the template raises an exception or cannot handle the messages.
    pub fn render(&self, input: RenderInput<'_>) -> Result<String, TextError> {
        let mut variables: Vec<(String, Value)> =
            self.special_tokens.iter().map(|(name, text)| (name.clone(), Value::from(text.clone()))).collect();
        for name in ["tools", "documents"] {
            variables.push((name.to_owned(), Value::from(())));
        }
        variables.push(("add_generation_prompt".to_owned(), Value::from(input.add_generation_prompt)));
        variables.extend(input.variables.iter().map(|(name, value)| (name.clone(), to_value(value))));
        variables.push(("messages".to_owned(), to_value(input.messages)));
        let now = input.now;
        let strftime = move |format: String| -> Result<String, Error> {
            let mut text = String::new();
            write!(text, "{}", now.format(&format)).map_err(|_| {
                Error::new(ErrorKind::InvalidOperation, format!("strftime_now does not know the format {format:?}"))
            })?;
            Ok(text)
        };
        variables.push(("strftime_now".to_owned(), Value::from_function(strftime)));
        let template = self.environment.get_template(TEMPLATE).map_err(internal)?;
        template.render(Value::from_pairs(variables)).map_err(refused)
    }
}

/// Marks messages of `raise_exception`, which are for the client, among other errors.
const REFUSAL: &str = "refused: ";

fn refused(error: Error) -> TextError {
    if let Some(message) = error.detail().and_then(|detail| detail.strip_prefix(REFUSAL)) {
        return TextError::template(format!("the chat template refuses the messages: {message}"));
    }
    TextError::template(format!(
        "the chat template cannot render the messages: {error}; check roles and contents, or send a raw prompt"
    ))
}

fn internal(error: Error) -> TextError {
    TextError::template(format!("the chat template could not be set up: {error}"))
}

/// JSON as template values, with the order of keys kept.
fn to_value(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(flag) => Value::from(*flag),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(signed), _) => Value::from(signed),
            (None, Some(unsigned)) => Value::from(unsigned),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => Value::from(items.iter().map(to_value).collect::<Vec<_>>()),
        Json::Object(fields) => Value::from_pairs(fields.iter().map(|(key, value)| (key.as_str(), to_value(value)))),
    }
}

/// `{% generation %}` blocks mark the assistant's text for training and render as their content.
fn without_generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let (before, tag) = rest.split_at(open);
        out.push_str(before);
        let Some(length) = tag.find("%}").map(|at| at + 2) else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(length);
        let name = tag[2..length - 2].trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        match name {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}
