//! Reading JSON objects field by field, so that every complaint names the field it is about. Fields
//! that are `null` count as absent.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::api::Error;

/// An object that is being read.
pub(super) struct Fields {
    map: Map<String, Value>,
    path: String,
}

impl Fields {
    /// The fields of a request's body.
    pub(super) fn body(value: Value) -> Result<Self, Error> {
        match value {
            Value::Object(map) => Ok(Fields { map, path: String::new() }),
            _ => Err(Error {
                param: None,
                ..Error::invalid("", "the body must be a JSON object, such as {\"model\": ...}")
            }),
        }
    }

    /// The fields of the object `value` at `path`.
    pub(super) fn object(path: String, value: Value) -> Result<Self, Error> {
        match value {
            Value::Object(map) => Ok(Fields { map, path }),
            _ => Err(Error::invalid(&path, format!("{path} must be an object"))),
        }
    }

    /// The full name of a field.
    pub(super) fn name(&self, field: &str) -> String {
        if self.path.is_empty() { field.to_owned() } else { format!("{}.{field}", self.path) }
    }

    /// Take a field as it is; `None` if absent or null.
    pub(super) fn value(&mut self, field: &str) -> Option<Value> {
        self.map.remove(field).filter(|v| !v.is_null())
    }

    /// Take a field as a `T`.
    pub(super) fn take<T: DeserializeOwned>(&mut self, field: &str) -> Result<Option<T>, Error> {
        let Some(value) = self.value(field) else {
            return Ok(None);
        };
        convert(&self.name(field), value).map(Some)
    }

    /// Take a field that has one of several names.
    pub(super) fn parse<T: std::str::FromStr<Err = String>>(&mut self, field: &str) -> Result<Option<T>, Error> {
        let Some(text) = self.take::<String>(field)? else {
            return Ok(None);
        };
        text.parse().map(Some).map_err(|why| Error::invalid(self.name(field), why))
    }

    /// Take a field that is an object.
    pub(super) fn fields(&mut self, field: &str) -> Result<Option<Fields>, Error> {
        let Some(value) = self.value(field) else {
            return Ok(None);
        };
        Fields::object(self.name(field), value).map(Some)
    }

    /// The name of any field that is left.
    pub(super) fn leftover(&self) -> Option<String> {
        self.map.keys().next().map(|field| self.name(field))
    }
}

/// Read the value at `path` as a `T`.
pub(super) fn convert<T: DeserializeOwned>(path: &str, value: Value) -> Result<T, Error> {
    serde_json::from_value(value)
        .map_err(|why| Error::invalid(path, format!("{path}: {}", in_json_terms(why.to_string()))))
}

/// A complaint of serde without the names of Rust's types, which say nothing to a client.
fn in_json_terms(why: String) -> String {
    const TERMS: [(&str, &str); 3] =
        [("u32", "a whole number, 0 or more"), ("i64", "a whole number"), ("f32", "a number")];
    let found = TERMS.iter().find_map(|(rust, json)| Some((why.strip_suffix(rust)?, json)));
    found.map(|(before, json)| format!("{before}{json}")).unwrap_or(why)
}
