//! `config.json`, read key by key: a wrong or missing key is refused by its full name.

use serde_json::Value;

use crate::ModelError;

/// A `config.json`, or an object in it.
#[derive(Clone, Debug)]
pub struct Config {
    at: String,
    value: Value,
}

impl Config {
    /// Parse the text of a `config.json`.
    ///
    /// # Errors
    /// If it is not a JSON object.
    pub fn parse(text: &str) -> Result<Self, ModelError> {
        let value: Value =
            serde_json::from_str(text).map_err(|e| ModelError::config("(file)", format!("not valid JSON: {e}")))?;
        if !value.is_object() {
            return Err(ModelError::config("(file)", "must be a JSON object"));
        }
        Ok(Config {
            at: String::new(),
            value,
        })
    }

    /// The text model's part: `text_config` where there is one, else the whole.
    pub fn text(&self) -> Self {
        self.object("text_config").unwrap_or_else(|| self.clone())
    }

    /// The object at `key`, if there is one.
    pub fn object(&self, key: &str) -> Option<Self> {
        let value = self.value.get(key)?;
        value.is_object().then(|| Config {
            at: self.name(key),
            value: value.clone(),
        })
    }

    /// The value at `key`; JSON null counts as absent.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.value.get(key).filter(|v| !v.is_null())
    }

    /// The full name of `key`, for messages.
    pub fn name(&self, key: &str) -> String {
        if self.at.is_empty() {
            key.to_string()
        } else {
            format!("{}.{key}", self.at)
        }
    }

    fn typed<T>(&self, key: &str, what: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Option<T>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let typed =
            read(value).ok_or_else(|| ModelError::config(self.name(key), format!("must be {what}, is {value}")))?;
        Ok(Some(typed))
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, ModelError> {
        value.ok_or_else(|| ModelError::config(self.name(key), "is missing"))
    }

    /// A whole number, if the key is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn opt_usize(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.typed(key, "a whole number", |v| {
            v.as_u64().and_then(|n| usize::try_from(n).ok())
        })
    }

    /// A whole number of at least 1.
    ///
    /// # Errors
    /// If it is missing or something else.
    pub fn size(&self, key: &str) -> Result<usize, ModelError> {
        match self.required(key, self.opt_usize(key)?)? {
            0 => Err(ModelError::config(self.name(key), "must be at least 1, is 0")),
            n => Ok(n),
        }
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
            v.as_array()?
                .iter()
                .map(|s| s.as_str().map(str::to_string))
                .collect::<Option<Vec<_>>>()
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
            Some(v) if v != expected => {
                let name = self.name(key);
                Err(ModelError::Unsupported(format!(
                    "{name} = {v} in config.json (only {expected} is served)"
                )))
            }
            _ => Ok(()),
        }
    }
}
