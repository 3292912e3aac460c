//! `config.json`, read key by key: a wrong or missing key is refused by its full name.

use serde_json::Value;

use crate::ModelError;

/// Largest extent that a configuration may name: far above any model, and small enough that products of
/// three do not overflow.
pub(crate) const MAX_SIZE: usize = 1 << 20;

/// A `config.json`, or an object in it.
#[derive(Clone, Debug)]
pub struct Config {
    file: String,
    at: String,
    value: Value,
}

impl Config {
    /// Parse the text of a `config.json`.
    ///
    /// # Errors
    /// If it is not a JSON object.
    pub fn parse(text: &str) -> Result<Self, ModelError> {
        Self::parse_file("config.json", text.as_bytes())
    }

    /// Parse the bytes of the JSON file `file`, which is named in messages.
    ///
    /// # Errors
    /// If they are not UTF-8 text that holds one JSON object.
    pub fn parse_file(file: &str, bytes: &[u8]) -> Result<Self, ModelError> {
        let broken = |problem: String| ModelError::checkpoint(file, problem);
        let text = std::str::from_utf8(bytes).map_err(|e| broken(format!("is not UTF-8 text: {e}")))?;
        // Some editors begin a file with a byte order mark.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let value: Value = serde_json::from_str(text)
            .or_else(|e| serde_json::from_str(&infinity_quoted(text)).map_err(|_| e))
            .map_err(|e| broken(format!("is not valid JSON: {e}")))?;
        if !value.is_object() {
            return Err(broken("must hold a JSON object ({ ... })".to_string()));
        }
        Ok(Config { file: file.to_string(), at: String::new(), value })
    }

    /// The text model's part: `text_config` where there is one, else the whole.
    ///
    /// # Errors
    /// If `text_config` is no object.
    pub fn text(&self) -> Result<Self, ModelError> {
        Ok(self.object("text_config")?.unwrap_or_else(|| self.clone()))
    }

    /// The object at `key`, if there is one.
    ///
    /// # Errors
    /// If it is something else.
    pub fn object(&self, key: &str) -> Result<Option<Self>, ModelError> {
        self.typed(key, "an object", |v| {
            v.is_object().then(|| Config { file: self.file.clone(), at: self.name(key), value: v.clone() })
        })
    }

    /// That the value at `key` is wrong.
    pub fn wrong(&self, key: &str, problem: impl Into<String>) -> ModelError {
        ModelError::Config { file: self.file.clone(), key: self.name(key), problem: problem.into() }
    }

    /// That the value at `key` asks for something that is not served.
    pub fn unsupported(&self, key: &str, problem: impl std::fmt::Display) -> ModelError {
        let value = self.get(key).unwrap_or(&Value::Null);
        ModelError::Unsupported(format!("{}: {} = {value} ({problem})", self.file, self.name(key)))
    }

    /// The value at `key`; JSON null counts as absent.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.value.get(key).filter(|v| !v.is_null())
    }

    /// The keys that have a value.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        let fields = self.value.as_object().into_iter().flatten();
        fields.filter(|(_, value)| !value.is_null()).map(|(key, _)| key.as_str())
    }

    /// The full name of `key`, for messages.
    pub fn name(&self, key: &str) -> String {
        if self.at.is_empty() { key.to_string() } else { format!("{}.{key}", self.at) }
    }

    fn typed<T>(&self, key: &str, what: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Option<T>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let typed = read(value).ok_or_else(|| self.wrong(key, format!("must be {what}, is {}", shortened(value))))?;
        Ok(Some(typed))
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, ModelError> {
        value.ok_or_else(|| self.wrong(key, "is missing"))
    }

    /// A whole number, if the key is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn opt_usize(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.typed(key, "a whole number", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    /// An extent: a whole number from 1 to 2^20.
    ///
    /// # Errors
    /// If it is missing or something else.
    pub fn size(&self, key: &str) -> Result<usize, ModelError> {
        self.required(key, self.opt_size(key)?)
    }

    /// An extent, if the key is there.
    ///
    /// # Errors
    /// If it is something else than a whole number from 1 to 2^20.
    pub fn opt_size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.opt_size_within(key, MAX_SIZE)
    }

    /// An extent with a bound of its own, if the key is there.
    ///
    /// # Errors
    /// If it is something else than a whole number from 1 to `most`.
    pub fn opt_size_within(&self, key: &str, most: usize) -> Result<Option<usize>, ModelError> {
        match self.opt_usize(key)? {
            Some(n) if !(1..=most).contains(&n) => Err(self.wrong(key, format!("must be from 1 to {most}, is {n}"))),
            size => Ok(size),
        }
    }

    /// A list of extents, if the key is there.
    ///
    /// # Errors
    /// If it is something else than a list of whole numbers from 1 to 2^20.
    pub fn opt_sizes(&self, key: &str) -> Result<Option<Vec<usize>>, ModelError> {
        self.typed(key, &format!("a list of whole numbers from 1 to {MAX_SIZE}"), |v| {
            let size =
                |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (1..=MAX_SIZE).contains(n));
            v.as_array()?.iter().map(size).collect()
        })
    }

    /// A number, if the key is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn opt_f64(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// A number.
    ///
    /// # Errors
    /// If it is missing or something else.
    pub fn f64(&self, key: &str) -> Result<f64, ModelError> {
        self.required(key, self.opt_f64(key)?)
    }

    /// A truth value, if the key is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// A text, if the key is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn opt_str(&self, key: &str) -> Result<Option<String>, ModelError> {
        self.typed(key, "a string", |v| v.as_str().map(str::to_string))
    }

    /// A list of texts, if the key is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn opt_strings(&self, key: &str) -> Result<Option<Vec<String>>, ModelError> {
        self.typed(key, "a list of strings", |v| {
            v.as_array()?.iter().map(|s| s.as_str().map(str::to_string)).collect::<Option<Vec<_>>>()
        })
    }

    /// A token id or a list of them; empty if absent.
    ///
    /// # Errors
    /// If it is something else.
    pub fn token_ids(&self, key: &str) -> Result<Vec<u32>, ModelError> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let ids = self.typed(key, "a token id or a list of them", |v| match v {
            Value::Array(list) => list.iter().map(id).collect::<Option<Vec<_>>>(),
            one => id(one).map(|n| vec![n]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    /// Refuse any value at `key` but `expected` (or none).
    ///
    /// # Errors
    /// If it has another.
    pub fn only(&self, key: &str, expected: &Value) -> Result<(), ModelError> {
        match self.get(key) {
            Some(v) if v != expected => Err(self.unsupported(key, format_args!("only {expected} is served"))),
            _ => Ok(()),
        }
    }
}

/// A value for a message: long ones are cut.
fn shortened(value: &Value) -> String {
    const MOST: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// The text with `Infinity` outside of strings as a string of its own: Python writes the number so, and JSON has none.
fn infinity_quoted(text: &str) -> String {
    const WORD: &str = "Infinity";
    let mut quoted = String::with_capacity(text.len() + 2);
    let (mut in_string, mut escaped) = (false, false);
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        if !in_string && rest.starts_with(WORD) {
            quoted.extend(["\"", WORD, "\""]);
            rest = &rest[WORD.len()..];
            continue;
        }
        in_string ^= next == '"' && !escaped;
        escaped = in_string && next == '\\' && !escaped;
        quoted.push(next);
        rest = &rest[next.len_utf8()..];
    }
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_infinite_number_is_read_as_python_writes_it() {
        let config = Config::parse(r#"{"a": [0.0, Infinity], "b": "\"Infinity, ", "c": 1}"#).expect("a configuration");
        assert_eq!(config.get("a"), Some(&serde_json::json!([0.0, "Infinity"])));
        assert_eq!(config.get("b"), Some(&serde_json::json!("\"Infinity, ")));
        let error = Config::parse(r#"{"a": Infinite}"#).expect_err("no JSON").to_string();
        assert!(error.contains("is not valid JSON"), "{error}");
    }
}
