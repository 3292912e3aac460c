//! Messages on their way into the template: contents in the form that the template handles, separators taken out.
//!
//! A content goes as the client sent it, as a string or as a list of parts. Whether the template handles lists is asked
//! by rendering the same short text both ways: only if both give the same is the list sent, else the joined string. A
//! template that knows lists only gets strings as lists of one part. What can go wrong: the template refuses.

use std::collections::HashMap;

use chrono::NaiveDateTime;
use serde_json::{Map, Value as Json, json};

use crate::error::TextError;
use crate::prompt::{ChatPrompt, Content, Message, Part};
use crate::template::{ChatTemplate, RenderInput};

/// A text that stands for any content when the template is asked how it treats contents.
const PROBE: &str = "\u{F0000}";

/// Roles of a request that the template is asked about; a request with more is served without asking about the rest.
pub(crate) const MOST_ROLES: usize = 8;

/// The template with a request's settings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TemplateView<'a> {
    pub(crate) template: &'a ChatTemplate,
    /// Whether the template loses contents that are strings and handles lists of parts.
    pub(crate) strings_as_parts: bool,
    pub(crate) variables: &'a Map<String, Json>,
    pub(crate) add_generation_prompt: bool,
    pub(crate) now: NaiveDateTime,
}

impl TemplateView<'_> {
    pub(crate) fn render(&self, messages: &Json, variables: &Map<String, Json>) -> Result<String, TextError> {
        let add_generation_prompt = self.add_generation_prompt;
        self.template.render(RenderInput { messages, add_generation_prompt, variables, now: self.now })
    }

    /// The rendering of turns with plain contents.
    pub(crate) fn render_turns(&self, turns: &[Turn]) -> Result<String, TextError> {
        let messages = turns.iter().map(|turn| turn.to_json(|_, text| text.to_owned(), |_, leaf| leaf.text.clone()));
        self.render(&Json::Array(messages.collect()), self.variables)
    }

    /// Whether the template loses a user's string and shows a user's list of parts.
    pub(crate) fn loses_strings(&self) -> bool {
        let shows = |shape: Shape| {
            let turn = Turn { shape, ..Turn::of_text("user", PROBE, false) };
            self.render_turns(&[turn]).is_ok_and(|rendering| rendering.contains(PROBE))
        };
        !shows(Shape::Text) && shows(Shape::Parts)
    }

    /// Whether messages of this role may have lists of parts as contents, in this conversation.
    fn handles_parts(&self, turns: &[Turn], role: &str) -> bool {
        let rendering_as = |shape: Shape| {
            let probes = turns.iter().map(|turn| {
                let same_role = turn.role == role;
                let text = if same_role { PROBE } else { "x" };
                let mut probe = turn.with_text(text, self.strings_as_parts);
                if same_role && probe.shape != Shape::Null {
                    probe.shape = shape;
                }
                probe
            });
            self.render_turns(&probes.collect::<Vec<_>>())
        };
        match (rendering_as(Shape::Text), rendering_as(Shape::Parts)) {
            (Ok(as_text), Ok(as_parts)) => {
                as_text == as_parts || (!as_text.contains(PROBE) && as_parts.contains(PROBE))
            }
            (Err(_), Ok(as_parts)) => as_parts.contains(PROBE),
            _ => false,
        }
    }

    /// The request's messages as turns.
    pub(crate) fn turns(&self, prompt: &ChatPrompt) -> Vec<Turn> {
        let separator = prompt.separator.as_deref();
        let mut turns: Vec<Turn> =
            prompt.messages.iter().map(|message| Turn::new(message, separator, self.strings_as_parts)).collect();
        let mut known: HashMap<String, bool> = HashMap::new();
        for index in 0..turns.len() {
            let sent_as_list = matches!(prompt.messages[index].content, Some(Content::Parts(_)));
            if !sent_as_list {
                continue;
            }
            let role = turns[index].role.clone();
            let handles = match known.get(&role) {
                Some(handles) => *handles,
                None if known.len() >= MOST_ROLES => false,
                None => self.handles_parts(&turns, &role),
            };
            known.insert(role, handles);
            if !handles {
                turns[index].join();
            }
        }
        turns
    }
}

/// How a content is sent to the template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Null,
    Text,
    Parts,
}

/// One text of a content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Leaf {
    pub(crate) text: String,
    /// Where segments begin or end, byte offsets in `text`, ascending.
    pub(crate) marks: Vec<usize>,
}

impl Leaf {
    fn new(part: &Part, separator: Option<&str>) -> Self {
        let mut leaf = Leaf::default();
        let separated: Vec<&str> = match separator {
            Some(separator) => part.text.split(separator).collect(),
            None => vec![part.text.as_str()],
        };
        leaf.marks.extend(part.segment.then_some(0));
        for (index, text) in separated.iter().enumerate() {
            leaf.marks.extend((index > 0).then_some(leaf.text.len()));
            leaf.text.push_str(text);
        }
        leaf.marks.extend(part.segment.then_some(leaf.text.len()));
        leaf
    }

    /// The range of the text without the white space around it; `0..0` when there is nothing else.
    pub(crate) fn trimmed(&self) -> std::ops::Range<usize> {
        let end = self.text.trim_end().len();
        let start = if end == 0 { 0 } else { self.text.len() - self.text.trim_start().len() };
        start..end
    }
}

/// One message on its way into the template.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    pub(crate) role: String,
    pub(crate) shape: Shape,
    /// The texts of the content; one unless `shape` is `Parts`, none if it is `Null`.
    pub(crate) leaves: Vec<Leaf>,
    extra: Map<String, Json>,
}

impl Turn {
    fn new(message: &Message, separator: Option<&str>, strings_as_parts: bool) -> Self {
        let leaf = |part: &Part| Leaf::new(part, separator);
        let (shape, leaves) = match &message.content {
            None => (Shape::Null, Vec::new()),
            Some(Content::Parts(parts)) => (Shape::Parts, parts.iter().map(leaf).collect()),
            Some(Content::Text(text)) => {
                let shape = if strings_as_parts { Shape::Parts } else { Shape::Text };
                (shape, vec![leaf(&Part { text: text.clone(), segment: false })])
            }
        };
        Self { role: message.role.clone(), shape, leaves, extra: message.extra.clone() }
    }

    pub(crate) fn of_text(role: &str, text: &str, as_parts: bool) -> Self {
        Self::new(&Message::text(role, text), None, as_parts)
    }

    /// The same turn with another content.
    pub(crate) fn with_text(&self, text: &str, as_parts: bool) -> Self {
        if self.shape == Shape::Null {
            return self.clone();
        }
        Self { extra: self.extra.clone(), ..Self::of_text(&self.role, text, as_parts) }
    }

    /// Makes one string of a list of parts.
    fn join(&mut self) {
        let mut joined = Leaf::default();
        for leaf in self.leaves.drain(..) {
            let shift = joined.text.len();
            joined.marks.extend(leaf.marks.iter().map(|mark| mark + shift));
            joined.text.push_str(&leaf.text);
        }
        self.leaves.push(joined);
        self.shape = Shape::Text;
    }

    pub(crate) fn is_assistant(&self) -> bool {
        self.role == "assistant"
    }

    /// Every client string of the turn.
    pub(crate) fn strings(&self) -> Vec<&str> {
        let mut strings = vec![self.role.as_str()];
        strings.extend(self.leaves.iter().map(|leaf| leaf.text.as_str()));
        self.extra.iter().for_each(|(key, value)| {
            strings.push(key);
            collect_strings(value, &mut strings);
        });
        strings
    }

    /// The message for the template, with every client string passed through `string` and every content text through
    /// `content` (with its index).
    pub(crate) fn to_json(
        &self,
        string: impl Fn(StringKind, &str) -> String,
        content: impl Fn(usize, &Leaf) -> String,
    ) -> Json {
        let mut texts = self.leaves.iter().enumerate().map(|(index, leaf)| content(index, leaf));
        let content = match self.shape {
            Shape::Null => Json::Null,
            Shape::Text => Json::String(texts.next().unwrap_or_default()),
            Shape::Parts => texts.map(|text| json!({"type": "text", "text": text})).collect(),
        };
        let mut message = Map::new();
        message.insert("role".to_owned(), Json::String(string(StringKind::Role, &self.role)));
        message.insert("content".to_owned(), content);
        for (key, value) in &self.extra {
            if !message.contains_key(key) {
                message.insert(key.clone(), map_strings(value, &|text| string(StringKind::Field, text)));
            }
        }
        Json::Object(message)
    }
}

/// Which string of a message it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StringKind {
    Role,
    Field,
}

pub(crate) fn collect_strings<'a>(value: &'a Json, strings: &mut Vec<&'a str>) {
    match value {
        Json::String(text) => strings.push(text),
        Json::Array(items) => items.iter().for_each(|item| collect_strings(item, strings)),
        Json::Object(fields) => fields.iter().for_each(|(key, value)| {
            strings.push(key);
            collect_strings(value, strings);
        }),
        Json::Null | Json::Bool(_) | Json::Number(_) => {}
    }
}

/// The same value with every string in it mapped, names of fields below the top included.
pub(crate) fn map_strings(value: &Json, map: &impl Fn(&str) -> String) -> Json {
    match value {
        Json::String(text) => Json::String(map(text)),
        Json::Array(items) => items.iter().map(|item| map_strings(item, map)).collect(),
        Json::Object(fields) => {
            Json::Object(fields.iter().map(|(key, value)| (map(key), map_strings(value, map))).collect())
        }
        other => other.clone(),
    }
}
